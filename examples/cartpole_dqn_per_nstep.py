"""DQN on CartPole-v1 with prioritized replay, 5-step returns and a dueling network.

It differs from ``cartpole_dqn`` in the buffer's sampler and two settings of the policy.
"""

from dmiddleware import Task
from dmiddleware.data import PrioritySampler, TensorBuffer
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

ENV = "CartPole-v1"


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with a dueling network and 5-step returns."""
    return DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        n_step=5,
        model={"encoder_hidden_sizes": [128, 128], "dueling": True},
        learning_rate=2e-3,
        target_update_freq=64,
        eps=Schedule.linear(1.0, 0.04, decay=5_000),
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_dqn_per_nstep", max_env_step: int = 60_000
) -> ExperimentResult:
    """Train DQN on CartPole-v1 with prioritized replay and 5-step returns."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(
            max_env_step,
            sampler=PrioritySampler(
                alpha=0.6, beta=Schedule.linear(0.4, 1.0, decay=20_000, by="update")
            ),
            n_step=policy.n_step,
            seed=task.seed_for("buffer"),
        )

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=64))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=640, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
