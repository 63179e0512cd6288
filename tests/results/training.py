"""Running the training of an entry, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.results.entry import Entry
from tests.results.record import Record

__all__ = ["TrainingError", "run_command", "train"]

ROOT = Path(__file__).parents[2]
RUNS = Path("runs")

_LEAST_DEADLINE_S = 600.0
_SLOWER = 5.0
"""A training fails when it takes this many times what its entry plans."""


class TrainingError(RuntimeError):
    """A training failed or did not end in time."""


def train(entry: Entry, seed: int, *, again: bool = False, alone: bool = True) -> Record:
    """Train, and return what came out.

    A training that was interrupted continues from its newest snapshot, if its program saves any.

    Args:
        entry: what to train.
        seed: its seed.
        again: whether to start from scratch even then.
        alone: whether nothing else runs. Otherwise a program of one process gets one thread: more
            threads than idle cores make it many times slower, because they wait actively.

    Raises:
        TrainingError: if the command fails, takes too long or does not tell its figure.
    """
    exp_name = f"results/{entry.name}/{seed}"
    folder = RUNS / exp_name
    revision = commit()
    resumes = not again and any(folder.glob("snapshots/*.safetensors"))
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)  # of a training that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = _command(entry, seed, exp_name, resumes=resumes)
    threads = {} if alone or entry.nodes > 1 else {"OMP_NUM_THREADS": "1"}
    if entry.prepare:
        words = [sys.executable, "-m", *entry.prepare]
        log = folder.parent / "prepare.log"
        run_command(words, log, _deadline_s(entry.prepare_minutes), threads)
    started_at = time.monotonic()
    try:
        log = folder.parent / f"{seed}.log"
        output = run_command(command, log, _deadline_s(entry.minutes), threads)
    except TrainingError as error:
        if not resumes:
            raise
        hint = "it continued from a snapshot; --again starts from scratch"
        raise TrainingError(f"{error}; {hint}") from None
    took_s = time.monotonic() - started_at
    told = folder / "result.json"
    result = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    if entry.part:
        result = {"train_s": result["train_s"], **result["parts"][entry.part]}
    figure = result.get("mean_return")
    if entry.printed:
        found = re.search(entry.printed, output)
        figure = None if found is None else float(found[1].replace(",", ""))
    if figure is None:
        raise TrainingError(f"{shlex.join(command)} does not tell its {entry.figure}")
    shutil.rmtree(folder / "snapshots", ignore_errors=True)  # there is nothing left to resume
    return Record(
        seed=seed,
        command=entry.command if entry.nodes > 1 else f"{entry.command} --seed {seed}",
        commit=revision,
        torch=torch.__version__,
        figure=figure,
        last=None if entry.printed else result.get("last_return"),
        n_episode=result.get("n_episode", 0),
        env_step=result.get("env_step", 0),
        train_iter=result.get("train_iter", 0),
        train_s=result.get("train_s", took_s),
        evaluations=tuple(map(tuple, result.get("evaluations", ()))),
        logged=_mean_logged(folder / "log.txt", entry.logged) if entry.logged else None,
        resumed=resumes,
    )


def _deadline_s(minutes: float) -> float:
    return max(_LEAST_DEADLINE_S, _SLOWER * 60 * minutes)


def _mean_logged(log: Path, name: str) -> float:
    """Return the mean of a figure in the log of a run.

    Raises:
        TrainingError: if the log has no such figure.
    """
    pattern = rf"\b{re.escape(name)} (\S+?)(?:, |$)"
    told = log.read_text(encoding="utf-8") if log.exists() else ""
    found = re.findall(pattern, told, re.MULTILINE)
    if not found:
        raise TrainingError(f"{log} has no figure {name}")
    return statistics.mean(float(figure.replace(",", "")) for figure in found)


def run_command(
    command: Sequence[str], log: Path, deadline_s: float, variables: Mapping[str, str]
) -> str:
    """Run a command and return what it printed, which is also in the log.

    Args:
        command: its words.
        log: the file for what it prints.
        deadline_s: when to end it.
        variables: further variables of its environment.

    Raises:
        TrainingError: if it fails or takes longer than ``deadline_s`` seconds.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(deadline_s)
        except BaseException as error:
            # The processes that it started, too.
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TrainingError(
                    f"{shlex.join(command)} has not ended in {deadline_s:g} s; see {log}"
                ) from None
            raise
    if code != 0:
        raise TrainingError(f"{shlex.join(command)} failed with exit code {code}; see {log}")
    return log.read_text(encoding="utf-8")


def commit() -> str:
    """Return the revision of this repository, with a plus sign if files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _command(entry: Entry, seed: int, exp_name: str, *, resumes: bool) -> list[str]:
    name = str(RUNS / exp_name) if entry.printed else exp_name
    resume = ("--resume",) if resumes else ()
    options = [*entry.options, *resume, "--seed", str(seed), "--exp-name", name]
    python = (sys.executable, "-m")
    return entry.words(python, (*python, "dmiddleware.launch"), options)
