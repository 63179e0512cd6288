"""Recurrent PPO on CartPole without velocities, which have to be inferred from what came before."""

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import RecurrentPPOPolicy
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

ENV = "examples.memory_envs:CartPolePositions-v1"


def make_policy(seed: int = 0) -> RecurrentPPOPolicy:
    """Build an actor and a critic on an LSTM."""
    return RecurrentPPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        model={"hidden_size": 64},
        obs_norm=True,
        reward_norm=True,
        learning_rate=1e-3,
        batch_size=256,
        epoch_per_collect=8,
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_memory_ppo", max_env_step: int = 200_000
) -> ExperimentResult:
    """Train recurrent PPO on CartPole without velocities until it is solved."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=16, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=1024))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=320, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
