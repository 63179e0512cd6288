"""Proximal policy optimization on one environment of each extra with single agents.

The extra "envpool", for example: ``python -m examples.environments envpool``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
from gymnasium.wrappers import FlattenObservation

from dmiddleware import Task
from dmiddleware.env import BaseEnvManager, atari_preprocessing, make_env_manager
from dmiddleware.policy import PPOPolicy
from middleware import (
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)


def grid_only(env: Any) -> Any:
    """Reduce an observation of MiniGrid to the grid that the agent sees, as a vector."""
    from minigrid.wrappers import ImgObsWrapper

    return FlattenObservation(ImgObsWrapper(env))


@dataclass(frozen=True)
class Family:
    """An environment, and what differs from PPO's defaults.

    Attributes:
        train: makes the envs to learn in, given ``env_num`` and ``seed``.
        evaluate: makes the envs to evaluate in; None: the same.
        policy: settings of the policy.
        n_sample: env steps between updates.
    """

    train: Callable[..., BaseEnvManager]
    evaluate: Callable[..., BaseEnvManager] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    n_sample: int = 2048


# Gradually varying observations and rewards of any size.
NORMALIZED = {"obs_norm": True, "reward_norm": True}
PONG = partial(
    make_env_manager, "ALE/Pong-v5", env_kwargs={"frameskip": 1, "obs_type": "grayscale"}
)
WHOLE_GAME = partial(atari_preprocessing, life_loss=False, clip_reward=False)
FAMILIES = {
    "atari": Family(
        partial(PONG, wrappers=[atari_preprocessing]),
        partial(PONG, wrappers=[WHOLE_GAME]),
        {"learning_rate": 2.5e-4},
        n_sample=1024,
    ),
    "box2d": Family(partial(make_env_manager, "LunarLander-v3"), policy=NORMALIZED),
    "envpool": Family(
        partial(make_env_manager, "HalfCheetah-v4", backend="envpool"), policy=NORMALIZED
    ),
    "minigrid": Family(
        partial(make_env_manager, "MiniGrid-Empty-5x5-v0", wrappers=[grid_only]), policy=NORMALIZED
    ),
    "mujoco": Family(partial(make_env_manager, "InvertedPendulum-v5"), policy=NORMALIZED),
    "robotics": Family(
        partial(make_env_manager, "gymnasium_robotics:FetchReachDense-v4"), policy=NORMALIZED
    ),
}


def main(
    extra: str, seed: int = 0, exp_name: str = "environments", max_env_step: int = 1_000_000
) -> ExperimentResult:
    """Train PPO on the environment of an extra."""
    family = FAMILIES[extra]
    with Task(seed=seed) as task:
        envs = family.train(env_num=8, seed=task.seed_for("collector"))
        eval_envs = (family.evaluate or family.train)(env_num=5, seed=task.seed_for("evaluator"))
        policy = PPOPolicy.for_env(
            envs, seed=seed, **family.policy, batch_size=256, epoch_per_collect=4
        )
        experiment = Experiment(exp_name, policy)

        task.use(StepCollector(policy, envs, n_sample=family.n_sample))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(InteractionEvaluator(policy, eval_envs, n_episode=10, every_train_iter=320))
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


@click.command(help=main.__doc__)
@click.argument("extra", type=click.Choice(sorted(FAMILIES)))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--exp-name", default="environments", show_default=True, help="Folder in runs/.")
@click.option("--max-env-step", type=click.IntRange(min=1), default=1_000_000, show_default=True)
def command(extra: str, seed: int, exp_name: str, max_env_step: int) -> None:
    main(extra, seed, exp_name, max_env_step)


if __name__ == "__main__":
    command()
