"""Proximal policy optimization on CartPole-v1."""

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "CartPole-v1"


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        discount=0.98,
        gae_lambda=0.8,
        learning_rate=1e-3,
        batch_size=256,
        epoch_per_collect=15,
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_ppo", max_env_step: int = 120_000
) -> ExperimentResult:
    """Train PPO on CartPole-v1 until it is solved."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=512))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=300, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
