"""Continuing a run: which one, and whether its settings are those that it had."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dmiddleware.errors import RunFolderError
from dmiddleware.runs.record import PROCESSES, flat_settings, is_compared, settings_of
from dmiddleware.settings import plain_values
from dmiddleware.yaml_text import read_yaml, yaml_text

__all__ = [
    "ACCEPT_VARIABLE",
    "FOLDER_VARIABLE",
    "RESUME_VARIABLE",
    "SNAPSHOTS",
    "accepts_changes",
    "changed_settings",
    "given_folder",
    "has_snapshot",
    "resume_words",
    "resumed_folder",
    "resuming",
]

RESUME_VARIABLE: Final = "DITASK_RESUME"
"""Environment variable with the folder of the run that ``ditask resume`` continues."""
FOLDER_VARIABLE: Final = "DITASK_RUN_FOLDER"
"""Environment variable with the folder that a run must use, as ``ditask sweep`` sets it."""
ACCEPT_VARIABLE: Final = "DITASK_ACCEPT_CHANGES"
"""Environment variable that is set if the run may continue with other settings."""

SNAPSHOTS: Final = "snapshots"
"""The folder of a run's snapshots, in that of the run."""

_BUDGETS: Final = tuple(
    f"TerminationChecker.max_{name}" for name in ("env_step", "train_iter", "train_epoch", "time_s")
)


def resumed_folder() -> Path | None:
    """Return the folder of the run that ``ditask resume`` continues in this process."""
    folder = os.environ.get(RESUME_VARIABLE)
    return Path(folder) if folder else None


def given_folder() -> Path | None:
    """Return the folder that the run of this process must use: of a sweep, or one to continue."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else resumed_folder()


def has_snapshot(run: Path) -> bool:
    """Return whether the folder of a run has a snapshot to continue from."""
    return any((run / SNAPSHOTS).glob("step_*.safetensors"))


def accepts_changes() -> bool:
    """Return whether the run may continue with other settings."""
    return bool(os.environ.get(ACCEPT_VARIABLE))


@contextlib.contextmanager
def resuming(run: Path, *, accept_changes: bool) -> Iterator[None]:
    """Let programs, and the processes that they start, continue a run."""
    set_here = {RESUME_VARIABLE: str(run.resolve()), ACCEPT_VARIABLE: "1" if accept_changes else ""}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ, one line each; a larger budget is not a change.

    The values that the program was called with are not compared, because the settings that they led
    to are.

    Args:
        before: what the run's ``config.yaml`` holds.
        now: the same of the program that continues it.
    """
    old, new = (
        {
            name: value
            for name, value in flat_settings(read_yaml(yaml_text(plain_values(settings))))
            if is_compared(name) and not _is_derived_seed(name)
        }
        for settings in (before, now)
    )
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name) and not _is_larger_budget(name, old, new)
    ]


def _is_derived_seed(name: str) -> bool:
    """Return whether a setting is a seed that depends on which process of the run has it."""
    return name.startswith("chain.") and name.endswith(".seed")


def _is_larger_budget(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if not name.endswith(_BUDGETS) or old.get(name) is None or name not in new:
        return False
    return new[name] is None or bool(new[name] >= old[name])


def resume_words(run: Path, options: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``ditask`` that start a run again, in as many processes.

    Args:
        run: the folder of the run.
        options: options of ``ditask`` that differ, such as ``--roles``.
        arguments: arguments of the program that differ.

    Raises:
        RunFolderError: if the run has no snapshot, or does not say which program it is.
    """
    settings = settings_of(run)
    program = settings.get("program")
    if not isinstance(program, str):
        raise RunFolderError(
            f"{run}/config.yaml does not name the program of the run; put Experiment into the "
            "chain and start the program with run_program or ditask"
        )
    if program.startswith("__main__.") or "<" in program:
        raise RunFolderError(
            f"{run}/config.yaml names the program {program}, which cannot be imported; start it "
            'again yourself. In the next run, call it under if __name__ == "__main__": in a file '
            "whose name is one of a module"
        )
    if not has_snapshot(run):
        raise RunFolderError(f"{run} has no snapshot to continue from; {_advice(settings)}")
    config = str(run / "config.yaml")
    launch = _launch_words(settings.get("launch"), options)
    return [*launch, *options, "--main", program, "--", "--config", config, *arguments]


def _advice(settings: Mapping[str, Any]) -> str:
    """Return what to do about a run without a snapshot, given what its config.yaml holds."""
    chain = settings.get("chain")
    if any("SnapshotSaver" in entry for entry in chain or () if isinstance(entry, Mapping)):
        return "it ended before its SnapshotSaver had saved the first one; start it again"
    return "put SnapshotSaver into the chain, and call snapshots.resume(task) before task.run()"


def _launch_words(launch: Any, given: Sequence[str]) -> list[str]:
    """Return the recorded options of ``ditask`` as its arguments, without those that are given."""
    flags = {word.partition("=")[0] for word in given}
    processes = {f"--{_flag(name.rpartition('.')[2])}" for name in PROCESSES}
    if flags & processes:
        flags |= processes
    return [
        word
        for name, texts in (launch.items() if isinstance(launch, Mapping) else ())
        if f"--{_flag(name)}" not in flags
        for text in (texts if isinstance(texts, list) else [texts])
        for word in (f"--{_flag(name)}", *([] if text is True else [str(text)]))
    ]


def _flag(name: str) -> str:
    return name.replace("_", "-")
