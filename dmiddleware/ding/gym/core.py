"""The classes of the old ``gym``, and Gymnasium's envs by its rules."""

from __future__ import annotations

from typing import Any, Final

import gymnasium

__all__ = [
    "ActionWrapper",
    "Env",
    "ObservationWrapper",
    "OldEnv",
    "RewardWrapper",
    "Wrapper",
]

_ANY_REWARD: Final = (-float("inf"), float("inf"))

if not hasattr(gymnasium.Env, "reward_range"):
    # Programs for gym read it of any env; Gymnasium 1.0 has dropped it.
    gymnasium.Env.reward_range = _ANY_REWARD  # type: ignore[attr-defined]


class Env:
    """An env by the old rules; ``reset`` and ``step`` are to be overridden."""

    metadata: Any = {"render_modes": []}
    reward_range: Any = _ANY_REWARD
    spec: Any = None
    action_space: Any
    observation_space: Any

    def reset(self, **options: Any) -> Any:
        """Return the first observation of an episode."""
        raise NotImplementedError(f"{type(self).__name__} has no reset")

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Return the observation, the reward, whether the episode ended, and a dictionary."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def render(self, mode: str = "human", **options: Any) -> Any:
        """Return a frame, or show one."""
        raise NotImplementedError(f"{type(self).__name__} has no render")

    def close(self) -> None:
        """Free what the env holds."""

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed the next reset."""
        return [seed]

    @property
    def unwrapped(self) -> Any:
        """The env without wrappers."""
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class OldEnv(Env):
    """An env of Gymnasium by the old rules.

    Args:
        env: the env.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self._next_seed: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def observation_space(self) -> Any:
        """The env's own."""
        return self.env.observation_space

    @property
    def action_space(self) -> Any:
        """The env's own."""
        return self.env.action_space

    @property
    def reward_range(self) -> Any:
        """The env's own if it has one: Gymnasium 1 has none."""
        return getattr(self.env.unwrapped, "reward_range", _ANY_REWARD)

    @property
    def spec(self) -> Any:
        """The env's own."""
        return self.env.spec

    @property
    def metadata(self) -> Any:
        """The env's own."""
        return self.env.metadata

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed the next reset."""
        self._next_seed = None if seed is None else int(seed)
        return [seed]

    def reset(self, *, seed: int | None = None, return_info: bool = False, **options: Any) -> Any:
        """Return the first observation; with ``return_info`` the info too."""
        first, self._next_seed = self._next_seed, None
        observation, info = self.env.reset(seed=first if seed is None else seed, **options)
        return (observation, info) if return_info else observation

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Return four values; a time limit is in the info."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated:
            info = {**info, "TimeLimit.truncated": not terminated}
        return observation, reward, bool(terminated or truncated), info

    def render(self, mode: str = "human", **options: Any) -> Any:
        """Return what the env renders in the mode that it was made with."""
        return self.env.render()

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    @property
    def unwrapped(self) -> Any:
        """Gymnasium's env without wrappers."""
        return self.env.unwrapped

    def __repr__(self) -> str:
        return f"<OldEnv{self.env}>"


class Wrapper(Env):
    """Wraps an env; what it does not define is the env's.

    Args:
        env: an env by the old rules.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    def reset(self, **options: Any) -> Any:
        """Reset the env."""
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Step the env."""
        return self.env.step(action)  # type: ignore[no-any-return]

    def render(self, mode: str = "human", **options: Any) -> Any:
        """Render the env."""
        return self.env.render(mode, **options)

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def seed(self, seed: int | None = None) -> Any:
        """Seed the env's next reset."""
        return self.env.seed(seed)

    @property
    def unwrapped(self) -> Any:
        """The env without wrappers."""
        return self.env.unwrapped


def _of_env(name: str) -> property:
    """Return an attribute that is the env's until the wrapper sets its own."""

    def read(wrapper: Any) -> Any:
        return wrapper.__dict__.get(f"_own_{name}", getattr(wrapper.__dict__["env"], name, None))

    def write(wrapper: Any, value: Any) -> None:
        wrapper.__dict__[f"_own_{name}"] = value

    return property(read, write)


for _name in ("observation_space", "action_space", "reward_range", "metadata", "spec"):
    setattr(Wrapper, _name, _of_env(_name))


class ObservationWrapper(Wrapper):
    """Changes observations by ``observation(obs)``."""

    def reset(self, **options: Any) -> Any:
        """Return the changed first observation."""
        return self.observation(self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Return the changed observation and the rest."""
        observation, reward, done, info = self.env.step(action)
        return self.observation(observation), reward, done, info

    def observation(self, observation: Any) -> Any:
        """Return the changed observation."""
        raise NotImplementedError


class RewardWrapper(Wrapper):
    """Changes rewards by ``reward(reward)``."""

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Return the changed reward and the rest."""
        observation, reward, done, info = self.env.step(action)
        return observation, self.reward(reward), done, info

    def reward(self, reward: Any) -> Any:
        """Return the changed reward."""
        raise NotImplementedError


class ActionWrapper(Wrapper):
    """Changes actions by ``action(action)``."""

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Step the env by the changed action."""
        return self.env.step(self.action(action))  # type: ignore[no-any-return]

    def action(self, action: Any) -> Any:
        """Return the changed action."""
        raise NotImplementedError

    def reverse_action(self, action: Any) -> Any:
        """Return the action that is changed into this one."""
        raise NotImplementedError
