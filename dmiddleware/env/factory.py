"""Making env managers from the id of an env."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
)

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from dmiddleware.callable_names import (
    callable_named,
    is_callable_name,
    is_recordable,
)
from dmiddleware.env.async_manager import AsyncEnvManager
from dmiddleware.env.contract import what_instead
from dmiddleware.env.envpool_manager import EnvPoolManager
from dmiddleware.env.manager import BaseEnvManager
from dmiddleware.env.pettingzoo import ParallelEnvAdapter, is_parallel_env
from dmiddleware.env.sync_manager import EnvFn, SyncEnvManager
from dmiddleware.env.vector_manager import VectorEnvManager
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.registry import nearest
from dmiddleware.settings import (
    BY_PROGRAM,
    Convert,
    Count,
    Positive,
    Settings,
    Whole,
    takes_options,
)

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = ["EnvSettings", "make_env", "make_env_manager"]

P = ParamSpec("P")

Wrapper: TypeAlias = Callable[[Any], Any] | str
Maker: TypeAlias = EnvSpec | Callable[..., Any]

# How ids and entry points of optional envs begin, the module that they need, and its extra.
_OPTIONAL: Final = (
    ("ALE/", "ale_py", "atari"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
    ("gymnasium_robotics:", "gymnasium_robotics", "robotics"),
    ("gymnasium.envs.mujoco.", "mujoco", "mujoco"),
    ("gymnasium.envs.box2d.", "Box2D", "box2d"),
)


@dataclasses.dataclass(frozen=True)
class _OneForEach:
    """Functions that make one env each; called, the first one makes it."""

    makers: tuple[EnvFn, ...]

    def __call__(self, **kwargs: Any) -> Any:
        return self.makers[0](**kwargs)


def _as_env(env: Any) -> Any:
    if isinstance(env, str) or callable(env):
        return env
    if isinstance(env, list | tuple) and env and all(map(callable, env)):
        return _OneForEach(tuple(env))
    instead = "" if env is None else what_instead(env)
    if not instead and isinstance(env, gym.Env):
        name = type(env.unwrapped).__name__
        instead = f"an env already; pass a function that makes a new one: lambda: {name}()"
    raise ConfigError(
        "it must be the id of an env, a function that makes one, or a list of such functions, got "
        f"{env!r:.100}" + (f", which is {instead}" if instead else "")
    )


def _as_kwargs(kwargs: Any) -> Any:
    return {} if kwargs is None else kwargs


def _as_wrappers(wrappers: Any) -> Any:
    if not isinstance(wrappers, list | tuple):
        raise ConfigError(f"wrappers must be a list of wrappers, got {wrappers!r}")
    for index, wrapper in enumerate(wrappers):
        if not (callable(wrapper) or (isinstance(wrapper, str) and ":" in wrapper)):
            raise ConfigError(
                f"wrappers[{index}] must take an env and return one, or be the name of such a "
                f"function or class, module:name, got {wrapper!r:.100}"
            )
    return tuple(wrappers)


class _Seeds:
    """The annotation of seeds, which the manager checks itself."""

    words = "an integer ≥ 0, or one for each env"

    def __get_pydantic_core_schema__(self, hint: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import any_schema

        return any_schema()


class EnvSettings(Settings):
    """The options of :func:`make_env_manager`."""

    id: Annotated[str | EnvFn | Sequence[EnvFn], Convert(_as_env)] = dataclasses.field(
        kw_only=False
    )
    """An id registered with Gymnasium ("CartPole-v1", "module:Env-v0"); the name of a function or
    class that makes an env ("package.module:make_env"); or the function itself. A function is
    called once per env; with mode "vector" it makes the vector env, called once. A class of vector
    envs needs no mode, and gets `num_envs`. Keyword arguments of a `functools.partial` join
    `env_kwargs`. A list has a function for each of the `env_num`
    envs, which may differ."""
    env_num: Count
    """Number of envs."""
    mode: Literal["sync", "async", "vector"] = "sync"
    """"sync" steps the envs one after another in this process, best for envs that take
    microseconds; "async" steps them in separate processes, for envs that take milliseconds, crash
    or hang; "vector" uses the env's own vectorized implementation."""
    backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """"envpool" steps the envs in the threads of EnvPool; of the other options, only the id,
    `env_num`, `env_kwargs` and the seed can be given."""
    env_kwargs: Annotated[Mapping[str, Any], Convert(_as_kwargs)] = dataclasses.field(
        default_factory=dict
    )
    """Keyword arguments for the env."""
    wrappers: Annotated[Sequence[Wrapper], Convert(_as_wrappers)] = ()
    """Functions or classes, or their names ("package.module:Wrapper", also with plain arguments:
    "gymnasium.wrappers:TimeLimit(max_episode_steps=50)"). Each env is wrapped in them, the first
    one innermost; with mode "vector" the vector env."""
    seed: Annotated[int | Sequence[int] | None, _Seeds(), BY_PROGRAM] = None
    """An integer, from which the seed of each env is derived, or one seed per env; None leaves the
    envs unseeded."""
    max_retry: Whole = 3
    """How often one env may be restarted in a row."""
    step_timeout_s: Positive = 60.0
    """Longest duration of a step, in seconds, with mode "async"."""
    reset_timeout_s: Positive = 60.0
    """Longest duration of making and resetting an env, in seconds, with mode "async"."""
    envs_per_process: Count = 1
    """Envs that share a process, with mode "async"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.id, functools.partial):
            self._name_keywords(self.id)
        if isinstance(self.id, _OneForEach):
            self._check_list(self.id)
        if self.backend == "envpool" and not (
            isinstance(self.id, str) and self.mode == "sync" and not self.wrappers
        ):
            raise ConfigError(
                "backend='envpool' takes the id of an env and neither mode nor wrappers, because "
                "EnvPool steps its envs in C++; use its own options, in env_kwargs"
            )

    @property
    def maker(self) -> str | EnvFn:
        """The id, or a function that makes an env: of a list, the first one."""
        maker: Any = self.id  # a list has become an object that is called
        first: str | EnvFn = maker
        return first

    def _check_list(self, envs: _OneForEach) -> None:
        if self.mode == "vector":
            raise ConfigError(
                "mode='vector' takes one function, which makes all envs at once; use mode='sync' "
                "or mode='async' for a list of functions"
            )
        if len(envs.makers) != self.env_num:
            raise ConfigError(
                f"the list has {len(envs.makers)} functions, but env_num is {self.env_num}; give "
                "one function for each env"
            )

    def _name_keywords(self, made: functools.partial[Any]) -> None:
        """Move the keywords of a partial that YAML can hold into the keyword arguments."""
        moved = {key: value for key, value in made.keywords.items() if is_recordable(value)}
        rest = {key: value for key, value in made.keywords.items() if key not in moved}
        is_bare = not made.args and not rest
        maker = made.func if is_bare else functools.partial(made.func, *made.args, **rest)
        object.__setattr__(self, "id", maker)
        object.__setattr__(self, "env_kwargs", {**moved, **self.env_kwargs})


@takes_options(EnvSettings)
def make_env_manager(settings: EnvSettings) -> BaseEnvManager:
    """Create an env manager; a ``with`` block or ``launch()`` launches it.

    It takes the fields of :class:`EnvSettings`, or an object of it and the fields that differ::

        make_env_manager("CartPole-v1", env_num=8, seed=0)
        make_env_manager(EnvSettings("CartPole-v1", env_num=8), seed=0)

    A PettingZoo parallel env becomes an env of several agents, see
    :class:`~dmiddleware.env.ParallelEnvAdapter`. Modules of the optional extras are imported by
    their ids ("ALE/Pong-v5", "MiniGrid-Empty-5x5-v0"; "gymnasium_robotics:FetchReach-v4" names its
    own).

    Raises:
        ConfigError: if an option has the wrong type or an invalid value, or the env has no
            vectorized implementation ("vector"), or needs an extra that is not installed.
        RegistryError: if no env is registered under the id; the message lists the nearest ones.
    """
    manager = _make_manager(settings)
    manager.settings = settings
    return manager


def make_env(settings: EnvSettings) -> Any:
    """Make one env, as those of :func:`make_env_manager` with mode "sync" or "async".

    Raises:
        ConfigError: if the env needs an extra that is not installed.
        RegistryError: if no env is registered under the id; the message lists the nearest ones.
    """
    return _make_env(_checked_env(settings.maker), dict(settings.env_kwargs), _layers(settings))


def of_one_env(settings: EnvSettings) -> EnvSettings:
    """Return the settings of the first env alone."""
    maker = settings.id.makers[0] if isinstance(settings.id, _OneForEach) else settings.id
    return dataclasses.replace(settings, id=maker, env_num=1)


def _make_manager(settings: EnvSettings) -> BaseEnvManager:
    env_num, seed, max_retry = settings.env_num, settings.seed, settings.max_retry
    if settings.backend == "envpool":
        assert isinstance(settings.id, str)
        return EnvPoolManager(settings.id, env_num, seed=seed, env_kwargs=settings.env_kwargs)
    maker, kwargs, layers = (
        _checked_env(settings.maker), dict(settings.env_kwargs), _layers(settings),
    )  # fmt: skip
    is_vector_class = isinstance(maker, type) and issubclass(maker, gym.vector.VectorEnv)
    if is_vector_class:
        kwargs.setdefault("num_envs", env_num)
    if is_vector_class or settings.mode == "vector":
        return VectorEnvManager(
            functools.partial(_make_env, _vector_maker(maker, env_num), kwargs, layers),
            env_num,
            seed=seed,
            max_retry=max_retry,
        )
    makers = settings.id.makers if isinstance(settings.id, _OneForEach) else [maker] * env_num
    env_fns = [functools.partial(_make_env, maker, kwargs, layers) for maker in makers]
    if settings.mode == "sync":
        return SyncEnvManager(env_fns, seed=seed, max_retry=max_retry)
    return AsyncEnvManager(
        env_fns,
        seed=seed,
        max_retry=max_retry,
        step_timeout_s=settings.step_timeout_s,
        reset_timeout_s=settings.reset_timeout_s,
        envs_per_process=settings.envs_per_process,
    )


def _layers(settings: EnvSettings) -> tuple[Callable[[Any], Any], ...]:
    return tuple(
        callable_named(wrapper) if isinstance(wrapper, str) else wrapper
        for wrapper in settings.wrappers
    )


def _make_env(
    maker: Maker, kwargs: dict[str, Any], wrappers: tuple[Callable[[Any], Any], ...]
) -> Any:
    env = gym.make(maker, **kwargs) if isinstance(maker, EnvSpec) else maker(**kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return ParallelEnvAdapter(env) if is_parallel_env(env) else env


def _vector_maker(maker: Maker, env_num: int) -> Callable[..., Any]:
    if not isinstance(maker, EnvSpec):
        return maker
    if maker.vector_entry_point is None:
        raise ConfigError(
            f"{maker.id} has no vectorized implementation; use mode='sync' or mode='async'"
        )
    return functools.partial(
        gym.make_vec, maker, num_envs=env_num, vectorization_mode="vector_entry_point"
    )


def _checked_env(env: str | EnvFn) -> Maker:
    """Return the factory, or the spec of the id, which another process may not know."""
    if not isinstance(env, str):
        return env
    module, name = env.split(":", 1) if ":" in env else ("", env)
    _check_installed(env)
    try:
        if "<" in env:
            return callable_named(env)  # which refuses it
        if env.startswith(":"):
            raise ValueError("The name of the module before the colon is missing.")
        if module:
            _import(module)
            if is_callable_name(env) and (maker := _imported(env)):
                return maker
        spec = gym.spec(name)
    except (gym.error.Error, ModuleNotFoundError, ValueError) as error:
        near = nearest(name, gym.registry)
        hint = f"; nearest known: {', '.join(near)}" if near else ""
        raise RegistryError(f"no env is registered as {env!r}{hint}. {error}") from error
    _check_installed(str(spec.entry_point))
    return spec


def _imported(name: str) -> Maker | None:
    """Return what a name stands for; None: nothing that can be called, but an id may."""
    try:
        return callable_named(name)
    except ConfigError:
        return None


def _check_installed(name: str) -> None:
    """Import the module that registers an optional env, or tell how to install it."""
    for beginning, module, extra in _OPTIONAL:
        if name.startswith(beginning):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{name} needs the package {module}; run: pip install 'dmiddleware[{extra}]'"
                )
            _import(module)


def _import(module: str) -> None:
    with warnings.catch_warnings():
        # Some packages warn when they are imported; where that is an error, Box2D crashes.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        importlib.import_module(module)
