"""Deep Q-learning on CartPole-v1: the example to read first.

The policy learns from 3-step returns, which propagate rewards faster than 1-step returns.
"""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.distributed import data_parallel, rank_and_world_size
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rl import Schedule
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
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

ENV = "CartPole-v1"


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with two hidden layers."""
    return DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        n_step=3,
        model={"encoder_hidden_sizes": [128, 128]},
        learning_rate=2e-3,
        target_update_freq=64,
        multi_gpu=rank_and_world_size()[1] > 1,
        eps=Schedule.linear(1.0, 0.04, decay=5_000),
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_dqn", max_env_step: int = 60_000
) -> ExperimentResult:
    """Train DQN on CartPole-v1 until it is solved, also with several learners."""
    with data_parallel() as rank, Task(seed=seed, rank=rank) as task:
        policy = make_policy(seed)
        experiment = Experiment(exp_name, policy)
        snapshots = SnapshotSaver(experiment.run, every_train_iter=640)
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(max_env_step, n_step=policy.n_step, seed=task.seed_for("buffer"))

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
        snapshots.resume(task)  # only a run whose learners were restarted has a snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
