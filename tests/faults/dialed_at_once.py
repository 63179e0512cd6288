"""Many processes that dial one listener at the same moment."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import msgspec

from tests.faults.dial_program import Answer
from tests.faults.fault_result import FaultResult
from tests.faults.process_cluster import ROOT, Cluster, cluster

__all__ = ["dialed_at_once"]

_NOTICE_S = 0.1
"""How long before its time a dial is announced to all processes."""


def dialed_at_once(transport: str, *, dialers: int, times: int) -> FaultResult:
    """Let processes dial a listener at the same moment, repeatedly.

    Args:
        transport: what connects the nodes.
        dialers: number of processes that dial.
        times: number of repetitions.
    """
    result = FaultResult(f"{dialers} processes dial at the same moment, {times} times", transport)
    took, failures = [], []
    with cluster(transport) as nodes, contextlib.ExitStack() as stack:
        listener = nodes.listener()
        listener.await_line("listening")
        processes = [
            stack.enter_context(_dialer(nodes, number)) for number in range(1, dialers + 1)
        ]
        for _ in range(times):
            when = time.monotonic() + _NOTICE_S
            for process in processes:
                _write(process, str(when))
            answers = [msgspec.json.decode(_line(process), type=Answer) for process in processes]
            took.append(max(answer.took_s for answer in answers))
            failures += [reason for answer in answers for reason in answer.failures]
        refused = listener.status()["refused"]
        listener.stop()
    example = f", such as: {failures[0]}" if failures else ""
    result.check(
        "0 failed handshakes",
        f"{len(failures)} of {dialers * times:,}{example}",
        not failures,
    )
    result.check("none counted as refused", refused, refused == 0)
    result.check(
        "the time until all are connected is reported",
        f"median {statistics.median(took):.2f} s, longest {max(took):.2f} s",
        True,
    )
    return result


@contextlib.contextmanager
def _dialer(nodes: Cluster, node_id: int) -> Iterator[subprocess.Popen[str]]:
    spec = nodes.spec(node_id, dial=(nodes.address,))
    command = [sys.executable, "-m", "tests.faults.dial_program"]
    with subprocess.Popen(
        [*command, msgspec.json.encode(asdict(spec)).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            _line(process)
            yield process
        finally:
            # Its program ends with its input; it waits for no longer than its start's deadline.
            assert process.stdin is not None
            process.stdin.close()


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that dials has ended with exit code {process.wait()}")
    return line
