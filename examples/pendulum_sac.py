"""Soft actor-critic on Pendulum-v1."""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import SACPolicy
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "Pendulum-v1"


def make_policy(seed: int = 0) -> SACPolicy:
    """Build an actor of torques and two critics."""
    return SACPolicy.for_env(
        make_env_manager(ENV, env_num=1), seed=seed, learning_rate_q=1e-3, learning_rate_policy=1e-3
    )


def main(
    seed: int = 0, exp_name: str = "pendulum_sac", max_env_step: int = 10_000
) -> ExperimentResult:
    """Train SAC on Pendulum-v1 until it swings up and stays there."""
    policy = make_policy(seed)
    buffer = TensorBuffer(max_env_step, seed=seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=1, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=8, random_steps=256))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=8))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=2500, stop_value=-150
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
