"""A training whose processes are all killed at random moments, and that ditask resume continues."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.faults.fault_result import FaultResult
from tests.faults.process_cluster import ROOT
from tests.waiting import wait_until

__all__ = ["killed_run"]

EXAMPLE = "examples.cartpole_dqn.main"
ROLES = "learner=1,collector=2,evaluator=1"
ARGUMENTS = ("--exp-name", "run", "--snapshots.every-train-iter", "64")
SOLVED = 475.0
"""The return from which CartPole-v1 counts as solved."""

_MARK = "KILLED_RUN"
_SEED = 23
_LATER_S = 0.2
_START_S = 8.0
_SNAPSHOT_S = 240.0
_END_S = 1200.0


def killed_run(
    transport: str,
    *,
    kills: int,
    main: str = EXAMPLE,
    roles: str = ROLES,
    arguments: Sequence[str] = ARGUMENTS,
    solved: float | None = SOLVED,
) -> FaultResult:
    """Kill all processes of a training at once, launcher included, and resume it each time.

    Three of four kills follow a new snapshot within a second; the others meet the start.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: number of kills.
        main: the program; it saves snapshots, in the folder ``runs/run``.
        roles: the roles of the processes.
        arguments: the arguments of the program.
        solved: the mean return of the best policy at the end; None: any.
    """
    result = FaultResult(f"kill -9 of all processes of a training, {kills} times", transport)
    rng = random.Random(_SEED)
    with tempfile.TemporaryDirectory(prefix="killed-run-", ignore_cleanup_errors=True) as name:
        run = _Killed(Path(name), transport)
        try:
            run.start("--main", main, "--roles", roles, "--", *arguments)
            ended_early = 0
            for number in range(kills):
                if number % 4 == 3:
                    run.go_on(rng.uniform(0.0, _START_S))
                else:
                    run.await_snapshot()
                    run.go_on(rng.uniform(0.0, _LATER_S))
                ended_early += run.kill()
                run.resume()
            code, last = run.end(), run.output()
            log = (run.folder / "runs/run/log.txt").read_text()
            steps = [int(step) for step in re.findall(r"resumed at step (\d+)", log)]
            left = run.left()
            folders = sorted(path.name for path in run.scratch.glob("*/*"))
            returned = json.loads((run.folder / "runs/run/result.json").read_text())["mean_return"]
            runs = sorted(path.name for path in (run.folder / "runs").iterdir())
        finally:
            run.kill()
    result.check("the run had not ended at any kill", f"{ended_early} ended", not ended_early)
    result.check(
        "the run succeeds", f"exit code {code}{'' if code == 0 else f', {last}'}", code == 0
    )
    if solved is not None:
        result.check(
            f"it ends solved, with a mean return ≥ {solved:g}",
            f"{returned:.1f}",
            returned >= solved,
        )
    in_order = steps == sorted(steps) and len(steps) > 0
    result.check("no start falls behind the one before", f"resumed at steps {steps}", in_order)
    result.check("one folder, with the whole run", ", ".join(runs), runs == ["run"])
    measured = f"{len(left)} processes, {', '.join(folders) or '0 files'}"
    result.check("no process, socket or shared memory is left", measured, not (left or folders))
    return result


class _Killed:
    """A run of ditask in a folder of its own, whose processes have a mark.

    Args:
        folder: the working directory, with folders for temporary files and shared memory.
        transport: ``ipc`` or ``tcp``.
    """

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder, self._transport = folder, transport
        self.scratch = folder / "scratch"
        for name in ("tmp", "shared"):
            (self.scratch / name).mkdir(parents=True)
        self._log = folder / "ditask.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        """Start ditask, with further options."""
        at = words.index("--") if "--" in words else len(words)
        own = ["--protocol", self._transport, "--shared-memory", str(self.scratch / "shared")]
        own = [*words[:at], *(() if words[0] == "resume" else own), "--log-dir", "logs"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DITASK, *own, *words[at:]],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.scratch / "tmp"),
                    _MARK: str(self.folder),
                },
            )

    def resume(self) -> None:
        """Continue the run, with the options that it had."""
        self.start("resume", "runs/run")

    def await_snapshot(self) -> None:
        """Wait until there is a new snapshot, or the run has ended."""
        assert self._process is not None
        process, before = self._process, self._newest()

        def found() -> bool:
            return self._newest() != before or process.poll() is not None

        wait_until(found, f"a snapshot; {self.output()}", deadline_s=_SNAPSHOT_S)

    def go_on(self, seconds: float) -> None:
        """Let it run for so long, or until it ends."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> bool:
        """Kill all processes, and return whether the run had ended before."""
        ended = self._process is not None and self._process.poll() is not None
        wait_until(self._are_dead, "the killed processes to end", deadline_s=_END_S)
        if self._process is not None:
            self._process.wait(_START_S)
        return ended

    def left(self) -> list[int]:
        """Return the ids of the processes that run."""
        mark, found = f"{_MARK}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def end(self) -> int:
        """Wait until the run has ended, and return its exit code."""
        assert self._process is not None
        return self._process.wait(_END_S)

    def output(self) -> str:
        """Return the last line of the launcher's output."""
        return self._log.read_text(errors="replace").strip().rpartition("\n")[2]

    def _are_dead(self) -> bool:
        """Kill the processes that run; return whether there were none."""
        left = self.left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def _newest(self) -> Path | None:
        return max((self.folder / "runs/run/snapshots").glob("step_*"), default=None)
