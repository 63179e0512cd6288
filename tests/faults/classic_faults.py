"""Classic parallel trainings whose coordinator, learner or collector is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.faults.fault_result import FaultResult
from tests.faults.training_faults import Training, training

__all__ = ["killed_classic"]

_NODES = {"coordinator": 0, "learner": 1, "collector": 2}
_COORDINATOR, _LEARNER, _COLLECTOR = _NODES.values()
_WORKERS = (1, 2, 3)
_BATCHES = 20
_FLOWS_S = 30.0


_PROGRAM: Final = {
    "main": "tests.faults.classic_program.main",
    "roles": "coordinator=1,learner=1,collector=2",
}


def killed_classic(transport: str, *, roles: Sequence[str]) -> FaultResult:
    """Kill processes of a classic training one after the other, and then end it in order.

    Args:
        transport: ``ipc`` or ``tcp``.
        roles: the role of each process to kill, in order.
    """
    what = ", ".join(roles)
    result = FaultResult(f"kill -9 in a classic training: {what}", transport)
    flows = []
    kills: Counter[int] = Counter()
    with training(transport, seed=0, env_steps=0, **_PROGRAM) as run:
        for role in roles:
            victim = _NODES[role]
            run.await_lines(_LEARNER, kills[_LEARNER], "batch", _BATCHES)
            run.await_lines(_COLLECTOR, kills[_COLLECTOR], "sample", 1)
            run.kill(victim)
            kills[victim] += 1
            started_at = run.await_lines(victim, kills[victim], "started", 1)[1]
            flows.append(_next_batch_at(run, kills[_LEARNER], started_at) - started_at)
        code = run.end(by_itself=False)
        ends = [line for start in run.starts(_COORDINATOR) for line in start.lines("ended")]
        tasks = Counter(
            line[2]
            for node in _WORKERS
            for start in run.starts(node)
            for line in start.lines("task")
        )
        n_starts = {node: len(run.starts(node)) for node in (_COORDINATOR, *_WORKERS)}
    result.check("the run succeeds", f"exit code {code}", code == 0)
    is_over = len(ends) == 1 and bool(ends[0][2])
    result.check("the commander ends the training", f"{len(ends)} end", is_over)
    twice = [task_id for task_id, count in tasks.items() if count > 1]
    result.check("no task is started twice", f"{twice or 'none'} of {len(tasks)}", not twice)
    expected = {node: 1 + kills[node] for node in n_starts}
    result.check("the others keep running", f"starts {n_starts}", n_starts == expected)
    result.at_most("data flows after the restart", max(flows), _FLOWS_S)
    return result


def _next_batch_at(run: Training, start: int, since: float) -> float:
    """Return when a start of the learner gets its first batch after a time."""
    run.await_lines(_LEARNER, start, "started", 1)
    before = len(run.starts(_LEARNER)[start].lines("batch"))
    after = run.starts(_LEARNER)[start].lines("batch", since=since)
    batch = after[0] if after else run.await_lines(_LEARNER, start, "batch", before + 1)
    return float(batch[1])
