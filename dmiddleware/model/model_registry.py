"""The registry of networks, and how to build one from a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name
from dmiddleware.registry import Registry, import_modules

__all__ = ["MODEL_REGISTRY", "create_model", "parameters_of"]

MODEL_REGISTRY: Registry[type[nn.Module]] = Registry("model")
"""Registered networks; ``@MODEL_REGISTRY.register("mine")`` adds one."""


def create_model(cfg: Mapping[str, Any]) -> nn.Module:
    """Build the network that a config describes.

    Args:
        cfg: ``type`` is the registered name, ``import_names`` are modules to import first (where
            that name is registered), the other keys are keyword arguments of the class.

    Raises:
        ConfigError: if ``type`` is missing, or an option is unknown (the nearest known one is
            named) or missing.
        RegistryError: if the name is not registered.
    """
    options = {str(key): value for key, value in cfg.items()}
    import_modules(options.pop("import_names", ()) or ())
    name = options.pop("type", None)
    if name is None:
        raise ConfigError(f"a model config needs the key type, one of: {', '.join(MODEL_REGISTRY)}")
    build = MODEL_REGISTRY.get(name)
    _check_options(f"model {name!r}", parameters_of(build), options)
    return build(**options)


def parameters_of(build: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a network, with those that ``**options`` go to.

    They go to the base class, or to the part of the network that ``options_of`` names. A network
    that a program has registered may use them in another way.
    """
    if not build.__module__.startswith("dmiddleware."):
        return dict(inspect.signature(build).parameters)
    by_name: dict[str, inspect.Parameter] = {}
    for cls in build.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                by_name.setdefault(parameter.name, parameter)
        rest = [parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        if not rest:
            return by_name
        if "options_of" in vars(cls):
            return {**parameters_of(vars(cls)["options_of"]), **by_name}
        if cls.__mro__[1] is nn.Module:
            return {**by_name, rest[0].name: rest[0]}
    return by_name


def _check_options(
    owner: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> None:
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    for key in options:
        if key not in parameters and not takes_any:
            raise ConfigError(f"{owner}: unknown key {key}; {unknown_name(key, parameters)}")
    missing = [
        key
        for key, item in parameters.items()
        if item.default is item.empty
        and item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
        and key not in options
    ]
    if missing:
        raise ConfigError(f"{owner} needs {', '.join(missing)}; give it in the config")
