"""Reading the files of tuned settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.registry import nearest
from dmiddleware.yaml_text import read_yaml

__all__ = [
    "Entry",
    "Result",
    "TunedAlgorithm",
    "algorithms",
    "train_arguments",
    "tuned",
    "tuned_options",
]

_FILES: Final = files("dmiddleware.zoo")
_SUFFIX: Final = ".yaml"
_ATARI: Final = "ALE/"
_PREPARED: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    _ATARI: ("dmiddleware.env:make_atari_env", {"life_loss": False, "clip_reward": False}),
    "MiniGrid-": ("dmiddleware.env:make_grid_env", {}),
    "BabyAI-": ("dmiddleware.env:make_grid_env", {}),
}
"""By the beginning of an id: what makes the env, and its arguments for evaluations only."""


@dataclass(frozen=True)
class Result:
    """What trainings with tuned settings gave.

    A training whose evaluator has a ``stop_value`` ends when it reaches that value, so its result
    is the number of env steps to it. The result of any other is the returns after its budget.

    Attributes:
        n_seed: number of trainings.
        train_s: seconds of a training, on average.
        record: the name of the records in tests/results.
        n_reached: with a ``stop_value``: in how many trainings an evaluation reached it.
        steps: with a ``stop_value``: the env steps of the first and of the last of these trainings
            to reach it; None: none did, or there is no ``stop_value``.
        best: without a ``stop_value``: mean return in fresh episodes of the policies with the best
            evaluation, over seeds.
        last: the same of the policies at the end of the runs.
        env_step: without a ``stop_value``: environment steps of a training, on average; 0: it
            learned from data.
        note: what differed; empty: nothing.
    """

    n_seed: int
    train_s: float
    record: str
    n_reached: int = 0
    steps: tuple[int, int] | None = None
    best: float | None = None
    last: float | None = None
    env_step: int | None = None
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

    @property
    def stop_value(self) -> float | None:
        """The mean return of an evaluation that ends a training; None: its budget ends it."""
        value: float | None = self.options.get("evaluator", {}).get("stop_value")
        return value


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

    @property
    def main(self) -> str:
        """The program as ``--main`` of ``ditask`` names it."""
        return f"middleware.programs.{self.program}.{self.program}"


@functools.cache
def algorithms() -> tuple[str, ...]:
    """Return the names of all algorithms, in alphabetical order."""
    names = (file.name for file in _FILES.iterdir())
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
        raise RegistryError(f"unknown algorithm {algo}; {hint}")
    content = read_yaml((_FILES / f"{algo}{_SUFFIX}").read_text(encoding="utf-8"))
    return TunedAlgorithm(
        algo,
        content["program"],
        content.get("defaults") or {},
        content.get("atari") or {},
        {env: _entry(entry) for env, entry in (content.get("envs") or {}).items()},
    )


def tuned_options(algo: str, env: str) -> dict[str, Any]:
    """Return the options of a program for an algorithm and an environment, as a file has them.

    Games of Atari and MiniGrid are prepared for networks.

    Args:
        algo: the algorithm.
        env: the id of the environment.

    Raises:
        RegistryError: if there is no such algorithm; the message names the nearest ones.
        ConfigError: if the id is empty.
    """
    if not env:
        raise ConfigError("name an env, such as CartPole-v1")
    entries_of = tuned(algo)
    env_options: dict[str, Any] = {"id": env}
    evaluated: Mapping[str, Any] = {}
    for beginning, (maker, to_evaluate) in _PREPARED.items():
        if env.startswith(beginning):
            env_options, evaluated = {"id": maker, "env_kwargs": {"game": env}}, to_evaluate
    if env in entries_of.entries:
        options = dict(entries_of.entries[env].options)
    else:
        options = dict(
            entries_of.atari if env.startswith(_ATARI) and entries_of.atari else entries_of.defaults
        )
        if evaluated:
            options["eval_env_kwargs"] = dict(evaluated)
    return {"algo": algo, **options, "env": {**env_options, **options.get("env", {})}}


def train_arguments(algo: str, env: str, options: Sequence[str]) -> list[str]:
    """Return the arguments of the program that ``ditask train`` calls.

    Args:
        algo: the algorithm.
        env: the id of the environment.
        options: the options that follow; those named ``--wrapper`` become ``--env.wrappers``.

    Raises:
        ConfigError: if ``--wrapper`` has no value.
    """
    words, wrappers = iter(options), []
    rest = []
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--wrapper":
            rest.append(word)
        elif wrapper := value if equals else next(words, ""):
            wrappers.append(wrapper)
        else:
            raise ConfigError("--wrapper takes the name of a wrapper, module:name")
    wrapped = ["--env.wrappers", *wrappers] if wrappers else []
    return ["--config", f"zoo:{algo}/{env}", *rest, *wrapped]


def _entry(found: Mapping[str, Any]) -> Entry:
    options = {name: value for name, value in found.items() if name != "result"}
    result = found.get("result")
    if result is None:
        return Entry(options, None)
    steps = result.get("steps")
    return Entry(options, Result(**{**result, "steps": steps and tuple(steps)}))
