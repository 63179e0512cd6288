"""Training runs whose processes are killed: the first example's chain, launched by ditask."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.faults.fault_result import FaultResult
from tests.faults.ledger import Comparison, Ledger, compare, join
from tests.faults.process_cluster import ROOT
from tests.waiting import wait_until

__all__ = [
    "ENV_STEPS",
    "FOLDER",
    "GROUP_S",
    "SEED",
    "SNAPSHOT_EVERY",
    "Training",
    "killed_collectors",
    "killed_learner",
    "killed_rank",
    "training",
]

SNAPSHOT_EVERY = 640
"""Updates from one snapshot of the learner to the next."""

GROUP_S = 30.0
"""The deadline of the learners' process group."""

FOLDER, SEED, ENV_STEPS = "FAULTS_FOLDER", "FAULTS_SEED", "FAULTS_ENV_STEPS"
LEARNER, COLLECTORS = 0, (1, 2)
ROLES = "learner=1,collector=2,evaluator=1"
RANKS, RANK_ROLES = (0, 1), "learner=2,collector=2,evaluator=1"
_SEED = 19
_RESTART_S = 60.0
_WHOLE_RUN_S = 1200.0


class Training:
    """A run under ditask.

    Args:
        folder: folder for ledgers and files.
        transport: ``ipc`` or ``tcp``.
        seed: the run's seed.
        env_steps: environment steps after which it ends.
        roles: the roles of its nodes.
        on_failure: what happens when one fails.
        main: the program.
    """

    def __init__(
        self,
        folder: Path,
        transport: str,
        *,
        seed: int,
        env_steps: int,
        roles: str = ROLES,
        on_failure: str = "restart",
        main: str = "tests.faults.training_program.main",
    ) -> None:
        self.folder = folder
        self._log = (folder / "ditask.log").open("wb")
        self._ledgers: dict[str, Ledger] = {}
        command = [*DITASK, "--main", main]
        command += ["--protocol", transport]
        command += ["--roles", roles, "--topology", "mesh"]
        command += ["--on-failure", on_failure, "--max-restarts", "40"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=self._log,
            stderr=self._log,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                FOLDER: str(folder),
                SEED: str(seed),
                ENV_STEPS: str(env_steps),
            },
        )

    @property
    def alive(self) -> bool:
        """Whether the run is still going."""
        return self.process.poll() is None

    def starts(self, node_id: int) -> list[Ledger]:
        """Return the ledgers of all starts of a node, in order."""
        for path in self.folder.glob(f"{node_id}-*.ledger"):
            self._ledgers.setdefault(path.name, Ledger(path))
        mine = [x for name, x in self._ledgers.items() if name.startswith(f"{node_id}-")]
        return sorted(
            (x for x in mine if x.lines("started")), key=lambda x: x.lines("started")[0][1]
        )

    def await_lines(self, node_id: int, start: int, what: str, count: int) -> list[Any]:
        """Wait for ``count`` lines of one start of a node, and return the last of them."""

        def found() -> bool:
            if not self.alive:
                raise RuntimeError(f"the run has ended: {self.log()}")
            starts = self.starts(node_id)
            return len(starts) > start and len(starts[start].lines(what)) >= count

        wait_until(
            found, f"{count} {what!r} of start {start} of node {node_id}", deadline_s=_RESTART_S
        )
        return self.starts(node_id)[start].lines(what)[count - 1]

    def kill(self, node_id: int) -> float:
        """Kill a node's current process, and return the time just before."""
        pid = self.starts(node_id)[-1].lines("started")[0][2]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def await_saving(self) -> None:
        """Wait until a snapshot is being written."""
        folder = self.folder / "runs" / "training" / "snapshots"

        def is_saving() -> bool:
            return any(folder.rglob("*.tmp"))

        wait_until(is_saving, "a snapshot that is being written", deadline_s=_RESTART_S)

    def log(self) -> str:
        """Return the end of the launcher's output."""
        return (self.folder / "ditask.log").read_text()[-3000:]

    def end(self, *, by_itself: bool) -> int:
        """Wait until the run has ended, and return its exit code."""
        if not by_itself:
            (self.folder / "enough").touch()
        return self.process.wait(_WHOLE_RUN_S if by_itself else _RESTART_S)

    def close(self) -> None:
        """Kill it if it still runs; its children end with it."""
        if self.alive:
            self.process.kill()
            self.process.wait(_RESTART_S)
        self._log.close()


