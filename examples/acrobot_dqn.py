"""Deep Q-learning on Acrobot-v1: each step costs one until the tip swings above the line."""

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
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
    StepCollector,
    TerminationChecker,
)

ENV = "Acrobot-v1"


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with two hidden layers."""
    return DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        n_step=3,
        model={"encoder_hidden_sizes": [128, 128]},
        learning_rate=1e-3,
        target_update_freq=64,
        eps=Schedule.linear(1.0, 0.04, decay=10_000),
    )


def main(
    seed: int = 0, exp_name: str = "acrobot_dqn", max_env_step: int = 100_000
) -> ExperimentResult:
    """Train DQN on Acrobot-v1 until it swings up in about eighty steps."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
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
                policy, eval_env, n_episode=30, every_train_iter=1280, stop_value=-80
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
