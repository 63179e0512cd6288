"""``BaseEnv``, and ``DingEnvWrapper``, which gives an env of gym or Gymnasium its interface."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import gymnasium
import numpy as np
from easydict import EasyDict
from gymnasium import spaces

from dmiddleware.ding.envs.common import affine_transform
from dmiddleware.ding.envs.wrappers import create_env_wrapper
from dmiddleware.ding.gym.core import Env, OldEnv
from dmiddleware.ding.gym.envs.registration import make
from dmiddleware.ding.gym.wrappers import RecordVideo
from dmiddleware.ding.registries import ENV_REGISTRY
from dmiddleware.errors import ConfigError
from dmiddleware.registry import import_modules

__all__ = [
    "BaseEnv",
    "BaseEnvTimestep",
    "DingEnvWrapper",
    "create_model_env",
    "get_default_wrappers",
    "get_env_cls",
    "get_vec_env_setting",
]


class BaseEnvTimestep(NamedTuple):
    """What a step returns: one flag for both ends of an episode, as in the old gym."""

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class BaseEnv(Env):
    """The base of DI-engine's envs: ``reset`` returns the observation, ``step`` a timestep."""

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        self._cfg: Any = cfg

    def random_action(self) -> Any:
        """Return a random action in the form that ``step`` takes."""
        action = self.action_space.sample()
        return action if isinstance(action, np.ndarray | dict) else np.asarray([action], np.int64)

    def enable_save_replay(self, replay_path: str | None = None) -> None:
        """Record videos of the episodes from now on."""
        raise NotImplementedError(f"{type(self).__name__} records no videos")

    @staticmethod
    def create_collector_env_cfg(cfg: Any) -> list[Any]:
        """Return the config of each env of the collector."""
        return [cfg for _ in range(cfg.pop("collector_env_num"))]

    @staticmethod
    def create_evaluator_env_cfg(cfg: Any) -> list[Any]:
        """Return the config of each env of the evaluator."""
        return [cfg for _ in range(cfg.pop("evaluator_env_num"))]


def get_env_cls(cfg: Mapping[str, Any]) -> Any:
    """Return the env class that ``cfg.type`` names, after importing ``cfg.import_names``."""
    import_modules(cfg.get("import_names") or ())
    return ENV_REGISTRY.get(cfg["type"])


def get_vec_env_setting(
    cfg: Any, collect: bool = True, eval_: bool = True
) -> tuple[Any, list[Any] | None, list[Any] | None]:
    """Return the env class, and the configs of the collector's and the evaluator's envs."""
    env_cls = get_env_cls(cfg)
    collector = env_cls.create_collector_env_cfg(cfg) if collect else None
    return env_cls, collector, env_cls.create_evaluator_env_cfg(cfg) if eval_ else None


def create_model_env(cfg: Any) -> Any:
    """Build the env class that ``cfg.type`` names, as the model of a model-based algorithm."""
    rest = copy.deepcopy(cfg)
    rest.pop("type")
    return get_env_cls(cfg)(**rest)


_EVAL_RETURN: Final = {"type": "eval_episode_return"}
_NEEDS_FIRE: Final = ("Pong", "Qbert", "SpaceInvader", "Montezuma")


def get_default_wrappers(
    env_wrapper_name: str, env_id: str | None = None, caller: str = "collector"
) -> list[EasyDict]:
    """Return the configs of the wrappers that a name stands for.

    Raises:
        ConfigError: for an unknown name.
    """
    if env_wrapper_name in ("default", "mujoco_default"):
        wrappers: list[dict[str, Any]] = [_EVAL_RETURN]
    elif env_wrapper_name == "gym_hybrid_default":
        wrappers = [{"type": "gym_hybrid_dict_action"}, _EVAL_RETURN]
    elif env_wrapper_name == "atari_default":
        fires = env_id is not None and any(name in env_id for name in _NEEDS_FIRE)
        wrappers = [
            {"type": "noop_reset", "kwargs": {"noop_max": 30}},
            {"type": "max_and_skip", "kwargs": {"skip": 4}},
            {"type": "episodic_life"},
            *([{"type": "fire_reset"}] if fires else []),
            {"type": "warp_frame"},
            {"type": "scaled_float_frame"},
            *([{"type": "clip_reward"}] if caller == "collector" else []),
            {"type": "frame_stack", "kwargs": {"n_frames": 4}},
            _EVAL_RETURN,
        ]
    else:
        raise ConfigError(
            f"default wrappers {env_wrapper_name!r} are unknown; use default, mujoco_default, "
            "atari_default or gym_hybrid_default"
        )
    return [EasyDict(copy.deepcopy(wrapper)) for wrapper in wrappers]


