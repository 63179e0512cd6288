"""Soft Q imitation learning on CartPole-v1, from the steps of an expert and without rewards.

The expert is the DQN policy of ``examples.cartpole_dqn``.
"""

from dmiddleware import Task
from dmiddleware.data import Batch, MixedReplay, TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNSettings, Policy, SQLPolicy, SQLSettings
from dmiddleware.program import run_program
from dmiddleware.rollout import RolloutCollector
from dmiddleware.settings import Count, Whole
from examples import cartpole_dqn
from middleware import (
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = cartpole_dqn.ENV
POLICY = SQLSettings(
    model={"encoder_hidden_sizes": [128, 128], "norm": "layer"},
    learning_rate=1e-3,
    target_update_freq=64,
    batch_size=128,
)


def make_policy(env: EnvSettings = ENV, policy: SQLSettings = POLICY, seed: int = 0) -> SQLPolicy:
    """Build the policy that imitates the expert."""
    return SQLPolicy.for_env(make_env_manager(env), policy, seed=seed)


def expert_rows(expert: Policy, env: EnvSettings, n_rows: int, seed: int) -> Batch:
    """Return steps of the expert, which acts greedily."""
    with make_env_manager(env, seed=seed) as envs:
        return RolloutCollector(expert, envs).collect(n_rows)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_sqil",
    max_env_step: Count = 60_000,
    n_demonstration: Count = 4_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    expert: DQNSettings = cartpole_dqn.POLICY,
    policy: SQLSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=30, every_train_iter=640, stop_value=475, stop_evaluations=3
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Imitate an expert of CartPole-v1 that was trained with DQN.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps, of the expert and of the imitation.
        n_demonstration: steps of the expert that are shown.
        eval_env_num: number of envs that evaluate.
    """
    trained = cartpole_dqn.main(
        seed, f"{exp_name}_expert", max_env_step, env, policy=expert, experiment=experiment
    )
    teacher = cartpole_dqn.make_policy(env, expert, seed)
    teacher.collect_mode.load_state_dict(trained.load_best())
    shown = expert_rows(teacher, env, n_demonstration, seed)

    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        own = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))
        replay = MixedReplay(own, shown, reward="sqil")
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
