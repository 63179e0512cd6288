"""The settings of policies as the nested configs of DI-engine have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Final, TypeVar

from dmiddleware.classic.config import (
    NamedValues,
    Option,
    Range,
    anything,
    count,
    optional,
    range_of,
    whole,
)
from dmiddleware.policy import Policy, PolicySettings, QLearningSettings
from dmiddleware.settings import (
    SettingInfo,
    Settings,
    describe,
    hints_of,
    made_from,
    plain_values,
)

__all__ = [
    "ClassicSettings",
    "as_classic",
    "config_entries",
    "from_nested",
    "nested",
    "settings_from",
    "setting_entries",
    "with_names_of_spaces",
]

S = TypeVar("S", bound=Settings)

_PATHS: Final[Mapping[str, str]] = {
    "discount": "discount_factor",
    "eps": "other.eps",
    "importance_weights": "priority_IS_weight",
    "n_step": "nstep",
    "noise": "collect.noise",
    "noise_sigma": "collect.noise_sigma",
    "noise_theta": "collect.noise_theta",
    **{
        name: name
        for name in (
            "action_bounding", "action_high", "action_low", "autocast", "bp_update_sync", "burn_in",
            "compile", "cuda", "gae_lambda", "model", "multi_gpu", "norm_clip", "obs_norm",
            "priority", "return_scale", "reward_norm", "seed", "target_kl", "target_return",
            "value_norm",
        )
    },
}  # fmt: skip
"""The paths of the settings that are not in the section ``learn``."""
_NAMED_BY_SPACES: Final = ("obs_shape", "action_shape", "action_space")
"""The options of models whose keys are the names in an environment's spaces."""


@dataclass(frozen=True)
class ClassicSettings:
    """What others read of a policy with a nested config, by flat names, such as ``batch_size``.

    Attributes:
        cfg: the config.
        own: what the policy itself says, which counts before its config.
    """

    cfg: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            cfg = self.cfg
            sections = (cfg.get(section, {}) for section in ("learn", "collect", "other"))
            for part in (self.own, cfg, *sections):
                if isinstance(part, Mapping) and name in part:
                    return part[name]
        raise AttributeError(f"the policy's config has no {name}")


def as_classic(settings: object) -> ClassicSettings:
    """Return what others read of a policy's settings, also of those that are not nested."""
    if isinstance(settings, ClassicSettings):
        return settings
    return ClassicSettings(nested(settings) if isinstance(settings, PolicySettings) else {})


def _path_of(name: str) -> str:
    """Return the path of a setting in the configs of DI-engine."""
    return _PATHS.get(name, f"learn.{name}")


def nested(settings: Settings) -> dict[str, Any]:
    """Return plain values as the configs of DI-engine nest them: ``{"learn": {…}, …}``."""
    cfg: dict[str, Any] = {}
    values = plain_values(settings)
    for name in hints_of(type(settings)):
        if name in values:
            _set(cfg, _path_of(name), values[name])
    return cfg


def from_nested(kind: type[S], cfg: Mapping[str, Any], *, owner: str = "") -> S:
    """Read settings back from a config that is nested as by :func:`nested`.

    Args:
        kind: the class of the settings.
        cfg: the values that differ from the defaults; other keys are ignored. A dictionary for a
            setting whose default is a schedule has the attributes that differ from that one.
        owner: what messages say has the settings; empty: the class.

    Raises:
        ConfigError: as of :class:`~dmiddleware.settings.Settings`, with the paths of the config.
    """
    given: dict[str, Any] = {}
    for info in describe(kind):
        value: Any = cfg
        for key in _path_of(info.name).split("."):
            value = value.get(key, MISSING) if isinstance(value, Mapping) else MISSING
        if dataclasses.is_dataclass(info.default) and isinstance(value, Mapping):
            value = {**plain_values(info.default), **value}
        if value is not MISSING:
            given[info.name] = value
    return made_from(kind, given, owner=owner, path_of=_path_of)


def setting_entries(kind: type[PolicySettings]) -> dict[str, Any]:
    """Return a nested dictionary with the options that stand for settings."""
    entries: dict[str, Any] = {}
    for info in describe(kind):
        option = Option(_default(info), range_of(info.hint), info.meaning)
        _set(entries, _path_of(info.name), _eps_options(option) if info.name == "eps" else option)
    return entries


def config_entries(core: type[Policy]) -> dict[str, Any]:
    """Return the options of a stock policy: its settings, and what only workers read."""
    entries = setting_entries(core.settings_class())
    is_on_policy = core.on_policy
    entries["on_policy"] = Option(
        is_on_policy,
        Range(f"{is_on_policy}, which is how {core.__name__} learns", lambda v: v is is_on_policy),
        "whether the algorithm learns only from its latest data; fixed by the class",
    )
    _set(entries, "collect.n_sample", Option(None, optional(count), "env steps to collect"))
    _set(entries, "collect.n_episode", Option(None, optional(count), "episodes to collect"))
    if not is_on_policy:
        updates = Option(1, count, "updates after each collection")
        _set(entries, "learn.update_per_collect", updates)
    if issubclass(core.settings_class(), QLearningSettings):
        entries["random_collect_size"] = Option(
            0, whole, "env steps with random actions before learning"
        )
    return entries


def settings_from(core: type[Policy], cfg: Mapping[str, Any]) -> PolicySettings:
    """Return the settings that a merged config describes.

    Args:
        core: the class of the policy.
        cfg: a config with the keys of :func:`config_entries`; other keys are ignored.

    Raises:
        ConfigError: for a value out of range, and for values that exclude each other.
    """
    return from_nested(core.settings_class(), cfg, owner=core.__name__)


def with_names_of_spaces(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config in which the names that an env chose hide no methods of dictionaries."""
    if not isinstance(cfg.get("model"), Mapping):
        return cfg
    model = {
        key: _by_name(value) if key in _NAMED_BY_SPACES else value
        for key, value in cfg["model"].items()
    }
    return {**cfg, "model": model}


def _by_name(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return NamedValues({key: _by_name(value[key]) for key in value})


def _default(info: SettingInfo) -> Any:
    return None if info.default is MISSING else plain_values(info.default)


def _eps_options(option: Option) -> dict[str, Option]:
    """Return the options of the section of ε: the attributes of a schedule."""
    standard = next(info.default for info in describe(QLearningSettings) if info.name == "eps")
    parts = {**plain_values(standard), "points": None}
    if isinstance(option.default, Mapping):
        parts |= {**option.default, "points": option.default["points"] or None}
    else:
        parts |= {"type": "constant", "start": option.default}
    meanings = {
        "type": "shape of the schedule of ε; exp is exponential",
        "start": "the first ε",
        "end": "the last ε",
        "decay": "env steps over which ε decays",
        "by": "what ε depends on, and the unit of decay",
        "points": "of a piecewise schedule: pairs of a count and the ε there",
    }
    return {name: Option(parts[name], anything, meanings[name]) for name in meanings}


def _set(cfg: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        cfg = cfg.setdefault(section, {})
    cfg[key] = value
