"""Stock policies with the interface of DI-engine's: nested configs, modes by name, command mode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from easydict import EasyDict
from torch import nn

from dmiddleware.classic.config import merge_config
from dmiddleware.classic.config_keys import (
    CLASSIC_SECTIONS,
    merge_classic,
    split_classic,
    take_sections,
)
from dmiddleware.classic.model_options import in_own_names
from dmiddleware.classic.modes import (
    CONFIG_ATTRIBUTES,
    CollectMode,
    CommandMode,
    EvalMode,
    LearnMode,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
    command_mode_of,
)
from dmiddleware.classic.policy import Policy
from dmiddleware.classic.policy_config import (
    ClassicSettings,
    config_entries,
    settings_from,
    with_names_of_spaces,
)
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.policy import Policy as CorePolicy
from dmiddleware.policy import get_policy_cls as get_core_cls
from dmiddleware.registry import import_modules

__all__ = ["StockPolicy", "create_policy", "get_policy_cls"]

M = TypeVar("M", LearnMode, CollectMode, EvalMode)

_FIELDS: Final = ("learn", "collect", "eval", "command")
_COMMAND: Final = "_command"
_ALIASES: Final = {
    "cql_discrete": "discrete_cql", "dt": "decision_transformer", "sac_discrete": "discrete_sac",
}  # fmt: skip
"""Names of DI-engine's configs for algorithms that have another name here."""
_TRAJ_LEN_INF: Final = "traj_len_inf"


class StockPolicy:
    """A policy of :mod:`dmiddleware.policy` behind the interface of DI-engine's policies.

    Args:
        cfg: a nested config, also with the keys that DI-engine's configs have, and with the
            sections of workers.
        model: as in :class:`dmiddleware.policy.Policy`.
        enable_field: the fields to build, of ``"learn"``, ``"collect"``, ``"eval"``, ``"command"``;
            None: all.

    Attributes:
        cfg: the merged config.
        policy: the policy; None: only the command mode was enabled.
    """

    core: ClassVar[type[CorePolicy]]

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        enable_field: Iterable[str] | None = None,
    ) -> None:
        if isinstance(enable_field, str):
            enable_field = (enable_field,)
        self._enabled = frozenset(_FIELDS if enable_field is None else enable_field)
        if not self._enabled or not self._enabled <= set(_FIELDS):
            raise ConfigError(
                f"enable_field must be a non-empty subset of {', '.join(_FIELDS)}, "
                f"got {sorted(self._enabled)}"
            )
        self.cfg = self.merged_config(cfg)
        self.policy: CorePolicy | None = None
        modes: Any = [field for field in _FIELDS[:3] if field in self._enabled]
        if modes:
            settings = settings_from(self.core, self.cfg)
            if model is None:
                own = in_own_names(settings.model, self.core.model_type)
                settings = dataclasses.replace(settings, model=own)
            self.policy = self.core(settings, model, modes)
        self._attributes: dict[str, Any] = {
            "enable_field": [f for f in _FIELDS if f in self._enabled]
        }

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults."""
        return EasyDict({**_merged(cls.core, {}), _TRAJ_LEN_INF: False})

    @classmethod
    def merged_config(cls, cfg: Mapping[str, Any] | None = None) -> EasyDict:
        """Return the defaults with ``cfg`` merged in, checked, also the sections of workers.

        Raises:
            ConfigError: for an unknown key (with the nearest known one), a wrong type, or a value
                out of range.
        """
        own, extras = _divided(cls.core, cfg)
        if isinstance(cfg, Mapping):
            _check_keys(cls.core, cfg)
        merged = {**_merged(cls.core, {} if own is None else own), _TRAJ_LEN_INF: False}
        settings_from(cls.core, merged)
        merge_classic(merged, extras)
        return EasyDict(merged)

    @property
    def learn_mode(self) -> LearnMode:
        """The methods that a learner may call."""
        return self._with_attributes(as_learn_mode(self._policy(), user=type(self).__name__))

    @property
    def collect_mode(self) -> CollectMode:
        """The methods that a collector may call."""
        return self._with_attributes(as_collect_mode(self._policy(), user=type(self).__name__))

    @property
    def eval_mode(self) -> EvalMode:
        """The methods that an evaluator may call."""
        return self._with_attributes(as_eval_mode(self._policy(), user=type(self).__name__))

    @property
    def command_mode(self) -> CommandMode:
        """The methods that a commander may call."""
        return command_mode_of(self.cfg.get("other", {}).get("eps"), self._require_command)

    def get_attribute(self, name: str) -> Any:
        """Return an attribute by its name in DI-engine, or one of the policy.

        Raises:
            AttributeError: if there is none; the nearest names are listed.
        """
        if name in self._attributes:
            return self._attributes[name]
        if name in CONFIG_ATTRIBUTES:
            return getattr(ClassicSettings(self.cfg), name, None)
        policy = self._policy()
        if hasattr(policy, name):
            return getattr(policy, name)
        return as_collect_mode(policy, user=type(self).__name__).get_attribute(name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute, such as ``collect_data``."""
        if name == "counters":
            self._policy().set_counters(value)
        else:
            self._attributes[name] = value

    def __repr__(self) -> str:
        return repr(self.policy) if self.policy is not None else f"{type(self).__name__}()"

    def _policy(self) -> CorePolicy:
        if self.policy is None:
            raise PolicyError(
                f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)}; "
                "add 'learn', 'collect' or 'eval', or build it with enable_field=None"
            )
        return self.policy

    def _with_attributes(self, mode: M) -> M:
        return dataclasses.replace(
            mode,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            spec=dataclasses.replace(mode.spec, settings=ClassicSettings(self.cfg)),
        )

    def _require_command(self) -> None:
        if "command" not in self._enabled:
            raise PolicyError(
                f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)} "
                "and cannot command; add 'command', or build it with enable_field=None"
            )


