"""The same environment, steps and seeds in ours and in another library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.results.entry import Entry
from tests.results.record import Record
from tests.results.report import spread
from tests.results.rival import CASES

__all__ = ["PAIRS", "Pair", "rivals", "table"]

_HEAD = """\
## Beside other libraries

The same environment, number of steps and seeds, with the settings that the other library's authors
publish for the task (RL Baselines3 Zoo), on the same machine with one training at a time: `make
compare`. The bar: ours is not worse by more than their standard deviation. The time ratio is ours
divided by theirs, evaluations included; below 1 ours is faster.

| algorithm | environment | steps | ours | theirs | library | time ratio |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Pair:
    """One of our entries, and what it is compared with.

    Attributes:
        algorithm: the algorithm of our entry.
        case: the name of the other library's training.
        library: the other library.
        minutes: about how long its training takes.
    """

    algorithm: str
    case: str
    library: str
    minutes: float

    @property
    def env(self) -> str:
        """The environment's id."""
        return CASES[self.case].env

    @property
    def rival(self) -> Entry:
        """The other library's training."""
        return Entry(
            "",
            self.algorithm,
            self.env,
            "tests.results.rival",
            ("--case", self.case),
            seeds=(0, 1, 2),
            minutes=self.minutes,
        )


PAIRS = [
    Pair("SAC", "sac_halfcheetah", "stable-baselines3", 20),
    Pair("TD3", "td3_halfcheetah", "stable-baselines3", 20),
    Pair("PPO", "ppo_halfcheetah", "stable-baselines3", 25),
    Pair("SAC", "sac_hopper", "stable-baselines3", 20),
    Pair("DDPG", "ddpg_pendulum", "stable-baselines3", 4),
    Pair("DQN", "dqn_lunarlander", "stable-baselines3", 5),
    Pair("QR-DQN", "qrdqn_lunarlander", "sb3-contrib", 10),
]


def rivals() -> list[Entry]:
    """Return the trainings of the other libraries."""
    return [pair.rival for pair in PAIRS]


def table(entries: Iterable[Entry], records_of: Callable[[Entry], Sequence[Record]]) -> str:
    """Return the section that compares.

    Args:
        entries: our entries.
        records_of: returns the records of an entry.
    """
    ours = {(entry.algorithm, entry.env): entry for entry in entries}
    rows = []
    for pair in PAIRS:
        entry = ours.get((pair.algorithm, pair.env))
        mine = [] if entry is None else records_of(entry)
        rows.append(_row(pair, mine, records_of(pair.rival)))
    return _HEAD + "".join(f"{row}\n" for row in rows)


def is_met(ours: Sequence[Record], theirs: Sequence[Record]) -> bool:
    """Return whether ours is not worse by more than their standard deviation."""
    spread = statistics.stdev([record.figure for record in theirs]) if len(theirs) > 1 else 0.0
    return _mean(ours) >= _mean(theirs) - spread


def _row(pair: Pair, ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    ratio = ""
    if ours and theirs:
        took_s = [statistics.mean(record.train_s for record in side) for side in (ours, theirs)]
        ratio = f"{took_s[0] / took_s[1]:.2f}"
    missed = " **missed**" if ours and theirs and not is_met(ours, theirs) else ""
    cells = [
        pair.algorithm,
        pair.env,
        f"{CASES[pair.case].env_step:,}",
        _told(ours) + missed,
        _told(theirs),
        pair.library,
        ratio,
    ]
    return f"| {' | '.join(cells)} |"


def _mean(records: Sequence[Record]) -> float:
    return statistics.mean(record.figure for record in records)


def _told(records: Sequence[Record]) -> str:
    return spread([record.figure for record in records]) or "not run yet"
