"""Configs: EasyDict defaults on classes, merged along the class hierarchy and strictly checked."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from easydict import EasyDict

from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest

__all__ = ["Configurable", "merge_config", "check_value"]


class Configurable:
    """A class that is configured by an EasyDict.

    A subclass states its defaults in the class attribute ``config``; a key of a base class need not
    be repeated. What the user gives is merged into the defaults and checked: an unknown key, or a
    value of another type than its default's, is a :class:`~dmiddleware.errors.ConfigError`.

    A default of ``None`` accepts a value of any type, and ``None`` is accepted for any default but
    True and False. Keys named in ``config_open`` (full dotted paths) hold dictionaries whose keys
    the class does not know in advance.
    """

    config: ClassVar[dict[str, Any]] = {}
    config_open: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults, merged from the base classes down.

        Returns:
            The defaults, with ``cfg_type`` set to the class's name and ``Dict``.
        """
        merged: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            _deep_update(merged, vars(base).get("config", {}))
        merged["cfg_type"] = f"{cls.__name__}Dict"
        return EasyDict(copy.deepcopy(merged))

    @classmethod
    def merged_config(cls, cfg: Mapping[str, Any] | None = None) -> EasyDict:
        """Return the defaults with ``cfg`` merged in, checked.

        Args:
            cfg: what differs from the defaults; None changes nothing.

        Raises:
            ConfigError: for an unknown key (the nearest known one is named), a wrong type, or an
                impossible value.
        """
        open_paths: set[str] = set()
        for base in cls.__mro__:
            open_paths.update(vars(base).get("config_open", ()))
        merged = merge_config(
            cls.default_config(), cfg or {}, owner=cls.__name__, open_paths=open_paths
        )
        cls.check_config(merged)
        return merged

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible values; subclasses extend it with :func:`check_value`."""


def merge_config(
    default: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    owner: str = "config",
    open_paths: Iterable[str] = (),
) -> EasyDict:
    """Merge ``given`` into ``default`` and check it.

    Args:
        default: known keys and their default values.
        given: what differs; ``type`` and ``import_names`` are accepted at the top, since registries
            read them.
        owner: what the config is for, named in messages.
        open_paths: dotted paths whose dictionaries take any key.

    Raises:
        ConfigError: for an unknown key or a wrong type, with the key's full path; also if ``given``
            is no dictionary.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{owner}: the config must be a dictionary, got {given!r:.100}")
    merged = copy.deepcopy(dict(default))
    _merge_into(merged, given, path="", owner=owner, open_paths=frozenset(open_paths))
    return EasyDict(merged)


def check_value(condition: bool, path: str, value: object, wanted: str) -> None:
    """Refuse the value at ``path`` unless ``condition`` holds.

    Raises:
        ConfigError: with the path, the value and what is wanted instead.
    """
    if not condition:
        raise ConfigError(f"{path} must be {wanted}, got {value!r}")


def _merge_into(
    target: dict[str, Any],
    given: Mapping[str, Any],
    *,
    path: str,
    owner: str,
    open_paths: frozenset[str],
) -> None:
    for key, value in given.items():
        full = f"{path}{key}"
        if key not in target:
            if not path and key in ("type", "import_names"):
                target[key] = value
                continue
            raise ConfigError(_unknown_key(full, str(key), target, owner))
        default = target[key]
        if isinstance(default, Mapping):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{owner}: {full} must be a dictionary, got {value!r}")
            if full in open_paths:
                target[key] = _deep_update(dict(default), value)
            else:
                inner = dict(default)
                _merge_into(inner, value, path=f"{full}.", owner=owner, open_paths=open_paths)
                target[key] = inner
        else:
            _check_type(default, value, full, owner)
            target[key] = copy.deepcopy(value)


def _check_type(default: Any, value: Any, full: str, owner: str) -> None:
    # None switches off what has a number; a switch itself is either on or off.
    is_off = value is None and not isinstance(default, bool)
    if default is None or is_off or _type_fits(default, value):
        return
    raise ConfigError(
        f"{owner}: {full} must be of type {type(default).__name__} like its default {default!r}, "
        f"got {value!r} of type {type(value).__name__}"
    )


def _type_fits(default: Any, value: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, numbers.Real):
        # 1e9 and 1_000_000 mean the same to whoever writes a config.
        if isinstance(default, numbers.Integral):
            return isinstance(value, numbers.Integral) or (
                isinstance(value, float) and value.is_integer()
            )
        return isinstance(value, numbers.Real)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple)
    if callable(default):
        return callable(value)
    return isinstance(value, type(default))


def _unknown_key(full: str, key: str, known: Mapping[str, Any], owner: str) -> str:
    near = nearest(key, (str(name) for name in known), n=1)
    prefix = full[: len(full) - len(key)]
    hint = (
        f"did you mean {prefix}{near[0]}?"
        if near
        else f"known here are: {', '.join(sorted(map(str, known)))}"
    )
    return f"{owner}: unknown key {full}; {hint}"


def _deep_update(target: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        known = target.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            target[key] = _deep_update(dict(known), value)
        else:
            target[key] = copy.deepcopy(value)
    return target
