"""On-policy algorithms."""

from __future__ import annotations

from tests.results.entry import Entry

LUNAR_LANDER = "LunarLander-v3"
CARTPOLE = "CartPole-v1"
CONTROL = "Classic control and Box2D, on-policy"
SEEDS = (0, 1, 2)
ZOO = "RL Baselines3 Zoo, benchmark.md"

ENTRIES = [
    Entry(CONTROL, "policy gradient", CARTPOLE, "pg", (CARTPOLE,), seeds=SEEDS, at_least=475),
    Entry(
        CONTROL,
        "PPO from a buffer",
        CARTPOLE,
        "ppo_offpolicy",
        (CARTPOLE,),
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(CONTROL, "PPG", CARTPOLE, "ppg", (CARTPOLE,), seeds=SEEDS, at_least=475),
    Entry(
        CONTROL,
        "PPG from a buffer",
        CARTPOLE,
        "ppg_offpolicy",
        (CARTPOLE,),
        seeds=SEEDS,
        at_least=475,
    ),
    Entry(CONTROL, "A2C", CARTPOLE, "a2c", (CARTPOLE,), seeds=SEEDS, at_least=475),
    Entry(CONTROL, "IMPALA", CARTPOLE, "impala", (CARTPOLE,), seeds=SEEDS, at_least=475),
    Entry(
        CONTROL,
        "IMPALA",
        CARTPOLE,
        "impala",
        (CARTPOLE,),
        nodes=4,
        at_least=475,
        logged="learn/policy_lag",
    ),
    Entry(
        CONTROL,
        "GAIL with PPO, from 10 episodes",
        "Pendulum-v1",
        "examples.pendulum_gail",
        seeds=SEEDS,
        at_least=-250,
        literature="the return of the expert, SAC",
        source="Ho and Ermon (2016), figure 1",
        minutes=5.0,
    ),
    Entry(
        CONTROL,
        "PPO",
        LUNAR_LANDER,
        "ppo",
        (LUNAR_LANDER,),
        seeds=SEEDS,
        at_least=200,
        literature="242 (v2)",
        source=ZOO,
        minutes=5.0,
    ),
    Entry(
        CONTROL,
        "A2C",
        LUNAR_LANDER,
        "a2c",
        (LUNAR_LANDER,),
        seeds=SEEDS,
        at_least=200,
        literature="156 (v2), after 200,000 steps",
        source=ZOO,
        minutes=4.0,
    ),
    Entry(
        "Games and images",
        "PPO",
        "Pong",
        "ppo",
        ("Pong-v5",),
        at_least=18,
        literature="20.7 after 10 million steps",
        source="Schulman et al. (2017), table 6",
        minutes=10,
    ),
    Entry("Games and images", "PPO", "Pong", "ppo", ("Pong-v5",), nodes=4, at_least=18, minutes=8),
]
