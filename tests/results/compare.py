"""The same environment, steps and seeds in ours and in another library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dmiddleware.runs import Difference, compare_runs
from dmiddleware.runs.statistics import short
from tests.results import report
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

__all__ = ["PAIRS", "Pair", "compared", "difference", "missed", "table"]

_HEAD = """\
## Comparison with other libraries

The same environment, number of steps and seeds, on the same machine, two trainings at a time with
one core each: `make compare`. Both sides have the settings that the other library's authors publish
for the task in the RL Baselines3 Zoo; C51, for which nobody publishes any, has those of DQN.

The difference is that of the mean scores, ours less theirs, with its 95% bootstrap interval. *Not
visible below* is what these seeds cannot show: half the width of Welch's 95% interval, which is
right for few seeds, where the bootstrap is too narrow. A smaller difference may be luck: the table
then says neither that ours is as good nor that it is not. A larger one is marked, and
`make compare` fails if ours is lower. With eight equal pairs, luck marks one or more with
probability 0.34, and fails `make compare` with probability 0.18.

The time ratio is ours divided by their mean, evaluations included; below 1 ours is faster. All of
ours but PPO and DDPG compile the update, and the compilation counts.

"""
_COLUMNS = (
    "algorithm",
    "environment",
    "steps",
    "ours",
    "theirs",
    "difference",
    "not visible below",
    "library",
    "seeds",
    "time ratio",
)


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
    rows: list[Sequence[str]] = [_COLUMNS, ["---"] * len(_COLUMNS)]
    rows += [_cells(pair, *_sides(pair, records)) for pair in PAIRS]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def difference(env: str, ours: Sequence[Record], theirs: Sequence[Record]) -> Difference | None:
    """Return how much higher our mean score is; None: a side has no evaluations on record."""
    sides = {"ours": report.runs_of(env, ours), "theirs": report.runs_of(env, theirs)}
    if not all(sides.values()):
        return None
    (found,) = compare_runs(sides).differences
    return found


def missed(names: Collection[str], records: Records) -> list[str]:
    """Return the pairs in which ours is lower by more than luck would make it.

    Args:
        names: the trainings to judge; a pair counts if either of its sides is among them.
        records: the records by the entries' names.
    """
    lines = []
    for pair in PAIRS:
        if pair.ours.name not in names and pair.rival.name not in names:
            continue
        found = difference(pair.ours.env, *_sides(pair, records))
        if found is not None and found.is_visible and found.value.value < 0:
            lines.append(f"{pair.ours.name}: {found.value} of the score of {pair.library}")
    return lines


def _sides(pair: Pair, records: Records) -> tuple[Sequence[Record], Sequence[Record]]:
    return records.get(pair.ours.name, ()), records.get(pair.rival.name, ())


def _cells(pair: Pair, ours: Sequence[Record], theirs: Sequence[Record]) -> list[str]:
    ratio = ""
    if ours and theirs:
        their_s = statistics.mean(record.train_s for record in theirs)
        ratio = report.spread([record.train_s / their_s for record in ours], n_decimals=2)
    found = difference(pair.ours.env, ours, theirs)
    return [
        pair.ours.algorithm,
        pair.ours.env,
        f"{CASES[pair.case].env_step:,}",
        *(
            report.score_text(pair.ours.env, one) if one else "not run yet"
            for one in (ours, theirs)
        ),
        *(("", "") if found is None else (_told(found), _least(found))),
        pair.library,
        ", ".join(str(len(side)) for side in (ours, theirs)),
        ratio,
    ]


def _told(found: Difference) -> str:
    mark = "higher" if found.value.value > 0 else "**lower**"
    return f"{found.value} {mark if found.is_visible else ''}".rstrip()


def _least(found: Difference) -> str:
    return short(found.least_visible) if math.isfinite(found.least_visible) else "any"
