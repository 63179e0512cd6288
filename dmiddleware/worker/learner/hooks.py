"""Hooks: what a learner does around its run and around each iteration."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from bisect import insort_right
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dmiddleware.classic.logs import table
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.files.checkpoint import load_checkpoint, save_checkpoint
from dmiddleware.registry import nearest
from dmiddleware.worker.ranks import mean_over_ranks

if TYPE_CHECKING:
    from dmiddleware.worker.learner.base_learner import BaseLearner

__all__ = [
    "POSITIONS",
    "Hook",
    "Hooks",
    "LearnerHook",
    "LoadCkptHook",
    "LogReduceHook",
    "LogShowHook",
    "SaveCkptHook",
    "add_learner_hook",
    "build_learner_hook_by_cfg",
    "checkpoints_in",
    "merge_hooks",
    "register_learner_hook",
    "show_hooks",
]

logger = logging.getLogger(__name__)

POSITIONS = ("before_run", "after_run", "before_iter", "after_iter")
"""The points at which a learner calls its hooks."""

SUFFIX = ".safetensors"


class Hook(ABC):
    """Something that a worker calls at a certain point of its work.

    Args:
        name: identifies the hook in logs and lists.
        priority: hooks with a lower priority run first; equal ones in order of registration.
        kwargs: ignored, so that a custom hook can be built from any config.
    """

    def __init__(self, name: str, priority: float, **kwargs: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int | float) or priority < 0:
            raise ConfigError(
                f"the priority of hook {name!r} must be a number of at least 0, got {priority!r}"
            )
        self._name = name
        self._priority = priority

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    @property
    def priority(self) -> float:
        """The order among the hooks of one position; lower runs first."""
        return self._priority

    @abstractmethod
    def __call__(self, engine: Any) -> None:
        """Do the hook's work for the worker that calls it."""