@contextlib.contextmanager
def training(transport: str, **options: Any) -> Iterator[Training]:
    """Start a run in a new folder; the options are those of :class:`Training`."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        run = Training(Path(folder), transport, **options)
        try:
            yield run
        finally:
            run.close()


def killed_collectors(
    transport: str, *, kills: int, seeds: Sequence[int] = (), env_steps: int = 60_000
) -> FaultResult:
    """Kill random collectors of a training run.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: number of kills per training.
        seeds: seeds of complete runs with and without faults, whose returns are compared;
            none: one training, stopped after the last kill.
        env_steps: environment steps per training.
    """
    result = FaultResult(
        f"kill -9 of a random collector in training, {kills * max(1, len(seeds))} times", transport
    )
    rng = random.Random(_SEED)
    left: list[float] = []
    first: list[float] = []
    verdicts, codes, returns = [], [], []
    for seed in seeds or (0,):
        with training(transport, seed=seed, env_steps=env_steps) as run:
            run.await_lines(LEARNER, 0, "batch", 10)
            for _ in range(kills):
                _kill_collector(run, rng.choice(COLLECTORS), left, first)
            codes.append(run.end(by_itself=bool(seeds)))
            verdicts += _compared(run)
            returns += [x[2] for x in run.starts(LEARNER)[-1].lines("returned")]
            one_learner = len(run.starts(LEARNER)) == 1
    verdict = join(verdicts)
    fine = codes == [0] * len(codes) and one_learner
    result.check("the learner survives, the run succeeds", f"exit codes {codes}", fine)
    result.check("no accepted batch lost, duplicated or damaged", verdict, verdict.clean)
    result.at_most("node.left", max(left), 1.0)
    result.at_most("the replacement's first trajectory after its imports", max(first), 3.0)
    if seeds:
        calm = [_calm_return(transport, seed=seed, env_steps=env_steps) for seed in seeds]
        measured = f"{_figures(returns)} with faults, {_figures(calm)} without"
        spread = max(calm) - min(calm)
        inside = len(returns) == len(seeds) and min(returns) >= min(calm) - max(spread, 50.0)
        result.check("the return is within the range of runs without faults", measured, inside)
    return result


def killed_learner(transport: str, *, kills: int) -> FaultResult:
    """Kill the learner of a training run repeatedly, the last time while it saves a snapshot.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: number of kills.
    """
    what = f"kill -9 of the learner in training, {kills} times, with a clock behind"
    result = FaultResult(what, transport)
    flows, resumed_at, learned = [], [], []
    with training(transport, seed=0, env_steps=1_000_000) as run:
        for number in range(kills):
            line = run.await_lines(LEARNER, number, "batch", 20)
            if number == kills - 1:
                run.await_saving()
                line = run.starts(LEARNER)[-1].lines("batch")[-1]
            learned.append(line[3])
            run.kill(LEARNER)
            started_at = run.await_lines(LEARNER, number + 1, "started", 1)[1]
            batch = run.await_lines(LEARNER, number + 1, "batch", 1)
            flows.append(batch[1] - started_at)
            resumed_at.append(batch[3])
        followed = [_versions(run, node_id, since=started_at) for node_id in COLLECTORS]
        same = all(len(run.starts(node_id)) == 1 for node_id in COLLECTORS)
        code = run.end(by_itself=False)
    result.check("the collectors keep running", same, same)
    result.check(
        "both follow the last learner, whose clock is behind",
        f"acted with {followed} of its versions",
        min(followed) >= 3,
    )
    result.at_most("data flows after it listens again", max(flows), 5.0)
    result.check("the run succeeds", f"exit code {code}", code == 0)
    measured = f"killed at update {learned}, resumed from {resumed_at}"
    result.check(
        "resumes from the newest complete snapshot", measured, all(at > 0 for at in resumed_at)
    )
    lost = max(at - again for at, again in zip(learned, resumed_at, strict=True))
    result.at_most("lost updates (one interval and one step)", lost, SNAPSHOT_EVERY + 64, unit="")
    return result


def killed_rank(transport: str, *, kills: int) -> FaultResult:
    """Kill one of two ranks that learn as one: once without a restart, then with restarts.

    Args:
        transport: ``ipc`` or ``tcp``.
        kills: number of kills in a run that restarts its learners.
    """
    result = FaultResult(f"kill -9 of one of two ranks in training, {1 + kills} times", transport)
    options: dict[str, Any] = {"seed": 0, "env_steps": 1_000_000, "roles": RANK_ROLES}
    with training(transport, **options, on_failure="abort") as run:
        for rank in RANKS:
            run.await_lines(rank, 0, "batch", 10)
        at = run.kill(1)
        error = run.await_lines(0, 0, "rank lost", 1)
        code = run.end(by_itself=True)
        log = run.log()
        taken = [{line[2] for line in run.starts(rank)[0].lines("batch")} for rank in RANKS]
    result.at_most("the other rank ends within the group's deadline", error[1] - at, GROUP_S)
    named = error[2].partition(":")[0]
    cause = "the run failed: node 1 (learner) was killed by SIGKILL"
    result.check(
        "the run fails, and both errors name the killed rank",
        f"exit code {code}, {named}",
        code and cause in log and error[2].startswith("rank 1 "),
    )
    shared = len(taken[0] & taken[1])
    counts = f"{len(taken[0])} and {len(taken[1])} batches, {shared} of them on both"
    result.check("each batch goes to one rank", counts, min(map(len, taken)) >= 10 and not shared)
    if kills:
        with training(transport, **options) as run:
            _restart_ranks(run, kills, result)
    return result


def _restart_ranks(run: Training, kills: int, result: FaultResult) -> None:
    """Kill a random rank repeatedly; record how both continue."""
    rng = random.Random(_SEED)
    learned, resumed, flows = [], [], []
    for number in range(kills):
        lines = [run.await_lines(rank, number, "batch", 20) for rank in RANKS]
        learned.append(max(line[3] for line in lines))
        run.kill(rng.choice(RANKS))
        ready = [run.await_lines(rank, number + 1, "ready", 1)[1] for rank in RANKS]
        first = [run.await_lines(rank, number + 1, "batch", 1) for rank in RANKS]
        flows.append(max(line[1] for line in first) - max(ready))
        resumed.append([line[3] for line in first])
    same = all(len(run.starts(node_id)) == 1 for node_id in (2, 3))
    code = run.end(by_itself=False)
    result.check(
        "all ranks restart, the collectors keep running, and the run succeeds",
        f"exit code {code}",
        same and code == 0,
    )
    result.at_most("data flows after the last rank has resumed", max(flows), 5.0)
    measured = f"killed at update {learned}, resumed from {resumed}"
    together = all(len(set(updates)) == 1 and updates[0] > 0 for updates in resumed)
    result.check("both resume from the newest common snapshot", measured, together)


def _versions(run: Training, node_id: int, *, since: float) -> int:
    """Wait until a collector has acted with three versions of the policy; return how many."""
    collector = run.starts(node_id)[-1]

    def found() -> int:
        return len({line[3] for line in collector.lines("batch", since=since)})

    # The first may be of the learner before.
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: found() > 3, "versions of the policy", deadline_s=_RESTART_S)
    return found() - 1


def _kill_collector(run: Training, node_id: int, left: list[float], first: list[float]) -> None:
    """Kill a collector; record when it was missed and when its replacement sent a batch."""
    starts = len(run.starts(node_id))
    run.await_lines(node_id, starts - 1, "batch", 2)
    learner = run.starts(LEARNER)[-1]
    at = run.kill(node_id)

    def lines() -> list[list[Any]]:
        return [line for line in learner.lines("node.left", since=at) if line[2] == node_id]

    wait_until(lambda: bool(lines()), f"node {node_id} to leave")
    left.append(lines()[0][1] - at)
    started = run.await_lines(node_id, starts, "started", 1)[1]
    batch = run.await_lines(node_id, starts, "batch", 1)[2]

    def arrived() -> list[float]:
        return [line[1] for line in learner.lines("batch", since=started) if line[2] == batch]

    wait_until(lambda: bool(arrived()), "the replacement's first batch")
    first.append(arrived()[0] - started)


def _compared(run: Training) -> list[Comparison]:
    """Compare the ledgers of each start of each collector; its first batches must have arrived."""
    arrived = [line[2] for learner in run.starts(LEARNER) for line in learner.lines("batch")]
    verdicts = []
    known: set[int] = set()
    for node_id in COLLECTORS:
        for start in run.starts(node_id):
            batches = {line[2]: number for number, line in enumerate(start.lines("batch"))}
            known |= set(batches)
            got = [(batches[batch], True) for batch in arrived if batch in batches]
            if got:
                verdicts.append(compare(max(got)[0] + 1, got))
    damaged = sum(batch not in known for batch in arrived)
    return [*verdicts, Comparison(damaged=damaged)]


def _calm_return(transport: str, *, seed: int, env_steps: int) -> float:
    with training(transport, seed=seed, env_steps=env_steps) as run:
        run.end(by_itself=True)
        return float(run.starts(LEARNER)[-1].lines("returned")[0][2])


def _figures(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
