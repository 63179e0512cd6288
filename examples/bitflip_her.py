"""Deep Q-learning on 30 bits that must be flipped to a goal, with hindsight experience replay."""

from typing import Literal

from dmiddleware import Task
from dmiddleware.data import HindsightReplay, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rl import Schedule
from examples.bit_flipping import compute_reward, reached
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

ENV = "examples.bit_flipping:BitFlipping-v0"


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy that sees the bits and the goal."""
    return DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        model={"encoder_hidden_sizes": [256]},
        discount=0.98,
        target_update_freq=1,
        target_tau=0.05,
        eps=Schedule.linear(0.2, 0.02, decay=150_000),
        batch_size=128,
    )


def main(
    seed: int = 0,
    exp_name: str = "bitflip_her",
    max_env_step: int = 300_000,
    algo: Literal["her", "dqn"] = "her",
) -> ExperimentResult:
    """Train DQN to flip 30 bits to a goal, with hindsight (her) or without (dqn)."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    hindsight = HindsightReplay(compute_reward, compute_terminated=reached)
    buffer = TensorBuffer(
        200_000,
        follow_episodes=True,
        transform=hindsight if algo == "her" else None,
        seed=seed,
    )
    with Task(seed=seed) as task:
        collect_env, eval_env = (
            make_env_manager(ENV, env_num=n, mode="vector", seed=task.seed_for(role))
            for n, role in ((16, "collector"), (50, "evaluator"))
        )
        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=480))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=40))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=100, every_train_iter=2000, stop_value=-14.5
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