class LearnerHook(Hook):
    """A hook of a learner.

    Args:
        args: name and priority, see :class:`Hook`.
        position: when it runs: ``before_run``, ``after_run``, ``before_iter`` or ``after_iter``.
        kwargs: ignored, see :class:`Hook`.

    Raises:
        ConfigError: for another position.
    """

    positions: ClassVar[tuple[str, ...]] = POSITIONS
    """The points at which a learner calls its hooks."""

    def __init__(self, *args: Any, position: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if position not in POSITIONS:
            raise _unknown_position(f"the position of hook {self.name!r}", position)
        self._position = position

    @property
    def position(self) -> str:
        """When the hook runs."""
        return self._position

    def _option(
        self, ext_args: Mapping[str, Any] | None, key: str, default: Any, *, unused: str = ""
    ) -> Any:
        """Return the option of ``ext_args`` that the hook has; only ``unused`` is allowed too."""
        given = {} if ext_args is None else ext_args
        if not isinstance(given, Mapping) or set(given) - {key, unused}:
            raise ConfigError(
                f"the only key of ext_args for hook {self.name!r} ({type(self).__name__}) is "
                f"{key!r}, got {given!r:.100}"
            )
        return given.get(key, default)


class _PeriodicHook(LearnerHook):
    """A hook that runs every ``ext_args.freq`` iterations (default: 1)."""

    def __init__(
        self, *args: Any, position: str, ext_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, position=position, **kwargs)
        freq = self._option(ext_args, "freq", 1)
        if isinstance(freq, bool) or not isinstance(freq, int | float) or freq != int(freq):
            raise ConfigError(f"hook {self.name!r}: freq must be an integer, got {freq!r}")
        if freq < 1:
            raise ConfigError(f"hook {self.name!r}: freq must be at least 1, got {freq}")
        self._freq = int(freq)

    def _is_due(self, n_iterations: int) -> bool:
        return self._position != "after_iter" or n_iterations % self._freq == 0


class LoadCkptHook(LearnerHook):
    """Restores policy, iteration and env step from a checkpoint.

    Args:
        args: name and priority.
        position: ``before_run``, usually.
        ext_args: ``load_path``; ``""`` (the default) does nothing. ``freq`` has no effect.
        kwargs: ignored, see :class:`Hook`.
    """

    def __init__(
        self, *args: Any, position: str, ext_args: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, position=position, **kwargs)
        path = self._option(ext_args, "load_path", "", unused="freq")
        if not isinstance(path, str | PathLike):
            raise ConfigError(f"hook {self.name!r}: load_path must be a path or '', got {path!r}")
        self._load_path = str(path)

    def __call__(self, engine: BaseLearner) -> None:
        """Load the checkpoint into the learner's policy.

        Raises:
            FileNotFoundError: if there is no such file.
            CheckpointDamaged: if the file is damaged or incomplete.
            CheckpointMismatch: if it belongs to another model.
        """
        if not self._load_path:
            return
        engine.load_state_dict(load_checkpoint(self._load_path))
        engine.info(
            f"{engine.instance_name} loaded {self._load_path}: iteration {engine.train_iter}, "
            f"env step {engine.collector_envstep}"
        )


class SaveCkptHook(_PeriodicHook):
    """Saves the policy, the iteration and the env step, on rank 0.

    The file is ``<exp_name>/ckpt_<instance_name>/iteration_<n>.safetensors``, where ``n`` is the
    number of finished iterations, or the learner's ``ckpt_name``, if that is set. It is written
    completely or not at all.

    Args:
        args: name and priority.
        position: ``after_iter`` or ``after_run``, usually.
        ext_args: ``freq``, in iterations (``after_iter`` only).
    """

    def __call__(self, engine: BaseLearner) -> None:
        """Save, if an interval has passed.

        Raises:
            CheckpointWriteError: if the file cannot be written; an earlier file stays intact.
        """
        n_iterations = finished_iterations(engine, self._position)
        if engine.rank != 0 or not self._is_due(n_iterations):
            return
        path = engine.ckpt_dir / checkpoint_name(engine.ckpt_name or f"iteration_{n_iterations}")
        save_checkpoint(path, {**engine.state_dict(), "last_iter": n_iterations})
        engine.info(f"{engine.instance_name} saved {path}")


class LogShowHook(_PeriodicHook):
    """Logs averages of the learner's outputs on rank 0, and clears its log buffer.

    Averages of the policy's ``monitor_vars`` and of the learner's times are written to the text log
    as a table, and to TensorBoard as ``<instance>_iter/<name>_avg`` over iterations and
    ``<instance>_step/<name>_avg`` over env steps. Groups of scalars are written as
    ``<instance>_iter/<name>`` and ``<instance>_step/<name>``, and histograms over iterations as
    ``<instance>/<name>``.

    Args:
        args: name and priority.
        position: ``after_iter``, usually.
        ext_args: ``freq``, in iterations.
    """

    def __call__(self, engine: BaseLearner) -> None:
        """Add the newest values to the averages; log them, if an interval has passed."""
        buffer = engine.log_buffer
        if engine.monitors:
            engine.monitor.update(buffer["scalar"])
            n_iterations = finished_iterations(engine, self._position)
            if engine.logs and self._is_due(n_iterations):
                self._show(engine, n_iterations)
        for part in buffer.values():
            part.clear()

    @staticmethod
    def _show(engine: BaseLearner, n_iterations: int) -> None:
        means = {f"{name}_avg": mean for name, mean in engine.monitor.means().items()}
        engine.info(
            f"{engine.instance_name}: iteration {n_iterations}, env step "
            f"{engine.collector_envstep}\n{table(means)}"
        )
        writer = engine.tb_logger
        axes = {"iter": n_iterations, "step": engine.collector_envstep}
        for axis, at in axes.items():
            # Negative: the number of env steps is unknown.
            if at < 0:
                continue
            prefix = f"{engine.instance_name}_{axis}"
            for name, value in means.items():
                writer.add_scalar(f"{prefix}/{name}", value, at)
            for name, group in engine.log_buffer["scalars"].items():
                writer.add_scalars(f"{prefix}/{name}", group, at)
        for name, values in engine.log_buffer["histogram"].items():
            writer.add_histogram(f"{engine.instance_name}/{name}", values, n_iterations)


class LogReduceHook(_PeriodicHook):
    """Averages the log buffer over all ranks, except keys that begin with ``noreduce_``.

    Args:
        args: name and priority; it must run before the hook that logs.
        position: ``after_iter``, usually.
        ext_args: ``freq``, in iterations.
    """

    def __call__(self, engine: BaseLearner) -> None:
        """Average, if an interval has passed; every rank must call it with the same keys."""
        # All ranks count alike, so either all of them average or none.
        if not self._is_due(finished_iterations(engine, self._position)):
            return
        for name, part in engine.log_buffer.items():
            engine.log_buffer[name] = mean_over_ranks(part)


def _unknown_position(what: str, position: object) -> ConfigError:
    near = nearest(str(position), POSITIONS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{what} must be one of {', '.join(POSITIONS)}, got {position!r}{hint}")


def finished_iterations(engine: BaseLearner, position: str) -> int:
    """Return the finished iterations; ``after_iter`` runs before the current one is counted."""
    return engine.train_iter + (position == "after_iter")


def checkpoint_name(name: str) -> str:
    """Return a file name with the suffix of checkpoints, in place of those of torch.save.

    A name with any other suffix is returned as it is.
    """
    for suffix in (".pth.tar", ".pth", ".pt"):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + SUFFIX
    return name if Path(name).suffix else f"{name}{SUFFIX}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first; none if there is no such folder."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


Hooks: TypeAlias = dict[str, list[LearnerHook]]
"""Hooks by position, in order of priority."""

_HOOK_TYPES: dict[str, type[LearnerHook]] = {}

# Short form: type, priority, position, and which of ext_args the value sets. Values are averaged
# over the ranks before they are logged.
_SHORT_FORMS: dict[str, tuple[str, int, str, str | None]] = {
    "load_ckpt_before_run": ("load_ckpt", 20, "before_run", "load_path"),
    "log_show_after_iter": ("log_show", 20, "after_iter", "freq"),
    "save_ckpt_after_iter": ("save_ckpt", 20, "after_iter", "freq"),
    "save_ckpt_after_run": ("save_ckpt", 20, "after_run", None),
    "log_reduce_after_iter": ("log_reduce", 10, "after_iter", "freq"),
}
_LONG_FORM = ("name", "type", "priority", "position", "ext_args")


def register_learner_hook(name: str, hook_type: type[LearnerHook]) -> None:
    """Make a type of hook available to configs by name.

    A type that is registered again replaces the earlier one, with a warning.

    Args:
        name: the ``type`` in a hook's config.
        hook_type: a subclass of :class:`LearnerHook`, built as
            ``hook_type(name, priority, position=…, ext_args=…)``, without ``ext_args`` if it does
            not take them.

    Raises:
        TypeError: if ``hook_type`` is not a subclass of :class:`LearnerHook`.
    """
    if not (isinstance(hook_type, type) and issubclass(hook_type, LearnerHook)):
        raise TypeError(f"a hook type must be a subclass of LearnerHook, got {hook_type!r}")
    earlier = _HOOK_TYPES.get(name, hook_type)
    if earlier is not hook_type:
        logger.warning("the learner hook %r is now %r, which replaces %r", name, hook_type, earlier)
    _HOOK_TYPES[name] = hook_type


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
            ``log_reduce_after_iter: True``; False and None omit the hook), and long forms: any key,
            with a dictionary of ``name`` (default: the key), ``type``, ``priority`` (100),
            ``position`` and ``ext_args``.

    Returns:
        Hooks by position, with all positions as keys.

    Raises:
        ConfigError: for an unknown short form (the nearest known one is named), or an incomplete
            long form.
        RegistryError: for an unknown ``type``; the nearest names are listed.
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
        hint = f"did you mean {near[0]}?" if near else f"known hooks: {', '.join(_SHORT_FORMS)}"
        raise ConfigError(f"unknown learner hook {key!r}; {hint}")
    kind, priority, position, option = _SHORT_FORMS[key]
    if value is None or value is False:
        return None
    if option is None and value is not True:
        raise ConfigError(f"hook.{key} must be True or False, got {value!r}")
    if kind == "log_reduce" and value is True:
        value = 1
    ext_args = {} if option is None else {option: value}
    return _build(kind, key, priority, position, ext_args)


def _from_long(key: str, value: Mapping[str, Any]) -> LearnerHook:
    given = {"name": key, "priority": 100, "ext_args": {}, **value}
    for field in sorted(set(given) - set(_LONG_FORM)):
        near = nearest(field, _LONG_FORM, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(_LONG_FORM)}"
        raise ConfigError(f"unknown key hook.{key}.{field}; {hint}")
    missing = [field for field in _LONG_FORM if field not in given]
    if missing:
        raise ConfigError(f"hook.{key} lacks {', '.join(missing)}; add {missing[0]}: ...")
    return _build(
        given["type"], given["name"], given["priority"], given["position"], given["ext_args"]
    )


def _build(
    kind: str, name: str, priority: float, position: str, ext_args: Mapping[str, Any]
) -> LearnerHook:
    if kind not in _HOOK_TYPES:
        near = nearest(str(kind), _HOOK_TYPES)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(_HOOK_TYPES)}"
        raise RegistryError(
            f"no learner hook is registered as {kind!r}; {hint} Add a custom one with "
            "register_learner_hook"
        )
    hook_type = _HOOK_TYPES[kind]
    parameters = inspect.signature(hook_type).parameters.values()
    takes_ext_args = any(
        one.name == "ext_args" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters
    )
    further = {"ext_args": ext_args} if takes_ext_args else {}
    return hook_type(name, priority, position=position, **further)


def add_learner_hook(hooks: Hooks, hook: LearnerHook) -> None:
    """Insert a hook by priority, after hooks of equal priority.

    Raises:
        TypeError: if ``hook`` is not a :class:`LearnerHook`.
    """
    if not isinstance(hook, LearnerHook):
        raise TypeError(f"a learner's hook must be a LearnerHook, got {hook!r}")
    insort_right(hooks.setdefault(hook.position, []), hook, key=lambda known: known.priority)


def merge_hooks(hooks1: Hooks, hooks2: Hooks) -> Hooks:
    """Merge hooks by priority; among equal ones, those of ``hooks1`` come first.

    Raises:
        ConfigError: if they have different positions.
    """
    if set(hooks1) != set(hooks2):
        odd = ", ".join(sorted(set(hooks1) ^ set(hooks2)))
        raise ConfigError(
            f"only hooks with the same positions can be merged; only one side has: {odd}"
        )
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
