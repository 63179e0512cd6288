"""Training where the environments are.

PPO on 4,096 worlds of a CartPole in torch, on one thread of the CPU, in turns with rsl_rl and skrl,
which are made for such simulators: the same worlds, networks, batches and epochs; 16 steps of all
worlds, and then 8 updates of 16,384 rows. "Compiled" is each library's own way to compile: here the
whole update and the network that collects, in the others the networks. The bars are for what is
fastest in each library. A step of collecting is also compared with its network, draw and worlds
alone: the difference is the rest of the host's work. On a GPU, what counts is what crosses the bus;
the tests count that.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from tests.benchmarks.report import Row, interleaved
from tests.benchmarks.rivals_on_device import LANES, STEPS, Alone, Ours, RslRl, Skrl

REPEATS = 15
TRAINING = f"PPO, {LANES:,} worlds"
COLLECTING = f"collecting, {LANES:,} worlds"
UNIT = "env steps/s"


def rows() -> list[Row]:
    """Measure against each library that is installed, and against the least that a step takes."""
    measured = [_step()]
    for package, rival in (("rsl_rl", RslRl), ("skrl", Skrl)):
        if importlib.util.find_spec(package) is None:
            note = f"{package} is not installed; `make bench` installs it"
            measured.append(Row.missing(TRAINING, against=package, note=note))
            continue
        for compiled in (True, False):
            how = f"{package}, {'compiled' if compiled else 'eager'}"
            bar = 1.4 if compiled else None
            measured.append(_row(TRAINING, rival, how, compiled=compiled, at_least=bar))
        measured.append(
            _row(COLLECTING, rival, f"{package}, compiled", compiled=True, at_least=1.0)
        )
    return measured


def _step() -> Row:
    alone = Alone()
    with Ours(learns=False) as ours:
        pair = interleaved(ours.run, alone.run, repeats=REPEATS, warmup=3)
    return Row.of_time(
        f"a step of {LANES:,} worlds, eager", pair, calls=STEPS, against="network, draw and worlds"
    )


def _row(
    name: str, rival: type[Any], against: str, *, compiled: bool, at_least: float | None
) -> Row:
    learns = name == TRAINING
    with (
        Ours(compiled=compiled, learns=learns) as ours,
        rival(compiled=compiled, learns=learns) as other,
    ):
        pair = interleaved(ours.run, other.run, repeats=REPEATS, warmup=3)
    return Row.of_rate(
        name, pair, count=LANES * STEPS, unit=UNIT, against=against, at_least=at_least
    )