@functools.cache
def _stock_class(core: type[CorePolicy]) -> type[StockPolicy]:
    """Return the class of a stock policy behind the classic interface."""
    return type(core.__name__, (StockPolicy,), {"core": core, "__doc__": core.__doc__})


def get_policy_cls(cfg: Mapping[str, Any]) -> type[Any]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Names that end in ``_command`` are those of the same policies.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    import_modules(cfg.get("import_names", ()))
    name = cfg.get("type")
    if isinstance(name, str) and name.endswith(_COMMAND) and name not in POLICY_REGISTRY:
        cfg = {**cfg, "type": name.removesuffix(_COMMAND)}
    if cfg.get("type") in _ALIASES:
        cfg = {**cfg, "type": _ALIASES[cfg["type"]]}
    found = get_core_cls(cfg)
    return found if issubclass(found, Policy | StockPolicy) else _stock_class(found)  # type: ignore[arg-type]  # a class is hashable


def create_policy(cfg: Mapping[str, Any], **kwargs: Any) -> Any:
    """Build the policy that ``cfg.type`` names.

    Args:
        cfg: the policy's config, with ``type`` and, for classes that live elsewhere,
            ``import_names``.
        kwargs: passed to the class's constructor (``model``, ``enable_field``).

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_policy_cls(cfg)(cfg, **kwargs)


def _merged(core: type[CorePolicy], cfg: Any) -> EasyDict:
    """Return the defaults of a policy with ``cfg`` merged in, each value checked."""
    known = {**config_entries(core), "cfg_type": f"{core.__name__}Dict"}
    given = with_names_of_spaces(cfg) if isinstance(cfg, Mapping) else cfg
    return merge_config(known, given, owner=core.__name__, open_paths=("model",))


def _check_keys(core: type[CorePolicy], cfg: Mapping[str, Any]) -> None:
    """Refuse unknown keys; those of workers are among the known ones that a message names."""
    entries = config_entries(core)
    own, _ = split_classic({**cfg, "cfg_type": ""}, entries, core.__name__)
    known = {**entries, _TRAJ_LEN_INF: False, "cfg_type": ""}
    open_paths = ("model", *CLASSIC_SECTIONS)
    merge_config(known, own, owner=core.__name__, open_paths=open_paths)


def _divided(core: type[CorePolicy], cfg: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Divide a classic config into what the policy knows, and what only workers read."""
    if not isinstance(cfg, Mapping):
        return cfg, {}
    entries = config_entries(core)
    own, others = split_classic(cfg, entries, core.__name__)
    sections = take_sections(own)
    merge_classic(sections, others)
    return {key: value for key, value in own.items() if value != {} or key in entries}, sections
