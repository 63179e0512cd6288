"""Advantage actor-critic on CartPole-v1."""

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import A2CPolicy
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


def make_policy(seed: int = 0) -> A2CPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return A2CPolicy.for_env(
        make_env_manager(ENV, env_num=1), seed=seed, learning_rate=2e-3, batch_size=128
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_a2c", max_env_step: int = 300_000
) -> ExperimentResult:
    """Train A2C on CartPole-v1 until it is solved."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=100, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
