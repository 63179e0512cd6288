"""Proximal policy optimization on Pendulum-v1, with continuous actions."""

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

ENV = "Pendulum-v1"


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build an actor with a Gaussian over torques, and a critic."""
    return PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        discount=0.9,
        learning_rate=1e-3,
        obs_norm=True,
        # Rewards are as low as -16. Scaling suits a value network whose outputs start near zero.
        reward_norm=True,
        batch_size=128,
        epoch_per_collect=10,
    )


def main(
    seed: int = 0, exp_name: str = "pendulum_ppo", max_env_step: int = 300_000
) -> ExperimentResult:
    """Train PPO on Pendulum-v1 until it swings up and stays there."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=2048))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=100, every_train_iter=1600, stop_value=-160
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
