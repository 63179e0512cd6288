"""Proximal policy optimization on one environment of each extra with single agents.

The extra "envpool", for example: ``python -m examples.environments --extra envpool``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from gymnasium.wrappers import FlattenObservation

from dmiddleware import Task
from dmiddleware.env import BaseEnvManager, atari_preprocessing, make_env_manager
from dmiddleware.policy import PPOPolicy
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
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
Extra = Literal["atari", "box2d", "envpool", "minigrid", "mujoco", "robotics"]
FAMILIES: dict[Extra, Family] = {
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
    extra: Extra,
    seed: Whole = 0,
    exp_name: str = "environments",
    max_env_step: Count = 1_000_000,
) -> ExperimentResult:
    """Train PPO on the environment of an extra.

    Args:
        extra: the extra.
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
    """
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


if __name__ == "__main__":
    run_program(main)
