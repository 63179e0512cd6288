"""The registry of networks, and how to build one from a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name
from dmiddleware.model.classic_options import in_own_names, parameters_of
from dmiddleware.registry import Registry, import_modules

__all__ = ["MODEL_REGISTRY", "create_model"]

MODEL_REGISTRY: Registry[type[nn.Module]] = Registry("model")
"""Registered networks; ``@MODEL_REGISTRY.register("mine")`` adds one."""


def create_model(cfg: Mapping[str, Any]) -> nn.Module:
    """Build the network that a config describes.

    Args:
        cfg: ``type`` is the registered name, ``import_names`` are modules to import first (where
            that name is registered), the other keys are keyword arguments of the class.

    Raises:
        ConfigError: if ``type`` is missing, or an option is unknown (the nearest known one is
            named) or missing. Names of DI-engine's networks are accepted too.
        RegistryError: if the name is not registered.
    """
    options = {str(key): value for key, value in cfg.items()}
    import_modules(options.pop("import_names", ()) or ())
    name = options.pop("type", None)
    if name is None:
        raise ConfigError(f"a model config needs the key type, one of: {', '.join(MODEL_REGISTRY)}")
    build = MODEL_REGISTRY.get(name)
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(build).parameters
    if build.__module__.startswith("dmiddleware."):  # not for what a program has registered
        parameters = parameters_of(build)
        options = in_own_names(options, parameters)
    _check_options(f"model {name!r}", parameters, options)
    return build(**options)


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
