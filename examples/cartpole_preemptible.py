"""A run that may be preempted: DQN on CartPole-v1 that continues from its newest snapshot.

Every start is the same command, the first one and those after a preemption. It also runs in many
processes, as on Slurm and Kubernetes.
"""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from examples.cartpole_dqn import ENV, make_policy
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)


def main(
    seed: int = 0, exp_name: str = "cartpole_preemptible", max_env_step: int = 60_000
) -> ExperimentResult:
    """Train DQN on CartPole-v1 until it is solved, and continue a run that was stopped."""
    policy = make_policy(seed)
    run = RunFolder.create(exp_name, resume=True)
    experiment = Experiment(run, policy)
    snapshots = SnapshotSaver(run, every_train_iter=2_000)  # and when the run is stopped
    buffer = TensorBuffer(max_env_step, n_step=policy.n_step, seed=seed)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=64))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=640, stop_value=495
            )
        )
        task.use(experiment).use(snapshots)
        task.use(TerminationChecker(max_env_step=max_env_step))
        snapshots.resume(task)  # a new run has no snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
