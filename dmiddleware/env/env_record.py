"""The record of an env in a run's ``config.yaml``, and the settings that build the env again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmiddleware.callable_names import callable_named, is_described, name_of, recorded
from dmiddleware.env.factory import EnvSettings
from dmiddleware.errors import ConfigError

__all__ = ["env_name", "env_record", "recorded_env"]


def env_name(settings: EnvSettings) -> str:
    """Return the id of an env, or the name of what makes it, ``module:name``."""
    return settings.maker if isinstance(settings.maker, str) else name_of(settings.maker)


def env_record(settings: EnvSettings) -> dict[str, Any]:
    """Return which env this is, as YAML can hold it.

    Whatever the settings hold, this raises nothing.

    Returns:
        ``id``, ``env_kwargs`` and ``wrappers``; also ``mode`` and ``backend``, where they select
        another implementation of the env.
    """
    record: dict[str, Any] = {
        "id": env_name(settings),
        "env_kwargs": recorded(settings.env_kwargs),
        "wrappers": [
            wrapper if isinstance(wrapper, str) else name_of(wrapper)
            for wrapper in settings.wrappers
        ],
    }
    if settings.mode == "vector":
        record["mode"] = settings.mode
    if settings.backend != "gymnasium":
        record["backend"] = settings.backend
    return record


def recorded_env(record: Mapping[str, Any]) -> EnvSettings:
    """Return settings of one env as :func:`env_record` describes it.

    Raises:
        ConfigError: if the record does not name an env, or something in it cannot be imported, or
            was not plain data; the message names it.
    """
    name = record.get("id")
    if not isinstance(name, str) or "<" in name:
        raise ConfigError(
            "it does not name an env by its id, nor a function at the top level of a module"
            + (f", but has {name}" if name else "")
        )
    wrappers = record.get("wrappers") or ()
    for wrapper in wrappers:
        callable_named(wrapper)
    kwargs = record.get("env_kwargs") or {}
    for path, value in _described_in(kwargs, "env_kwargs"):
        raise ConfigError(f"its {path} was {value}, which no file can hold")
    options = {key: record[key] for key in ("mode", "backend") if key in record}
    return EnvSettings(name, env_num=1, env_kwargs=kwargs, wrappers=wrappers, **options)


def _described_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each object that was not plain data."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _described_in(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _described_in(item, f"{path}[{index}]")
    elif is_described(value):
        yield path, value
