"""Several agents: cooperation, and self-play."""

from __future__ import annotations

from typing import Final

from tests.results.entry import Entry

__all__ = ["ENTRIES"]

_SECTION: Final = "Several agents"
_SEEDS: Final = (0, 1, 2, 3, 4)
_GAME: Final = "Rashid et al., 2018, table 2"

_RANDOM: Final = Entry(
    _SECTION,
    "random actions",
    "simple_spread_v3",
    "tests.results.random_spread",
    printed=r"mean return (\S+) over",
    minutes=0.1,
)

ENTRIES: Final = [
    Entry(
        _SECTION,
        "QMIX",
        "TwoStepGame",
        "qmix",
        ("dmiddleware.zoo.envs:TwoStepGame",),
        seeds=_SEEDS,
        at_least=8.0,
        of_last=True,
        literature="8",
        source=_GAME,
        minutes=0.5,
    ),
    Entry(
        _SECTION,
        "OW-QMIX",
        "TwoStepGame",
        "wqmix",
        ("dmiddleware.zoo.envs:TwoStepGame",),
        seeds=_SEEDS,
        at_least=8.0,
        of_last=True,
        literature="8",
        source=_GAME,
        minutes=0.5,
    ),
    Entry(
        _SECTION,
        "VDN",
        "TwoStepGame",
        "vdn",
        ("dmiddleware.zoo.envs:TwoStepGame",),
        seeds=_SEEDS,
        # An untrained policy may get 8 by chance, so the best one says nothing.
        at_least=7.0,
        at_most=7.0,
        of_last=True,
        literature="7",
        source=_GAME,
        minutes=0.5,
    ),
    _RANDOM,
    *(
        Entry(
            _SECTION,
            algorithm,
            "simple_spread_v3",
            algorithm.lower(),
            ("mpe2.simple_spread_v3:parallel_env",),
            beats=_RANDOM,
            minutes=15.0,
        )
        for algorithm in ("IPPO", "MAPPO", "QMIX")
    ),
    Entry(
        _SECTION,
        "DQN in self-play",
        "tictactoe-v3",
        "examples.tictactoe_self_play",
        seeds=_SEEDS[:3],
        at_least=0.85,
        minutes=3.0,
    ),
    *(
        Entry(
            _SECTION,
            f"{algorithm}, trained against the other team",
            f"Tag, {team}",
            "examples.red_and_blue",
            seeds=_SEEDS[:3],
            part=team,
            at_least=at_least,
            minutes=2.0,
        )
        for team, algorithm, at_least in (("red", "MAPPO", 0.0), ("blue", "SAC", 55.0))
    ),
]
