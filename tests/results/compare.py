"""The same environment, steps and seeds in ours and in another library."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.results.bars import Records
from tests.results.cases import CASES
from tests.results.continuous import (
    PPO_HALFCHEETAH,
    SAC_HALFCHEETAH,
    SAC_HOPPER,
    TD3_HALFCHEETAH,
)
from tests.results.entry import Entry
from tests.results.record import Record
from tests.results.report import spread

__all__ = ["PAIRS", "Pair", "compared", "is_met", "missed", "table"]

_HEAD = """\
## Comparison with other libraries

The same environment, number of steps and seeds, on the same machine, two trainings at a time with
one core each: `make compare`. Both sides have the settings that the other library's authors publish
for the task in the RL Baselines3 Zoo; C51, for which nobody publishes any, has those of DQN. A case
passes if our mean is at most one of their standard deviations below theirs. The time ratio is ours
divided by their mean, evaluations included; below 1 ours is faster. All of ours but PPO and DDPG
compile the update, and the compilation counts.

| algorithm | environment | steps | ours | theirs | library | seeds | time ratio |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Pair:
    """One of our trainings, and what it is compared with.

    Attributes:
        ours: our training.
        case: the name of the other library's training.
        library: the other library.
        minutes: about how long its training takes.
    """

    ours: Entry
    case: str
    library: str
    minutes: float

    @property
    def rival(self) -> Entry:
        """The other library's training."""
        return _of_case(
            "rival", self.ours.algorithm, self.case, self.minutes, seeds=self.ours.seeds
        )


SEEDS = (0, 1, 2)
TEN_SEEDS = tuple(range(10))


def _of_case(
    side: str, algorithm: str, case: str, minutes: float, *, seeds: tuple[int, ...] = SEEDS
) -> Entry:
    env, program = CASES[case].env, f"tests.results.{side}"
    return Entry("", algorithm, env, program, ("--case", case), seeds=seeds, minutes=minutes)


SB3 = "stable-baselines3"

PAIRS = [
    Pair(SAC_HALFCHEETAH, "sac_halfcheetah", SB3, 50),
    Pair(TD3_HALFCHEETAH, "td3_halfcheetah", SB3, 50),
    Pair(PPO_HALFCHEETAH, "ppo_halfcheetah", SB3, 25),
    Pair(SAC_HOPPER, "sac_hopper", SB3, 50),
    # Three seeds do not tell a difference from luck: one failure in a hundred episodes costs 15.
    Pair(
        _of_case("ours", "DDPG", "ddpg_pendulum", 3, seeds=TEN_SEEDS),
        "ddpg_pendulum",
        SB3,
        3,
    ),
    Pair(_of_case("ours", "DQN", "dqn_lunarlander", 3), "dqn_lunarlander", SB3, 11),
    Pair(_of_case("ours", "C51", "c51_lunarlander", 5), "c51_lunarlander", "tianshou", 12),
    Pair(
        _of_case("ours", "QR-DQN", "qrdqn_lunarlander", 20), "qrdqn_lunarlander", "sb3-contrib", 70
    ),
]


def compared() -> list[Entry]:
    """Return all trainings of the comparison, ours and theirs."""
    return [entry for pair in PAIRS for entry in (pair.ours, pair.rival)]


def table(records: Records) -> str:
    """Return the section that compares.

    Args:
        records: the records by the entries' names.
    """
    return _HEAD + "".join(f"{_row(pair, *_sides(pair, records))}\n" for pair in PAIRS)


def is_met(ours: Sequence[Record], theirs: Sequence[Record]) -> bool:
    """Return whether ours is not worse by more than their standard deviation."""
    spread = statistics.stdev([record.figure for record in theirs]) if len(theirs) > 1 else 0.0
    return _mean(ours) >= _mean(theirs) - spread


def missed(names: Collection[str], records: Records) -> list[str]:
    """Return the pairs whose bar is missed.

    Args:
        names: the trainings to judge; a pair counts if either of its sides is among them.
        records: the records by the entries' names.
    """
    lines = []
    for pair in PAIRS:
        if pair.ours.name not in names and pair.rival.name not in names:
            continue
        ours, theirs = _sides(pair, records)
        if _misses(ours, theirs):
            told = f"mean return {_told(ours)}, {pair.library} {_told(theirs)}"
            lines.append(f"{pair.ours.name}: {told}")
    return lines


def _sides(pair: Pair, records: Records) -> tuple[Sequence[Record], Sequence[Record]]:
    return records.get(pair.ours.name, ()), records.get(pair.rival.name, ())


def _misses(ours: Sequence[Record], theirs: Sequence[Record]) -> bool:
    return bool(ours and theirs) and not is_met(ours, theirs)


def _row(pair: Pair, ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    ratio = ""
    if ours and theirs:
        their_s = statistics.mean(record.train_s for record in theirs)
        ratio = spread([record.train_s / their_s for record in ours], n_decimals=2)
    mark = " **missed**" if _misses(ours, theirs) else ""
    cells = [
        pair.ours.algorithm,
        pair.ours.env,
        f"{CASES[pair.case].env_step:,}",
        _told(ours) + mark,
        _told(theirs),
        pair.library,
        ", ".join(str(len(side)) for side in (ours, theirs)),
        ratio,
    ]
    return f"| {' | '.join(cells)} |"


def _mean(records: Sequence[Record]) -> float:
    return statistics.mean(record.figure for record in records)


def _told(records: Sequence[Record]) -> str:
    return spread([record.figure for record in records]) or "not run yet"
