"""A run that may be preempted: DQN on CartPole-v1 that continues from its newest snapshot.

Every start is the same command, the first one and those after a preemption. It also runs in many
processes, as on Slurm and Kubernetes.
"""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from examples.cartpole_dqn import ENV, POLICY, make_policy
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    RunFolder,
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_preemptible",
    max_env_step: Count = 60_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=640, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=2_000),
) -> ExperimentResult:
    """Train DQN on CartPole-v1 until it is solved, and continue a run that was stopped.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    run = RunFolder.create(exp_name, resume=True)
    record = Experiment.of(experiment, run, agent)
    saver = SnapshotSaver.of(snapshots, run)  # and when the run is stopped
    replay = TensorBuffer.of(buffer, seed=seed)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # a new run has no snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
