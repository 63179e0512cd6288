"""Hooks from configs, by name; lists of hooks, in order of priority."""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry, nearest
from dmiddleware.worker.learner.hooks import (
    POSITIONS,
    LearnerHook,
    LoadCkptHook,
    LogReduceHook,
    LogShowHook,
    SaveCkptHook,
)

__all__ = [
    "Hooks",
    "add_learner_hook",
    "build_learner_hook_by_cfg",
    "merge_hooks",
    "register_learner_hook",
    "show_hooks",
]

Hooks: TypeAlias = dict[str, list[LearnerHook]]
"""Hooks by position, in order of priority."""

_HOOK_TYPES: Registry[Callable[..., LearnerHook]] = Registry("learner hook")

# Short form: type, priority, position, and the name of the ext_arg that the value is. Reducing
# comes before showing.
_SHORT_FORMS: dict[str, tuple[str, int, str, str | None]] = {
    "load_ckpt_before_run": ("load_ckpt", 20, "before_run", "load_path"),
    "log_show_after_iter": ("log_show", 20, "after_iter", "freq"),
    "save_ckpt_after_iter": ("save_ckpt", 20, "after_iter", "freq"),
    "save_ckpt_after_run": ("save_ckpt", 20, "after_run", None),
    "log_reduce_after_iter": ("log_reduce", 10, "after_iter", None),
}
_LONG_FORM = ("name", "type", "priority", "position", "ext_args")


def register_learner_hook(name: str, hook_type: type[LearnerHook]) -> None:
    """Let configs name a type of hook.

    Args:
        name: the ``type`` in a hook's config.
        hook_type: a subclass of :class:`LearnerHook`, built as
            ``hook_type(name, priority, position=…, ext_args=…)``.

    Raises:
        TypeError: if it is no subclass of :class:`LearnerHook`.
        RegistryError: if the name stands for another type already.
    """
    if not (isinstance(hook_type, type) and issubclass(hook_type, LearnerHook)):
        raise TypeError(f"a learner hook is a subclass of LearnerHook, got {hook_type!r}")
    _HOOK_TYPES.register(name)(hook_type)


for _name, _type in (
    ("load_ckpt", LoadCkptHook),
    ("save_ckpt", SaveCkptHook),
    ("log_show", LogShowHook),
    ("log_reduce", LogReduceHook),
):
    register_learner_hook(_name, _type)


def build_learner_hook_by_cfg(cfg: Mapping[str, Any]) -> Hooks:
    """Build hooks from a config.

    Args:
        cfg: short forms (``log_show_after_iter: 100``, ``load_ckpt_before_run: path``,
            ``save_ckpt_after_iter: 1000``, ``save_ckpt_after_run: True``,
            ``log_reduce_after_iter: True``; False and None leave the hook out), and long forms: any
            key, with a dictionary of ``name``, ``type``, ``priority``, ``position``, ``ext_args``.

    Returns:
        Hooks by position; every position is there.

    Raises:
        ConfigError: for an unknown short form (the nearest known one is named), or a long form that
            lacks something.
        RegistryError: for an unknown ``type``.
    """
    hooks: Hooks = {position: [] for position in POSITIONS}
    for key, value in cfg.items():
        hook = _from_long(key, value) if isinstance(value, Mapping) else _from_short(key, value)
        if hook is not None:
            add_learner_hook(hooks, hook)
    return hooks


def _from_short(key: str, value: Any) -> LearnerHook | None:
    if key not in _SHORT_FORMS:
        near = nearest(key, _SHORT_FORMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(_SHORT_FORMS)}"
        raise ConfigError(f"unknown learner hook {key!r}; {hint}")
    kind, priority, position, option = _SHORT_FORMS[key]
    if value is None or value is False:
        return None
    if option is None and value is not True:
        raise ConfigError(f"hook.{key} must be True or False, got {value!r}")
    ext_args = {} if option is None else {option: value}
    return _HOOK_TYPES.get(kind)(key, priority, position=position, ext_args=ext_args)


def _from_long(key: str, value: Mapping[str, Any]) -> LearnerHook:
    given = {"name": key, "priority": 20, "ext_args": {}, **value}
    missing = [field for field in _LONG_FORM if field not in given]
    odd = sorted(set(given) - set(_LONG_FORM))
    if missing or odd:
        raise ConfigError(
            f"hook.{key}: a hook has the keys {', '.join(_LONG_FORM)}; "
            f"missing: {', '.join(missing) or 'none'}, unknown: {', '.join(odd) or 'none'}"
        )
    hook_type = _HOOK_TYPES.get(given["type"])
    return hook_type(
        given["name"], given["priority"], position=given["position"], ext_args=given["ext_args"]
    )


def add_learner_hook(hooks: Hooks, hook: LearnerHook) -> None:
    """Put a hook at its place: by priority, after those of equal priority.

    Raises:
        TypeError: if it is no :class:`LearnerHook`.
    """
    if not isinstance(hook, LearnerHook):
        raise TypeError(f"a learner's hooks are LearnerHooks, got {hook!r}")
    insort_right(hooks.setdefault(hook.position, []), hook, key=lambda known: known.priority)


def merge_hooks(hooks1: Hooks, hooks2: Hooks) -> Hooks:
    """Merge two collections of hooks, stable by priority (those of the first come first).

    Raises:
        ConfigError: if they have different positions.
    """
    if set(hooks1) != set(hooks2):
        odd = ", ".join(sorted(set(hooks1) ^ set(hooks2)))
        raise ConfigError(f"only hooks of the same positions can be merged; they differ in: {odd}")
    return {
        position: sorted([*hooks1[position], *hooks2[position]], key=lambda hook: hook.priority)
        for position in hooks1
    }


def show_hooks(hooks: Hooks) -> str:
    """Describe hooks in text: one line per position, in the order in which they run."""
    return "\n".join(
        f"{position}: " + (", ".join(f"{hook.name} ({hook.priority:g})" for hook in own) or "-")
        for position, own in hooks.items()
    )
