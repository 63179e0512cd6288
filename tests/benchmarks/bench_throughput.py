"""Training in many processes.

Env steps that are learned from per second: PPO on CartPole-v1, against the number of processes that
collect, next to RLlib and Sample Factory. Each run is measured from a few seconds after its first
batch on, when all of its processes take part. The runs take turns, and a figure is the median over
the turns with half its quartile range. In our runs and in RLlib's, one process learns and the
others collect; Sample Factory has another one that chooses actions, and another one that manages
the run. "One process" is our program started as it is, RLlib without EnvRunner actors, and Sample
Factory's serial mode.

Equal for all: 32 environments in all, stepped one after the other in each process and without
Gymnasium's checker; batches of 1,024 env steps; 4 epochs of minibatches of 256; a network with two
hidden layers of 64, tanh, shared by actor and critic; Adam, the coefficients of PPO, a clipped
gradient; one torch thread; no normalization, evaluation, checkpoints or logs.

Not equal, because the libraries differ:

- Our collectors send whole batches, so a batch comes from one of n collectors and has n times as
  many steps of an nth of the environments. The others put a batch together from 32 steps of each
  environment.
- While a batch is learned from, our collectors and those of Sample Factory (`async_rl`) collect the
  next one. RLlib's PPO collects and learns alternately. In Sample Factory's serial mode and in our
  one process, this is so too.
- Sample Factory does not shuffle minibatches, which it calls slow; the others do. It uses
  `batched_sampling=True` and `worker_num_splits=1`, which are faster here than its defaults, and
  scales rewards by 0.1 as its own example for CartPole does.
- RLlib compiles its results after every ten batches, not after each one.
- Our optimizer is fused Adam. The others have no option for it.
- Sample Factory needs Gymnasium 0.29 and NumPy 1, RLlib Gymnasium 1.2. Each has an environment of
  its own, which this benchmark makes in `build/rivals`.

On Ray, our processes are actors of a Ray cluster of one node, connected over tcp.
``BENCH_SMALL=1`` makes one short turn.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks import throughput_setting as S
from tests.benchmarks.report import Grid, Row, median_and_spread
from tests.benchmarks.rival_environment import RivalMissing, python_with, version_of
from tests.dmiddleware.launch.ray_cluster import (
    in_namespace,
    ray_cluster,
    rays_environment,
    why_no_ray,
)

ROOT = Path(__file__).resolve().parents[2]
_SMALL = bool(os.environ.get("BENCH_SMALL"))
COUNTS = (0, 1, 2, 4, 8)
TURNS = 1 if _SMALL else 3
WARMUP_S = 1.0 if _SMALL else 3.0
SECONDS = 2.0 if _SMALL else 6.0
DEADLINE_S = 180.0
UNIT = "env steps/s"
PROGRAM = "tests.benchmarks.throughput_program"
N_RAY_CPUS = 16  # of Ray's book-keeping: each actor gets one


@dataclass
class Side:
    """One column of the table.

    Attributes:
        name: its heading.
        measure: runs with a number of collectors, and returns the rate.
        counts: the numbers of collectors; 0: one process does everything.
        missing: why it cannot run; empty: it can.
        rates: those of all turns, by the number of collectors.
    """

    name: str
    measure: Callable[[int], float]
    counts: tuple[int, ...] = COUNTS
    missing: str = ""
    rates: dict[int, list[float]] = field(default_factory=dict)

    def run(self, count: int) -> None:
        """Take a turn."""
        if not self.missing and count in self.counts:
            try:
                rate = self.measure(count)
            except RuntimeError as error:  # do not lose the turns before
                print(f"{error}\n{self.name}, {named(count)}: once more", flush=True)
                rate = self.measure(count)
            print(f"{self.name}, {named(count)}: {rate:,.0f} {UNIT}", flush=True)
            self.rates.setdefault(count, []).append(rate)

    def cell(self, count: int) -> str:
        """Return the figure as text."""
        if count not in self.rates:
            return "-"
        middle, spread = median_and_spread(self.rates[count])
        return f"{middle:,.0f} ± {spread:.0%}"

    def fastest(self, counts: Iterable[int] = COUNTS) -> int:
        """Return the number of collectors with the highest median."""
        measured = [count for count in counts if count in self.rates]
        return max(measured, key=lambda count: statistics.median(self.rates[count]))


def rows() -> tuple[list[Row], Grid]:
    """Measure all sides."""
    no_ray = why_no_ray()
    local = Side("dmiddleware", run_locally)
    ray = Side("dmiddleware on Ray", run_on_ray, counts=COUNTS[1:], missing=no_ray)
    rllib = Side(f"RLlib {version_of('ray[rllib]', 'rllib')}", run_rllib, missing=no_ray)
    sample_factory = Side(
        f"Sample Factory {version_of('sample-factory', 'sample-factory')}", run_sample_factory
    )
    for rival, name in ((rllib, "rllib"), (sample_factory, "sample-factory")):
        if not rival.missing:
            try:
                python_with(name)
            except RivalMissing as reason:
                rival.missing = f"{rival.name} is not installed: {reason}"
    sides = [local, ray, rllib, sample_factory]
    for turn in range(TURNS):
        for count in COUNTS:
            for side in sides[turn % 4 :] + sides[: turn % 4]:
                side.run(count)
    grid = Grid(
        ("", *(side.name for side in sides)),
        [(named(count), *(side.cell(count) for side in sides)) for count in COUNTS],
    )
    best = local.fastest(COUNTS[1:])
    return [
        compare(local, best, local, 0, against="one process"),
        *versus(local, rllib),
        *versus(local, sample_factory),
        *against_itself(ray, local),
    ], grid


def versus(ours: Side, rival: Side) -> list[Row]:
    """Compare with another library: in one process, and the fastest number of each."""
    if rival.missing:
        return [Row.missing("training", against=rival.name, note=rival.missing)]
    return [
        compare(ours, 0, rival, 0, against=f"{rival.name}, one process", at_least=1.0),
        compare(
            ours,
            ours.fastest(),
            rival,
            best := rival.fastest(),
            against=f"{rival.name}, its fastest: {named(best)}",
            at_least=1.0,
        ),
    ]


def against_itself(ray: Side, local: Side) -> list[Row]:
    """Compare the fastest number on Ray with the same number on the local supervisor."""
    if ray.missing:
        return [Row.missing("training on Ray", against=local.name, note=ray.missing)]
    best = ray.fastest()
    return [compare(ray, best, local, best, against="the same without Ray")]


def compare(
    ours: Side,
    count: int,
    other: Side,
    other_count: int,
    *,
    against: str,
    at_least: float | None = None,
) -> Row:
    """Compare the rates of two sides, turn by turn."""
    pairs = zip(ours.rates[count], other.rates[other_count], strict=True)
    ratio, spread = median_and_spread([a / b for a, b in pairs])
    return Row(
        f"{ours.name}: {named(count)}",
        against,
        ours=statistics.median(ours.rates[count]),
        reference=statistics.median(other.rates[other_count]),
        ratio=ratio,
        unit=UNIT,
        at_least=at_least,
        spread=spread,
    )


def named(count: int) -> str:
    """Return what a number of collectors is called."""
    return {0: "one process", 1: "1 collector"}.get(count, f"{count} collectors")


def run_locally(count: int) -> float:
    """Run our program in one process, or in those of the local supervisor."""
    if count == 0:
        return rate_of([sys.executable, "-W", "ignore", "-m", PROGRAM], settings(count))
    command = [sys.executable, "-W", "ignore", "-m", "dmiddleware.launch", *launched(count)]
    return rate_of(command, settings(count))


def run_on_ray(count: int) -> float:
    """Run our program as actors of a Ray cluster that is started for it."""
    with ray_cluster(N_RAY_CPUS) as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.start(*launched(count), cwd=Path(folder))
        cluster.wait(DEADLINE_S)
        output = (Path(folder) / "ditask.txt").read_text()
    return rate_in(output, what="ditask on Ray")


def launched(count: int) -> list[str]:
    """Return the options of `ditask` for our program."""
    options = ["--package", str(ROOT), "--main", f"{PROGRAM}.main"]
    options += ["--roles", f"learner=1,collector={count}"]
    for name, value in settings(count).items():
        options += ["--env", f"{name}={value}"]
    return options


def run_rllib(count: int) -> float:
    """Run RLlib with this number of EnvRunner actors."""
    command = in_namespace(*script("rllib", "throughput_rllib.py"))
    with rays_environment() as environment:
        return rate_of(command, environment | settings(count))


def run_sample_factory(count: int) -> float:
    """Run Sample Factory with this number of rollout workers."""
    return rate_of(script("sample-factory", "throughput_sample_factory.py"), settings(count))


def script(name: str, file: str) -> list[str]:
    """Return the command that runs a file in the environment of a library.

    Libraries may install a package that is called ``tests``, so it is not run as a module.
    """
    return [str(python_with(name)), "-W", "ignore", str(Path(__file__).with_name(file))]


def settings(count: int) -> dict[str, str]:
    """Return the variables for one run."""
    return {
        S.COLLECTORS: str(count),
        S.WARMUP_S: str(WARMUP_S),
        S.SECONDS: str(SECONDS),
        "OMP_NUM_THREADS": "1",
    }


def rate_of(command: list[str], variables: dict[str, str]) -> float:
    """Run a program that prints a rate, and kill what it leaves behind."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # A program that hangs after the measurement has given its rate nevertheless.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        return rate_in(file.read().decode(errors="replace"), what=" ".join(command))


def rate_in(output: str, *, what: str) -> float:
    """Return the rate that a program has printed."""
    found = re.search(r"rate ([\d.]+)", output)
    if found is None:
        raise RuntimeError(f"{what} gave no rate:\n{output[-4000:]}")
    return float(found[1])
