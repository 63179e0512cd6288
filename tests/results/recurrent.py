"""What policies with a memory reach."""

from tests.results.entry import Entry

SECTION = "Memory"
POSITIONS = "CartPolePositions-v1"
RECALL = "Recall-v0"
TEAM_RECALL = "TeamRecall"
PENDULUM = "PendulumPositions-v1"
FIVE_SEEDS = (0, 1, 2, 3, 4)
_ENVS = "dmiddleware.zoo.envs"

ENTRIES = [
    Entry(
        SECTION,
        "recurrent PPO",
        POSITIONS,
        "ppo_recurrent",
        (f"{_ENVS}:{POSITIONS}",),
        seeds=(0, 1, 2),
        at_least=475.0,
        literature="475, the bar at which CartPole-v1 with velocities counts as solved",
        source="Gymnasium's registry",
        minutes=2.0,
    ),
    Entry(
        SECTION,
        "R2D2",
        POSITIONS,
        "r2d2",
        (f"{_ENVS}:{POSITIONS}",),
        seeds=(0, 1, 2),
        at_least=475.0,
        literature="475, the bar at which CartPole-v1 with velocities counts as solved",
        source="Gymnasium's registry",
        minutes=4.0,
    ),
    Entry(
        SECTION,
        "recurrent SAC",
        PENDULUM,
        "sac_recurrent",
        (f"{_ENVS}:{PENDULUM}",),
        seeds=FIVE_SEEDS,
        at_least=-250.0,
        minutes=4.0,
    ),
    Entry(
        SECTION,
        "SAC (no memory)",
        PENDULUM,
        "sac",
        (f"{_ENVS}:{PENDULUM}",),
        seeds=FIVE_SEEDS,
        at_most=-500.0,
        minutes=3.0,
    ),
    Entry(
        SECTION,
        "recurrent PPO",
        RECALL,
        "ppo_recurrent",
        (f"{_ENVS}:{RECALL}",),
        seeds=(0, 1, 2),
        at_least=0.95,
        literature="1, the best possible return with a memory",
        source="the environment's definition",
        minutes=0.3,
    ),
    Entry(
        SECTION,
        "PPO (no memory)",
        RECALL,
        "ppo",
        (f"{_ENVS}:{RECALL}",),
        seeds=(0, 1, 2),
        literature="0.25, the best possible return without a memory",
        source="the environment's definition",
        minutes=0.3,
    ),
    Entry(
        SECTION,
        "recurrent MAPPO",
        TEAM_RECALL,
        "mappo_recurrent",
        (f"{_ENVS}:{TEAM_RECALL}",),
        seeds=FIVE_SEEDS,
        at_least=0.95,
        literature="1, the best possible return with a memory of each agent",
        source="the environment's definition",
        minutes=0.3,
    ),
    Entry(
        SECTION,
        "MAPPO (no memory)",
        TEAM_RECALL,
        "mappo",
        (f"{_ENVS}:{TEAM_RECALL}",),
        seeds=FIVE_SEEDS,
        at_most=0.4,
        literature="0.25, the best possible return without memories",
        source="the environment's definition",
        minutes=0.3,
    ),
]
