"""Reading the files of tuned settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import yaml

from dmiddleware.errors import RegistryError
from dmiddleware.registry import nearest

__all__ = ["Entry", "Result", "TunedAlgorithm", "algorithms", "tuned"]

_FILES: Final = files("dmiddleware.zoo")
_SUFFIX: Final = ".yaml"


@dataclass(frozen=True)
class Result:
    """What trainings with tuned settings gave.

    Attributes:
        best: mean return in fresh episodes of the policies with the best evaluation, over seeds.
        last: the same of the policies at the end of the runs.
        n_seed: number of trainings.
        env_step: environment steps of a training, on average; 0: it learned from data.
        train_s: seconds of a training, on average.
        record: the name of the records in tests/results.
        note: what differed; empty: nothing.
    """

    best: float
    last: float
    n_seed: int
    env_step: int
    train_s: float
    record: str
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """The settings of an algorithm in an environment.

    Attributes:
        options: the arguments of the program that differ from its own defaults, by name; those of
            settings are dictionaries.
        result: what they gave; None: nobody has recorded it.
    """

    options: Mapping[str, Any]
    result: Result | None


@dataclass(frozen=True)
class TunedAlgorithm:
    """The settings of an algorithm.

    Attributes:
        name: its name, as policies are registered.
        program: the function of :mod:`middleware.programs` that trains it.
        defaults: the options for an environment without an entry.
        atari: the options for the games of Atari that have no entry.
        entries: by the id of the environment.
    """

    name: str
    program: str
    defaults: Mapping[str, Any]
    atari: Mapping[str, Any]
    entries: Mapping[str, Entry]


@functools.cache
def algorithms() -> tuple[str, ...]:
    """Return the names of all algorithms, in alphabetical order."""
    names = (one.name for one in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


@functools.cache
def tuned(algo: str) -> TunedAlgorithm:
    """Return the settings of an algorithm.

    Raises:
        RegistryError: if there is no such algorithm; the message names the nearest ones.
    """
    if algo not in algorithms():
        near = nearest(algo.lower().replace("-", "_"), algorithms())
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(algorithms())}"
        )
        raise RegistryError(f"there is no algorithm {algo}; {hint}")
    found = yaml.safe_load((_FILES / f"{algo}{_SUFFIX}").read_text(encoding="utf-8"))
    return TunedAlgorithm(
        algo,
        found["program"],
        found.get("defaults") or {},
        found.get("atari") or {},
        {env: _entry(one) for env, one in (found.get("envs") or {}).items()},
    )


def _entry(found: Mapping[str, Any]) -> Entry:
    result = found.get("result")
    return Entry(
        {name: value for name, value in found.items() if name != "result"},
        None if result is None else Result(**result),
    )
