"""What a run records of its env builds the same env again, or names what it cannot import."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import yaml

from dmiddleware.env import EnvSettings, make_env
from dmiddleware.env.env_record import env_record, recorded_env
from dmiddleware.errors import ConfigError
from tests.dmiddleware.env.wrapped_envs import (
    Corridor,
    Maker,
    Mirror,
    Pay,
    Secretive,
    make_mirrored,
)

HERE = "tests.dmiddleware.env.wrapped_envs"


def layers(env: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the classes of an env and of its wrappers, with their attributes that are plain."""
    shown = []
    while True:
        plain = {
            key: one
            for key, one in vars(env).items()
            if isinstance(one, int | float | str | tuple | np.integer)
        }
        shown.append((type(env).__name__, plain))
        if not hasattr(env, "env"):
            return shown
        env = env.env


def again(settings: EnvSettings) -> EnvSettings:
    """Return the settings that a file of the record gives."""
    return recorded_env(yaml.safe_load(yaml.safe_dump(env_record(settings))))


@pytest.mark.parametrize(
    ("env", "kwargs", "wrappers"),
    [
        ("CartPole-v1", {}, []),
        ("CartPole-v1", {"max_episode_steps": 7}, [Pay]),
        (Corridor, {"length": 5}, [Mirror, functools.partial(Pay, factor=3.0)]),
        (functools.partial(Corridor, length=4), {}, [Mirror]),
        (functools.partial(Corridor, length=4), {"length": 6}, []),
        (functools.partial(Corridor, 4, goal=(1, 2)), {}, [functools.partial(Pay, factor=5)]),
        (
            functools.partial(Corridor, length=np.int64(4)),
            {},
            [functools.partial(Pay, more=(1, "a"))],
        ),
        (make_mirrored, {"length": 2}, [Pay, Pay]),
        (f"{HERE}:Corridor", {}, [f"{HERE}:Mirror", f"{HERE}:Pay(factor=-1.5)"]),
        (f"{HERE}:Corridor(5)", {}, []),
    ],
)
def test_the_same_env_is_built_again(env: Any, kwargs: Any, wrappers: Any) -> None:
    settings = EnvSettings(env, env_num=3, env_kwargs=kwargs, wrappers=wrappers)
    assert layers(make_env(again(settings))) == layers(make_env(settings))


def test_keywords_of_a_partial_are_those_of_the_env() -> None:
    settings = EnvSettings(functools.partial(Corridor, length=4), env_num=1)
    assert settings == EnvSettings(Corridor, env_num=1, env_kwargs={"length": 4})
    record = {"id": f"{HERE}:Corridor", "env_kwargs": {"length": 4}, "wrappers": []}
    assert env_record(settings) == record


def test_another_implementation_of_the_env_is_recorded() -> None:
    vector = EnvSettings("CartPole-v1", env_num=2, mode="vector")
    pool = EnvSettings("CartPole-v1", env_num=2, backend="envpool")
    assert again(vector).mode == "vector" and again(pool).backend == "envpool"
    assert again(EnvSettings("CartPole-v1", env_num=2, mode="async")).mode == "sync"


def local_wrapper(env: Any) -> Any:
    """Return a wrapper that no module has."""

    class Local(Mirror):
        """A wrapper in a function."""

    return Local


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"wrappers": [lambda env: Mirror(env)]}, "<lambda>"),
        ({"wrappers": [Pay, local_wrapper(None)]}, "Local"),
        ({"wrappers": [functools.partial(Pay, more=object())]}, "more=<unsaved: object object>"),
        ({"wrappers": [functools.partial(Pay, more=Corridor)]}, "more=<tests"),
        ({"wrappers": ["nowhere:Wrapper"]}, "nowhere:Wrapper"),
        ({"wrappers": [f"{HERE}:Nothing"]}, "Nothing"),
        ({"id": lambda: Corridor()}, "<lambda>"),
        ({"id": Maker(3)}, "Maker object"),
        ({"id": Maker(3).__call__}, "Maker.__call__"),
        ({"id": functools.partial(Corridor, np.zeros(2))}, "array"),
        ({"env_kwargs": {"goal": {"at": [np.zeros(2)]}}}, r"env_kwargs.goal.at\[0\]"),
        ({"env_kwargs": {"extra": Secretive(3)}}, "env_kwargs.extra"),
    ],
)
def test_what_no_file_can_hold_is_refused_with_its_name(options: Any, name: str) -> None:
    settings = EnvSettings(**{"id": Corridor, "env_num": 2, **options})
    assert env_record(settings) == env_record(settings)
    with pytest.raises(ConfigError, match=name):
        again(settings)


def test_wrappers_by_name_are_checked_where_envs_are_made() -> None:
    with pytest.raises(ConfigError, match=r"wrappers\[0\].*module:name"):
        EnvSettings("CartPole-v1", env_num=1, wrappers=["Mirror"])
    with pytest.raises(ConfigError, match="nowhere:W cannot be imported"):
        make_env(EnvSettings("CartPole-v1", env_num=1, wrappers=["nowhere:W"]))
