"""Exploration: goals in hindsight, and rewards for new observations."""

from __future__ import annotations

from tests.results.entry import Entry

SECTION = "Exploration"
SEEDS = (0, 1, 2)
BITS = "bit flipping, 30 bits"
HER = "Andrychowicz et al., Hindsight Experience Replay, 2017, figure 1"

ENTRIES = [
    # The return is -30 without success, and -14 on average with the fewest steps: -14.8 means that
    # at least 95% of the goals were reached.
    Entry(
        SECTION,
        "DQN with HER",
        BITS,
        "examples.bitflip_her",
        seeds=SEEDS,
        at_least=-14.8,
        literature="all goals reached",
        source=HER,
        minutes=3,
    ),
    Entry(
        SECTION,
        "DQN",
        BITS,
        "examples.bitflip_her",
        ("--algo", "dqn"),
        seeds=SEEDS,
        literature="no goal reached with more than 13 bits",
        source=HER,
        minutes=3,
    ),
    *(
        Entry(
            SECTION,
            algorithm,
            "MiniGrid-DoorKey-8x8",
            "examples.doorkey_rnd",
            ("--algo", algo),
            seeds=SEEDS,
            minutes=7,
        )
        for algo, algorithm in (("rnd", "PPO with RND"), ("icm", "PPO with ICM"), ("ppo", "PPO"))
    ),
]
