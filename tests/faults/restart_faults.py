"""A learner that fails and is restarted by ditask: nothing that its peer accepted may be lost."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.faults.fault_result import FaultResult
from tests.faults.ledger import Ledger
from tests.faults.process_cluster import ROOT

__all__ = ["failed_learner"]

_WHOLE_RUN_S = 120.0


def failed_learner(
    transport: str, *, count: int = 300, ends: str = "raises", slow_s: float = 0.0
) -> FaultResult:
    """Let the learner end half way, with ``--on-failure restart``.

    Args:
        transport: ``ipc`` or ``tcp``.
        count: how many events the collector emits.
        ends: how the learner ends: ``raises``, or is killed by ``kill -9``; the events are then
            acknowledged when handled.
        slow_s: seconds that each start of the learner takes before, and again after, it creates
            its task.
    """
    what = "a learner that raises" if ends == "raises" else "kill -9 of a learner"
    start = f", which takes {2 * slow_s:g} s to start" if slow_s else ""
    result = FaultResult(f"{what} with --on-failure restart{start}", transport)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        done = subprocess.run(
            [
                *(*DITASK, "--main", "tests.faults.restart_program.main", "--protocol", transport),
                *("--roles", "learner=1,collector=1", "--on-failure", "restart"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_WHOLE_RUN_S,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": folder,
                "OMP_NUM_THREADS": "1",
                "FAULT_COUNT": str(count),
                "FAULT_ENDS": ends,
                "FAULT_SLOW_S": str(slow_s),
            },
        )
        learner, collector = (Ledger(Path(folder) / f"{node}.ledger") for node in (0, 1))
        starts = len(learner.lines("started"))
        handled = Counter(line[2] for line in learner.lines("got"))
        accepted = {line[2] for line in collector.lines("sent")}
    lost, again = len(accepted - set(handled)), handled.total() - len(handled)
    result.check("the learner is restarted", f"{starts} starts", starts == 2)
    result.check("the run succeeds", f"exit code {done.returncode}", done.returncode == 0)
    result.check(
        "every accepted event is handled, 0 lost",
        f"{len(accepted)} accepted, {lost} lost, {again} handled by both starts",
        not lost and len(accepted) == count,
    )
    return result
