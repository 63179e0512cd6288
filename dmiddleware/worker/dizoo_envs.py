"""The envs of DI-engine's ``dizoo`` by their names, made of envs that a package index has.

A config names such an env in ``create_config.env.type``, and its options in the section ``env``.
Each is the env of Gymnasium, ALE, MuJoCo or another package behind the wrappers that dizoo puts
around it. Where dizoo maps actions from [-1, 1] to the bounds itself, the env here declares
[-1, 1], so that they are not mapped twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np

from dmiddleware.env import atari_preprocessing
from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_minigrid import minigrid_env
from dmiddleware.worker.dizoo_teams import mujoco_team_env, spread_env
from dmiddleware.worker.dizoo_wrappers import (
    DelayedReward,
    DiscreteActions,
    Env,
    FireReset,
    ScaledActions,
    StackedPlanes,
    as_float32,
    encoded,
    made,
    no_such_env,
    optional_module,
    planes_first,
)
from dmiddleware.worker.dm_envs import bsuite_env, dm_control_env

__all__ = [
    "DIZOO_ENVS",
    "DizooEnv",
    "evaluation_env",
    "is_dizoo_env",
    "take_dizoo_env",
    "training_env",
]

_log = logging.getLogger(__name__)

Options: TypeAlias = Mapping[str, Any]

_FOOTBALL: Final = "gfootball has no release for Gymnasium, and must be compiled"
_ABSENT: Final[Mapping[str, str]] = {
    "beergame": "its env is in the files of dizoo only",
    "competitive_rl": "competitive_rl is not on a package index",
    "evogym": "Evolution Gym has no release for a current Python, and needs files that dizoo has",
    "fake_competitive_rl": "its env is in the tests of DI-engine only",
    "gfootball": _FOOTBALL,
    "gfootball-academy": _FOOTBALL,
    "gfootball_sp": _FOOTBALL,
    "gym_hybrid": "its env is in the files of dizoo only",
    "gym_pybullet_drones": "gym-pybullet-drones is not on a package index",
    "gym_soccer": "gym-soccer is not on a package index",
    "ising_model": "its env is in the files of dizoo only",
    "maze": "its env is in the files of dizoo only",
    "mbmujoco": "it is for world models, which are not here; for the env alone, set type='mujoco'",
    "mbpendulum": "it is for world models, which are not here; for the env alone, set "
    "type='pendulum'",
    "metadrive": "MetaDrive has no release for Python 3.12 or newer",
    "overcooked_game": "Overcooked-AI has no release for Gymnasium",
    "petting_zoo_pistonball": "its state is a picture, and the networks of a team read vectors",
    "pomdp": "its env is in the files of dizoo only",
    "rocket": "rocket-recycling is not on a package index",
    "slime_volley": "slimevolleygym has no release for Gymnasium",
    "smac": "SMAC needs the game StarCraft II, and is not on a package index",
    "stocks-v0": "its env is in the files of dizoo only",
    "tabmwp": "it asks a language model of a vendor",
}
"""Envs of dizoo that have no counterpart here, and why."""


@dataclass(frozen=True)
class DizooEnv:
    """An env of dizoo.

    Attributes:
        make: makes the env from its options, for training or for evaluation; the keyword arguments
            are for the env inside.
        keys: the options that it reads, each with the value of dizoo.
        unused: options of dizoo that change nothing here.
    """

    make: Callable[..., Env]
    keys: Options = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def take_dizoo_env(env: dict[str, Any], others: Collection[str]) -> None:
    """Give a section ``env`` that names an env of dizoo the ids and arguments of the one here.

    Args:
        env: the section, with ``type``.
        others: keys of the section that have a meaning for all envs.

    Raises:
        ConfigError: if the env is not here, saying why and what to do.
    """
    kind = env["type"]
    if kind in _ABSENT:
        raise ConfigError(
            f"env.type={kind!r} of dizoo is not here: {_ABSENT[kind]}; set env.id to the id of "
            "another env"
        )
    if env.get("obs_plus_prev_action_reward"):
        raise ConfigError(
            "env.obs_plus_prev_action_reward is for NGU, which is not here; leave it out"
        )
    entry = DIZOO_ENVS[kind]
    options = {key: env.pop(key) for key in entry.keys if key in env}
    unused = [key for key in env if key not in others]
    for key in unused:
        del env[key]
    unused = [key for key in unused if key not in entry.unused]
    if unused:
        _log.warning("env: dizoo's %s does not read %s", kind, ", ".join(unused))
    env["id"] = f"{__name__}:training_env"
    env["evaluator_id"] = f"{__name__}:evaluation_env"
    env["kwargs"] = {"kind": kind, "options": options}


def training_env(kind: str, options: Options, render_mode: str | None = None) -> Env:
    """Make an env of dizoo to collect data for training.

    Args:
        kind: its name, one of :data:`DIZOO_ENVS`.
        options: the options of this env that a config gives in the section ``env``.
        render_mode: see ``gymnasium.make``.

    Raises:
        ConfigError: if a package is missing, or there is no such env.
    """
    return _dizoo_env(kind, options, True, render_mode)


def evaluation_env(kind: str, options: Options, render_mode: str | None = None) -> Env:
    """Make an env of dizoo to evaluate in, with the true rewards and whole episodes.

    Args:
        kind: see :func:`training_env`.
        options: see :func:`training_env`.
        render_mode: see ``gymnasium.make``.

    Raises:
        ConfigError: if a package is missing, or there is no such env.
    """
    return _dizoo_env(kind, options, False, render_mode)


def is_dizoo_env(kind: object) -> bool:
    """Return whether dizoo has an env of this name, here or not."""
    return kind in DIZOO_ENVS or kind in _ABSENT


def _dizoo_env(kind: str, options: Options, is_train: bool, render_mode: str | None) -> Env:
    env = DIZOO_ENVS[kind]
    kwargs = {} if render_mode is None else {"render_mode": render_mode}
    return env.make({**env.keys, **options}, is_train, **kwargs)


def _plain(id: str) -> Callable[..., Env]:
    def make(options: Options, is_train: bool, **kwargs: Any) -> Env:
        return made(id, **kwargs)

    return make


def _pendulum(options: Options, is_train: bool, **kwargs: Any) -> Env:
    env = made("Pendulum-v1", **kwargs)
    if not options["continuous"]:
        return DiscreteActions(env, 11)
    return ScaledActions(env) if options["act_scale"] else env


def _lunarlander(options: Options, is_train: bool, **kwargs: Any) -> Env:
    known = {"LunarLander-v2": False, "LunarLanderContinuous-v2": True}
    id = str(options["env_id"])
    is_continuous = known.get(id.replace("-v3", "-v2"))
    if is_continuous is None:
        raise no_such_env("lunarlander", id, known)
    kwargs["continuous"] = is_continuous
    env = made("LunarLander-v3", "box2d", "Box2D", **kwargs)
    return ScaledActions(env) if is_continuous and options["act_scale"] else env


def _bipedalwalker(options: Options, is_train: bool, **kwargs: Any) -> Env:
    env = as_float32(made("BipedalWalker-v3", "box2d", "Box2D", **kwargs))
    if options["act_scale"]:
        env = ScaledActions(env)
    if options["rew_clip"] and is_train:
        env = gym.wrappers.TransformReward(env, lambda reward: max(-10.0, float(reward)))
    return env


def _carracing(options: Options, is_train: bool, **kwargs: Any) -> Env:
    kwargs["continuous"] = bool(options["continuous"])
    env = planes_first(made("CarRacing-v3", "box2d", "Box2D", **kwargs))
    return ScaledActions(env) if options["continuous"] and options["act_scale"] else env


def _cliffwalking(options: Options, is_train: bool, **kwargs: Any) -> Env:
    env = made("CliffWalking-v1", max_episode_steps=options["max_episode_steps"], **kwargs)
    return encoded(env, 48, lambda obs: (int(obs),))


def _taxi(options: Options, is_train: bool, **kwargs: Any) -> Env:
    env = made("Taxi-v4", max_episode_steps=options["max_episode_steps"], **kwargs)
    decode: Any = env.unwrapped.decode  # type: ignore[attr-defined]

    def encode(obs: Any) -> tuple[int, ...]:
        row, column, passenger, destination = decode(int(obs))
        return 5 * row + column, 25 + passenger, 30 + destination

    return encoded(env, 34, encode)


def _frozen_lake(options: Options, is_train: bool, **kwargs: Any) -> Env:
    kwargs |= {key: options[key] for key in ("desc", "map_name", "is_slippery")}
    env = made("FrozenLake-v1", **kwargs)
    n = int(env.observation_space.n)  # type: ignore[attr-defined]
    return encoded(env, n, lambda obs: ((int(obs) - 1) % n,))  # dizoo counts from 1


def _atari(options: Options, is_train: bool, **kwargs: Any) -> Env:
    id, n_frames = str(options["env_id"]), int(options["frame_stack"] or 1)
    if id.startswith("ALE/"):
        kwargs |= {"frameskip": 1, "repeat_action_probability": 0.0}
    env = made(id, "atari", "ale_py", **kwargs)
    wrapped: Env = atari_preprocessing(env, frame_stack=1, life_loss=is_train, clip_reward=is_train)
    meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
    if "FIRE" in meanings:
        wrapped = FireReset(wrapped)
    return StackedPlanes(wrapped, n_frames)


_MUJOCO: Final = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum",
    "InvertedPendulum", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip
_CONTACT_FORCES: Final = ("Ant",)
"""Envs whose observations had the forces of contacts up to version 3."""


def _mujoco(options: Options, is_train: bool, **kwargs: Any) -> Env:
    id = str(options["env_id"])
    name, _, version = id.partition("-v")
    if name not in _MUJOCO:
        raise no_such_env("mujoco", id, (f"{name}-v3" for name in _MUJOCO))
    env = _mujoco_env(name, version, **kwargs)
    if options["action_bins_per_branch"]:
        raise ConfigError(
            "env.action_bins_per_branch is for BDQ, which is not here; leave it out for an "
            "algorithm with continuous actions"
        )
    if options["use_act_scale"]:
        env = ScaledActions(env)
    if int(options["delay_reward_step"] or 0) > 1:
        env = DelayedReward(env, int(options["delay_reward_step"]))
    return env


def _mujoco_env(name: str, version: str, **kwargs: Any) -> Env:
    """Return an env of MuJoCo; versions before 4 needed mujoco-py, 4 has their rules."""
    is_old = version in ("1", "2", "3")
    if is_old and name in _CONTACT_FORCES:
        kwargs["use_contact_forces"] = True
    number = "4" if is_old else version
    return as_float32(made(f"{name}-v{number}", "mujoco", "mujoco", **kwargs))


_D4RL_MUJOCO: Final = {"ant": "Ant", "halfcheetah": "HalfCheetah", "hopper": "Hopper",
                       "walker2d": "Walker2d"}  # fmt: skip
_D4RL_ADROIT: Final = {
    "pen": "AdroitHandPen-v1", "door": "AdroitHandDoor-v1", "hammer": "AdroitHandHammer-v1",
    "relocate": "AdroitHandRelocate-v1",
}  # fmt: skip


def _d4rl(options: Options, is_train: bool, **kwargs: Any) -> Env:
    id = str(options["env_id"])
    name = id.partition("-")[0]
    if name in _D4RL_MUJOCO:
        env = _mujoco_env(_D4RL_MUJOCO[name], "3", **kwargs)
    elif name in _D4RL_ADROIT:
        env = made(_D4RL_ADROIT[name], "robotics", "gymnasium_robotics", **kwargs)
        env = as_float32(env)
    else:
        raise ConfigError(
            f"env.env_id={id!r} of D4RL has no counterpart here: D4RL's own envs need mujoco-py; "
            "envs of MuJoCo and Adroit are here"
        )
    return ScaledActions(env) if options["use_act_scale"] else env


def _bitflip(options: Options, is_train: bool, **kwargs: Any) -> Env:
    return _BitFlip(int(options["n_bits"]))


class _BitFlip(gym.Env[Any, Any]):
    """Flip one bit per step until all bits equal those of the goal.

    The observation is the bits, and then those of the goal. The reward is 1 at the goal, where the
    episode ends, and 0 before. An episode has ``n_bits`` steps at most.

    Source: Andrychowicz et al., "Hindsight Experience Replay", 2017, section 3.1, where rewards are
    one less.
    """

    def __init__(self, n_bits: int) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (2 * n_bits,), np.float32)
        self.action_space = gym.spaces.Discrete(n_bits)
        self._n_bits, self._n_steps = n_bits, 0
        self._bits = self._goal = np.zeros(n_bits, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._n_steps = 0
        self._bits = self.np_random.integers(0, 2, self._n_bits).astype(np.float32)
        self._goal = self._bits.copy()
        while (self._goal == self._bits).all():
            self._goal = self.np_random.integers(0, 2, self._n_bits).astype(np.float32)
        return np.concatenate([self._bits, self._goal]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._n_steps += 1
        self._bits[int(action)] = 1 - self._bits[int(action)]
        is_there = bool((self._bits == self._goal).all())
        is_over = self._n_steps >= self._n_bits and not is_there
        return np.concatenate([self._bits, self._goal]), float(is_there), is_there, is_over, {}


_PROCGEN: Final = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip


def _procgen(options: Options, is_train: bool, **kwargs: Any) -> Env:
    id = str(options["env_id"])
    if id not in _PROCGEN:
        raise no_such_env("procgen", id, _PROCGEN)
    if not options["control_level"]:
        raise ConfigError(
            "env.control_level=False draws a level for each episode by the seed of the program; "
            "leave it out for levels that env.start_level and env.num_levels name"
        )
    envpool = optional_module("envpool", "envpool", f"procgen's {id}")
    levels = {key: int(options[key]) for key in ("start_level", "num_levels")}

    def make(seed: int | None) -> Any:
        own = {} if seed is None else {"seed": seed % 2**31}
        try:
            return envpool.make_gymnasium(f"{id.title()}Hard-v0", num_envs=1, **levels, **own)
        except ImportError as error:  # its games are linked with Qt
            raise ConfigError(f"procgen's {id} needs Qt 5: {error}") from error

    return _PooledEnv(make)


class _PooledEnv(gym.Env[Any, Any]):
    """One env of EnvPool, made by a function of the seed, with float32 observations."""

    def __init__(self, make: Callable[[int | None], Any]) -> None:
        self._make, self._pool = make, make(None)
        space = self._pool.observation_space
        self.observation_space = gym.spaces.Box(
            space.low.astype(np.float32), space.high.astype(np.float32)
        )
        self.action_space = self._pool.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._pool.close()
            self._pool = self._make(seed)
        return self._pool.reset()[0][0].astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, rewards, terminated, truncated, _ = self._pool.step(np.array([action]))
        return (
            obs[0].astype(np.float32),
            float(rewards[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            {},
        )

    def close(self) -> None:
        self._pool.close()


DIZOO_ENVS: Final[Mapping[str, DizooEnv]] = {
    "acrobot": DizooEnv(_plain("Acrobot-v1"), unused=("env_id",)),
    "atari": DizooEnv(_atari, {"env_id": None, "frame_stack": 4}, ("is_train",)),
    "bipedalwalker": DizooEnv(
        _bipedalwalker, {"act_scale": False, "rew_clip": False}, ("env_id", "env_name")
    ),
    "carracing": DizooEnv(
        _carracing, {"continuous": False, "act_scale": False}, ("env_id", "action_clip")
    ),
    "cartpole": DizooEnv(_plain("CartPole-v0"), unused=("env_id", "env_name")),
    "cliffwalking": DizooEnv(_cliffwalking, {"max_episode_steps": 300}, ("env_id",)),
    "d4rl": DizooEnv(_d4rl, {"env_id": None, "use_act_scale": False}),
    "frozen_lake": DizooEnv(
        _frozen_lake,
        {"desc": None, "map_name": "4x4", "is_slippery": True},
        ("env_id", "save_replay_gif"),
    ),
    "lunarlander": DizooEnv(
        _lunarlander, {"env_id": "LunarLander-v2", "act_scale": False}, ("action_clip",)
    ),
    "minigrid": DizooEnv(
        minigrid_env,
        {
            "env_id": None, "max_step": 300, "flat_obs": True, "full_obs": False,
            "onehot_obs": False, "move_bonus": False,
        },
    ),
    "bitflip": DizooEnv(_bitflip, {"n_bits": None}),
    "bsuite": DizooEnv(bsuite_env, {"env_id": None}),
    "dmc2gym": DizooEnv(
        dm_control_env,
        {
            "domain_name": None, "task_name": None, "frame_skip": 4, "warp_frame": False,
            "scale": False, "clip_rewards": False, "action_repeat": 1, "frame_stack": 3,
            "from_pixels": True, "height": 84, "width": 84, "channels_first": True, "resize": 84,
        },
        ("env_id", "visualize_reward"),
    ),
    "mountain_car": DizooEnv(_plain("MountainCar-v0"), unused=("env_id",)),
    "mujoco": DizooEnv(
        _mujoco,
        {
            "env_id": None, "use_act_scale": False, "delay_reward_step": 0,
            "action_bins_per_branch": None,
        },
        ("action_clip", "env_wrapper", "save_replay_gif", "replay_path_gif"),
    ),
    "mujoco_multi": DizooEnv(
        functools.partial(mujoco_team_env, _mujoco_env),
        {
            "scenario": None, "agent_conf": None, "agent_obsk": None, "k_categories": None,
            "global_categories": None, "add_agent_id": False, "episode_limit": 1000,
        },
        ("agent_obsk_agents", "env_version", "obs_add_global_pos"),
    ),
    "pendulum": DizooEnv(_pendulum, {"act_scale": False, "continuous": True}, ("env_id",)),
    "petting_zoo": DizooEnv(
        spread_env,
        {
            "env_id": None, "n_agent": None, "n_landmark": None, "max_cycles": 25,
            "continuous_actions": False, "act_scale": False, "agent_obs_only": False,
            "agent_specific_global_state": False,
        },
        ("env_family",),
    ),
    "procgen": DizooEnv(
        _procgen,
        {"env_id": "coinrun", "control_level": True, "start_level": 0, "num_levels": 0},
        ("is_train",),
    ),
    "taxi": DizooEnv(_taxi, {"max_episode_steps": 200}, ("env_id",)),
}  # fmt: skip
"""The envs of dizoo that are here."""
