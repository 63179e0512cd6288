"""Proximal policy optimization on CartPole-v1."""

from dmiddleware import Task
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("CartPole-v1", env_num=8)
POLICY = PPOSettings(
    discount=0.98,
    gae_lambda=0.8,
    learning_rate=1e-3,
    batch_size=256,
    epoch_per_collect=15,
)


def make_policy(env: EnvSettings = ENV, policy: PPOSettings = POLICY, seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return PPOPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_ppo",
    max_env_step: Count = 120_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: PPOSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=512),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=60, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train PPO on CartPole-v1 until it is solved.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
