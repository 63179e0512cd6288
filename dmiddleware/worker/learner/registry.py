"""Learners by name, so that a config can ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry, import_modules
from dmiddleware.worker.learner.base import BaseLearner

__all__ = ["LEARNER_REGISTRY", "create_learner"]

LEARNER_REGISTRY: Registry[type[BaseLearner]] = Registry("learner")
"""Registered learners; ``@LEARNER_REGISTRY.register("mine")`` adds one."""

LEARNER_REGISTRY.register("base")(BaseLearner)


def create_learner(cfg: Mapping[str, Any], **kwargs: Any) -> BaseLearner:
    """Build the learner that ``cfg.type`` names, after importing ``cfg.import_names``.

    Args:
        cfg: the learner's config, with ``type``.
        kwargs: given to the class's constructor.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or for what the class refuses.
        RegistryError: if no one registered the name; the nearest names are listed.
    """
    if "type" not in cfg:
        raise ConfigError(
            "a learner is created by name, but the config has no key type; "
            f"add type: one of {', '.join(LEARNER_REGISTRY)}"
        )
    import_modules(cfg.get("import_names", ()))
    return LEARNER_REGISTRY.get(cfg["type"])(cfg, **kwargs)
