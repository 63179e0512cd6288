"""P-DQN learns golf, whose strokes are a club and how hard it hits."""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PDQNPolicy, PDQNSettings
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
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("examples.golf:Golf", env_num=8)
POLICY = PDQNSettings(
    model={"actor_hidden_sizes": [64, 64], "critic_hidden_sizes": [64, 64]},
    batch_size=128,
    discount=0.95,
    learning_rate_actor=3e-4,
    eps=Schedule.linear(1.0, 0.05, decay=8_000),
)


def make_policy(env: EnvSettings = ENV, policy: PDQNSettings = POLICY, seed: int = 0) -> PDQNPolicy:
    """Build a P-DQN policy."""
    return PDQNPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "golf_pdqn",
    max_env_step: Count = 40_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: PDQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=64),
    buffer: TensorBufferSettings = TensorBufferSettings(40_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=16),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=200, every_train_iter=250, stop_value=-3.5
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train P-DQN to play golf with few strokes.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
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
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
