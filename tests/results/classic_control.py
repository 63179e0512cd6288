"""The small environments on which every change is tried first."""

from __future__ import annotations

from dataclasses import replace

from tests.results.entry import Entry

CARTPOLE = "CartPole-v1"
SECTION = "Classic control"
SEEDS = (0, 1, 2)
FIVE_SEEDS = (0, 1, 2, 3, 4)


_CAR = Entry(
    SECTION,
    "SAC (no demonstrations)",
    "MountainCarContinuous-v0",
    "examples.mountain_car_rlpd",
    ("--share", "0"),
    seeds=FIVE_SEEDS,
    literature="90, the bar at which it counts as solved",
    source="Gymnasium's registry",
    minutes=2,
)

ENTRIES = [
    Entry(SECTION, "DQN", CARTPOLE, "examples.cartpole_dqn", seeds=FIVE_SEEDS, at_least=475),
    Entry(
        SECTION,
        "DQN, prioritized, 5 steps, dueling",
        CARTPOLE,
        "examples.cartpole_dqn_per_nstep",
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(SECTION, "PPO", CARTPOLE, "examples.cartpole_ppo", seeds=SEEDS, at_least=475),
    Entry(
        SECTION,
        "DQN, with custom middleware",
        CARTPOLE,
        "examples.custom_middleware",
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(
        SECTION,
        "DQN, written for one env at a time",
        CARTPOLE,
        "examples.custom_policy_per_env",
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(
        SECTION,
        "behavior cloning of DQN",
        CARTPOLE,
        "examples.bc_offline",
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(
        SECTION,
        "SQIL of DQN, from 4,000 steps",
        CARTPOLE,
        "examples.cartpole_sqil",
        seeds=SEEDS,
        at_least=475,
        minutes=2,
    ),
    Entry(
        SECTION,
        "DQfD, from 2,000 steps of DQN",
        CARTPOLE,
        "examples.cartpole_dqfd",
        seeds=SEEDS,
        at_least=475,
        minutes=2,
    ),
    replace(
        _CAR,
        algorithm="RLPD, from 5 episodes of a rule",
        options=(),
        beats=_CAR,
        minutes=1,
    ),
    _CAR,
    Entry(
        SECTION,
        "discrete CQL, from 20,000 steps with ε = 0.5",
        CARTPOLE,
        "examples.cartpole_cql",
        seeds=SEEDS,
        at_least=475,
        minutes=2,
    ),
    Entry(SECTION, "DQN", CARTPOLE, "examples.cartpole_dqn", nodes=4, at_least=475),
    Entry(SECTION, "DQN", "Acrobot-v1", "dqn", ("Acrobot-v1",), seeds=SEEDS, at_least=-100),
    Entry(SECTION, "PPO", "Pendulum-v1", "ppo", ("Pendulum-v1",), seeds=SEEDS, at_least=-250),
    Entry(
        "Games and images",
        "DQN by self-play",
        "tic-tac-toe",
        "examples.tictactoe",
        seeds=SEEDS,
        at_most=0,
        figure="games lost of 100",
        printed=r"lost (\d+) of 100",
    ),
    Entry(
        "Games and images",
        "behavior cloning",
        "handwritten digits",
        "examples.digits",
        seeds=SEEDS,
        at_least=97,
        figure="accuracy in %",
        printed=r"digits: ([\d.]+)%",
    ),
]
