"""The registry of policies, and how to build one from a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.policy.policy import Policy
from dmiddleware.registry import Registry, import_modules
from dmiddleware.settings import values_from_plain

__all__ = ["POLICY_REGISTRY", "create_policy", "get_policy_cls"]

POLICY_REGISTRY: Registry[type[Policy]] = Registry("policy")
"""Registered policies; ``@POLICY_REGISTRY.register("mine")`` adds one."""


def get_policy_cls(cfg: Mapping[str, Any]) -> type[Policy]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    if "type" not in cfg:
        raise ConfigError(
            f"a policy is created by name, but the config has no key type; "
            f"add type: one of {', '.join(POLICY_REGISTRY)}"
        )
    import_modules(cfg.get("import_names", ()))
    return POLICY_REGISTRY.get(cfg["type"])


def create_policy(cfg: Mapping[str, Any], **kwargs: Any) -> Policy:
    """Build the policy that ``cfg.type`` names.

    Args:
        cfg: the settings of the policy, by name, with ``type`` and, for classes that live
            elsewhere, ``import_names``; such as the section ``policy`` of a run's ``config.yaml``.
        kwargs: passed to the class's constructor (``model``, ``modes``).

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects its settings.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    cls = get_policy_cls(cfg)
    values = {key: value for key, value in cfg.items() if key not in ("type", "import_names")}
    return cls(values_from_plain(cls.settings_class(), values), **kwargs)
