"""Training in two lines: an algorithm and an environment by name, with tuned settings."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import gymnasium as gym

from dmiddleware.best_effort import BestEffort
from dmiddleware.command_line import DefaultsBy, arguments_with, called_as
from dmiddleware.env import EnvSettings
from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name, unknown_option
from dmiddleware.rollout import ActingPolicy
from dmiddleware.settings import Settings, Whole, checked, cleared_by
from dmiddleware.zoo import tuned, tuned_options
from middleware.programs.code import chain_code
from middleware.programs.off_policy import off_policy
from middleware.programs.offline import offline
from middleware.programs.on_policy import on_policy
from middleware.programs.parts import make_policy
from middleware.record.experiment import ExperimentResult

__all__ = [
    "Program",
    "TrainResult",
    "program_of",
    "result_of",
    "train",
    "tuned_arguments",
]

Env: TypeAlias = str | Callable[..., gym.Env[Any, Any]]
Wrapper: TypeAlias = Callable[[Any], Any] | str
Program: TypeAlias = Callable[..., ExperimentResult]

_LIMITS: Final = ("max_env_step", "max_train_iter", "max_time_s")
"""Arguments that the TerminationChecker checks; None means no limit."""

_PROGRAMS: Final[Mapping[str, Program]] = {
    "off_policy": off_policy,
    "on_policy": on_policy,
    "offline": offline,
}


@dataclass(frozen=True, slots=True)
class TrainResult(ExperimentResult):
    """The outcome of :func:`train`.

    Attributes:
        policy: the policy with the best evaluation, as a function: ``policy(obs)`` returns an
            action.
        chain: the program as code, which can be copied, run and changed.
    """

    policy: ActingPolicy = field(repr=False, compare=False)
    chain: str = field(repr=False)


def train(
    algo: str,
    env: Env | EnvSettings,
    *,
    seed: int = 0,
    wrappers: Sequence[Wrapper] = (),
    **options: Any,
) -> TrainResult:
    """Train an algorithm in an environment.

    The settings are those of :mod:`dmiddleware.zoo` for both of them, or the algorithm's defaults
    for any environment::

        result = train("dqn", "CartPole-v1")
        action = result.policy(obs)
        print(result.chain)

    Args:
        algo: the algorithm, such as ``"dqn"``.
        env: the id of an environment, as :func:`~dmiddleware.env.make_env_manager` takes it, or a
            function that makes one, or settings with either, such as
            ``EnvSettings("CartPole-v1", env_num=16)``. Games of Atari and MiniGrid are prepared for
            networks if they are given by their ids alone.
        seed: the seed of everything random.
        wrappers: functions or classes that wrap each env, or their names, ``module:name``, the
            innermost first; after those of ``env``.
        **options: other arguments of the program (:func:`off_policy`, :func:`on_policy` or
            :func:`offline`), such as ``max_env_step``. Settings are an object, which replaces the
            tuned ones, such as ``learner=OffPolicyLearnerSettings(...)``, or a dictionary of those
            that differ, such as ``policy={"learning_rate": 3e-4}``. Offline algorithms need
            ``data``.

    Returns:
        The result, with the policy, the code of the chain, and the run's folder.

    Raises:
        RegistryError: for an unknown algorithm or environment, with the nearest known one.
        ConfigError: for an unknown option, with what was probably meant, or an invalid value, or if
            the environment needs an extra that is not installed.
        SpaceError: if the algorithm does not support the environment's spaces.
    """
    if not isinstance(algo, str):
        raise ConfigError(
            f"train: algo must be the name of an algorithm, such as 'dqn', got {algo!r:.100}; a "
            "policy of your own learns in a chain"
        )
    if not (isinstance(env, str | EnvSettings) or callable(env)):
        raise ConfigError(
            f"train: env must be the id of an env or a function that makes one, got {env!r:.100}"
        )
    seed = checked("train: seed", seed, Whole)
    if not isinstance(wrappers, list | tuple):
        raise ConfigError(f"train: wrappers must be a list of wrappers, got {wrappers!r:.100}")
    program = program_of(algo)
    values = _options(algo, env.maker if isinstance(env, EnvSettings) else env)
    chosen = {"seed": seed, **options}
    parameters = inspect.signature(program).parameters
    for name, value in chosen.items():
        if name not in parameters or name == "algo":
            raise ConfigError(_unknown(name, program, algo))
        if isinstance(value, Mapping) and isinstance(values.get(name), Mapping):
            default = parameters[name].default
            back = cleared_by(type(default), value) if isinstance(default, Settings) else {}
            value = {**values[name], **back, **value}
        elif name not in _LIMITS and not isinstance(value, Settings):
            value = _checked(name, value, program)
        values[name] = value
    if isinstance(env, EnvSettings):
        values["env"] = replace(env, wrappers=[*env.wrappers, *wrappers])
    elif wrappers:
        values["env"] = {**values["env"], "wrappers": list(wrappers)}
    objects = {name: value for name, value in values.items() if isinstance(value, Settings)}
    plain = {name: value for name, value in values.items() if name not in objects}
    arguments = arguments_with(program, plain, at=f"train {algo}") | objects
    with called_as(program, arguments):
        return result_of(program(**arguments), arguments)


def _checked(name: str, value: Any, program: Program) -> Any:
    """Return an argument, checked by its type if it has no settings, which check themselves."""
    hint = typing.get_type_hints(program, include_extras=True)[name]
    is_plain = not isinstance(inspect.signature(program).parameters[name].default, Settings)
    by_algo = any(isinstance(mark, DefaultsBy) for mark in getattr(hint, "__metadata__", ()))
    if not is_plain or by_algo:
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return checked(f"train: {name}", value, hint)


def _unknown(name: str, program: Program, algo: str) -> str:
    """Return the message for an unknown option, which may be one of the settings of another."""
    parameters = [name for name in inspect.signature(program).parameters if name != "algo"]
    groups = arguments_with(program, {"algo": algo}, at=f"train {algo}")
    settings = {
        f"{group}.{setting.name}": f'{group}={{"{setting.name}": ...}}'
        for group, value in groups.items()
        if isinstance(value, Settings)
        for setting in dataclasses.fields(value)
    }
    # What the policy has too, other groups take from it.
    settings = {
        path: place
        for path, place in settings.items()
        if path.startswith("policy.") or f"policy.{path.partition('.')[2]}" not in settings
    }
    places = [place for path, place in settings.items() if path.partition(".")[2] == name]
    if places or name in settings:
        place = " or ".join(places or [settings[name]])
        return f"train: unknown keyword {name}; give it as {place}"
    hint = unknown_name(name, [*parameters, *settings])
    if not hint.startswith(("did you mean", "here it is")):
        return unknown_option("train", name, parameters)
    for path, place in settings.items():
        hint = re.sub(rf"\b{re.escape(path)}\b", place, hint)
    return f"train: unknown keyword {name}; {hint}"


def program_of(algo: str) -> Program:
    """Return the program that trains an algorithm.

    Raises:
        RegistryError: if there is no such algorithm; the message names the nearest ones.
    """
    return _PROGRAMS[tuned(algo).program]


def tuned_arguments(algo: str, env: Env) -> dict[str, Any]:
    """Return the arguments with which :func:`train` calls a program, if nothing else is given.

    Args:
        algo: the algorithm.
        env: the id of an environment, or a function that makes one.

    Returns:
        The arguments by name, such as ``policy``, an object of the algorithm's settings.

    Raises:
        RegistryError: if there is no such algorithm; the message names the nearest ones.

    Example:
        >>> tuned_arguments("dqn", "CartPole-v1")["policy"].n_step
        3
    """
    return arguments_with(program_of(algo), _options(algo, env), at=f"the zoo, {algo}")


def _options(algo: str, env: Env) -> dict[str, Any]:
    if isinstance(env, str):
        return tuned_options(algo, env)
    defaults = tuned(algo).defaults
    return {"algo": algo, **defaults, "env": {**defaults.get("env", {}), "id": env}}


def result_of(result: ExperimentResult, arguments: Mapping[str, Any]) -> TrainResult:
    """Return a result with its policy and its chain.

    Args:
        result: of a program.
        arguments: with which the program was called.
    """
    program = tuned(arguments["algo"]).program
    policy = make_policy(*(arguments[name] for name in ("algo", "env", "policy", "seed")))
    policy.eval_mode.load_state_dict(result.load_best())
    fields = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(ExperimentResult)
    }
    chain = ""
    with BestEffort("write the chain as code", Exception):
        chain = chain_code(program, arguments, policy)
    return TrainResult(**fields, policy=ActingPolicy(policy), chain=chain)