class DingEnvWrapper(BaseEnv):
    """An env of gym or Gymnasium with DI-engine's interface.

    Args:
        env: the env; None: it is made at the first reset, from ``cfg.env_id``.
        cfg: ``env_id``, ``env_wrapper`` (a name, or a list of functions and configs),
            ``act_scale`` (whether actions in [-1, 1] are scaled to the bounds), ``rew_clip``.
        seed_api: whether the env can be seeded.
        caller: ``"collector"`` or ``"evaluator"``, which have different default wrappers.
        is_gymnasium: whether ``cfg.env_id`` is made by the rules of Gymnasium; they are the same
            envs here.
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "act_scale": False, "rew_clip": False, "env_wrapper": "default", "env_id": None,
    }  # fmt: skip

    def __init__(
        self,
        env: Any = None,
        cfg: Mapping[str, Any] | None = None,
        seed_api: bool = True,
        caller: str = "collector",
        is_gymnasium: bool = False,
    ) -> None:
        self._cfg = EasyDict({**self._DEFAULTS, **dict(cfg or {})})
        self._seed_api = seed_api
        self._caller = caller
        self._env: Any = None
        self._seed: int | None = None
        self._dynamic_seed = False
        self._replay_path: str | None = None
        if env is not None:
            self._open(env)
        elif self._cfg.env_id is None:
            raise ConfigError("DingEnvWrapper needs an env, or cfg.env_id to make one")

    def _open(self, env: Any) -> None:
        if isinstance(env, gymnasium.Env):
            env = OldEnv(env)
        wrappers = self._cfg.env_wrapper
        if isinstance(wrappers, str):
            wrappers = get_default_wrappers(wrappers, self._cfg.env_id, self._caller)
        for wrapper in wrappers:
            is_config = isinstance(wrapper, Mapping)
            env = create_env_wrapper(env, wrapper) if is_config else wrapper(env)
        self._env = env

    def _opened(self) -> Any:
        if self._env is None:
            options = {} if self._replay_path is None else {"render_mode": "rgb_array"}
            self._open(make(self._cfg.env_id, **options))
        return self._env

    def reset(self, **options: Any) -> Any:
        """Return the first observation of an episode, float32 if the env's is a float."""
        env = self._opened()
        if self._replay_path is not None:
            self._env = env = RecordVideo(env, self._replay_path)
            self._replay_path = None
        if self._seed is not None:
            more = 100 * int(np.random.randint(1, 1000)) if self._dynamic_seed else 0
            if self._seed_api:
                env.seed(self._seed + more)
            env.action_space.seed(self._seed + more)
        return self._observation(env.reset())

    def step(self, action: Any) -> BaseEnvTimestep:
        """Return the timestep; the reward is float32 ``[1]``."""
        env = self._env
        action = _plain_action(action)
        if self._cfg.act_scale:
            bounds = env.action_space
            action = affine_transform(action, min_val=bounds.low, max_val=bounds.high)
        obs, reward, done, info = env.step(action)
        if self._cfg.rew_clip:
            reward = max(-10, reward)
        return BaseEnvTimestep(self._observation(obs), np.asarray([np.float32(reward)]), done, info)

    def _observation(self, obs: Any) -> Any:
        if isinstance(obs, Mapping):
            return {name: self._observation(value) for name, value in obs.items()}
        array = np.asarray(obs)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    def close(self) -> None:
        """Close the env."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def seed(self, seed: int | None = None, dynamic_seed: bool = True) -> Any:
        """Seed each reset from now on; with ``dynamic_seed``, each by another number."""
        self._seed, self._dynamic_seed = seed, dynamic_seed

    def enable_save_replay(self, replay_path: str | None = None) -> None:
        """Record videos from the next reset on, if the env renders them."""
        self._replay_path = "./video" if replay_path is None else replay_path

    def clone(self, caller: str = "collector") -> DingEnvWrapper:
        """Return another wrapper of a copy of the env."""
        cfg = copy.deepcopy(self._cfg)
        env = None if self._env is None else copy.deepcopy(self._env)
        if env is not None:
            cfg.env_wrapper = []
        return DingEnvWrapper(env, cfg, self._seed_api, caller)

    @property
    def observation_space(self) -> Any:
        """The env's own; a box of float64 is one of float32."""
        return _in_float32(self._opened().observation_space)

    @property
    def action_space(self) -> Any:
        """The env's own."""
        return self._opened().action_space

    @property
    def reward_space(self) -> spaces.Box:
        """The range of rewards, ``[1]``."""
        low, high = self._opened().reward_range
        return spaces.Box(low, high, (1,), np.float32)

    @staticmethod
    def create_collector_env_cfg(cfg: Any) -> list[Any]:
        """Return the config of each env of the collector, with ``is_train=True``."""
        return _configs(cfg, cfg.pop("collector_env_num"), is_train=True)

    @staticmethod
    def create_evaluator_env_cfg(cfg: Any) -> list[Any]:
        """Return the config of each env of the evaluator, with ``is_train=False``."""
        return _configs(cfg, cfg.pop("evaluator_env_num"), is_train=False)

    def __repr__(self) -> str:
        return f"DingEnvWrapper({self._cfg.env_id or self._env!r})"


ENV_REGISTRY.register("ding_env_wrapper_generated")(DingEnvWrapper)


def _configs(cfg: Any, number: int, *, is_train: bool) -> list[Any]:
    cfg = copy.deepcopy(cfg)
    cfg["is_train"] = is_train
    return [cfg] * number


def _plain_action(action: Any) -> Any:
    if isinstance(action, Mapping):
        return {name: _plain_action(part) for name, part in action.items()}
    if isinstance(action, np.ndarray):
        is_single = action.ndim == 0 or (action.shape == (1,) and action.dtype.kind == "i")
        return action.item() if is_single else action
    return int(action) if isinstance(action, np.integer) else action


def _in_float32(space: Any) -> Any:
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(
            space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32
        )
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _in_float32(part) for name, part in space.items()})
    return space


EnvFn = Callable[[], BaseEnv]
