"""Deep Q-learning on CartPole-v1: the example to read first.

The policy learns from 3-step returns, which propagate rewards faster than 1-step returns. Layer
normalization keeps the action values from growing without bound. The run ends after three
evaluations in a row that reach 475, the return at which Gymnasium calls the task solved. Each
setting is an option of the command line::

    python -m examples.cartpole_dqn --policy.learning-rate 3e-4 --buffer.size 20000 --seed 3
"""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.distributed import data_parallel, rank_and_world_size
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
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
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("CartPole-v1", env_num=8)
POLICY = DQNSettings(
    n_step=3,
    model={"encoder_hidden_sizes": [128, 128], "norm": "layer"},
    learning_rate=1e-3,
    target_update_freq=64,
    eps=Schedule.linear(1.0, 0.04, decay=5_000),
)


def make_policy(env: EnvSettings = ENV, policy: DQNSettings = POLICY, seed: int = 0) -> DQNPolicy:
    """Build the policy for the environment."""
    multi_gpu = rank_and_world_size()[1] > 1
    return DQNPolicy.for_env(make_env_manager(env), policy, seed=seed, multi_gpu=multi_gpu)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_dqn",
    max_env_step: Count = 60_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=30, every_train_iter=1280, stop_value=475, stop_evaluations=3
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=640),
) -> ExperimentResult:
    """Train DQN on CartPole-v1 until it is solved, also with several learners.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    with data_parallel() as rank, Task(seed=seed, rank=rank) as task:
        agent = make_policy(env, policy, seed)
        record = Experiment.of(experiment, exp_name, agent)
        saver = SnapshotSaver.of(snapshots, record.run)
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # only a run whose learners were restarted has a snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
