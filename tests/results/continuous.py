"""The trainings of the algorithms for continuous actions."""

from __future__ import annotations

from tests.results.entry import Entry

__all__ = ["ENTRIES"]

ZOO = "RL Baselines3 Zoo, benchmark.md"
TIANSHOU = "Tianshou, examples/mujoco/README.md"
SEEDS = (0, 1, 2)

ENTRIES = [
    Entry(
        section="Pendulum-v1, 10,000 steps",
        algorithm="SAC",
        env="Pendulum-v1",
        program="examples.pendulum_sac",
        seeds=SEEDS,
        at_least=-200,
        literature="-157.0 ± 88.7 (one run, 20,000 steps)",
        source=ZOO,
        minutes=3,
    ),
    Entry(
        section="Pendulum-v1, 10,000 steps",
        algorithm="TD3",
        env="Pendulum-v1",
        program="examples.pendulum",
        options=("--algo", "td3"),
        seeds=SEEDS,
        at_least=-200,
        literature="-151.9 ± 90.2 (one run, 20,000 steps)",
        source=ZOO,
        minutes=2,
    ),
    Entry(
        section="Pendulum-v1, 10,000 steps",
        algorithm="DDPG",
        env="Pendulum-v1",
        program="examples.pendulum",
        options=("--algo", "ddpg"),
        seeds=SEEDS,
        at_least=-200,
        literature="-152.1 ± 94.3 (one run, 20,000 steps)",
        source=ZOO,
        minutes=2,
    ),
    Entry(
        section="Pendulum-v1, 10,000 steps",
        algorithm="TQC",
        env="Pendulum-v1",
        program="examples.pendulum",
        options=("--algo", "tqc"),
        seeds=SEEDS,
        at_least=-200,
        minutes=5,
    ),
    Entry(
        section="MuJoCo, off-policy, 200,000 steps",
        algorithm="SAC",
        env="HalfCheetah-v5",
        program="examples.mujoco",
        options=("--algo", "sac", "--env", "HalfCheetah-v5"),
        seeds=SEEDS,
        literature="12138.8 ± 1049.3 (10 runs, HalfCheetah-v3, best of 1,000,000 steps)",
        source=TIANSHOU,
        minutes=45,
    ),
    Entry(
        section="MuJoCo, off-policy, 200,000 steps",
        algorithm="TD3",
        env="HalfCheetah-v5",
        program="examples.mujoco",
        options=("--algo", "td3", "--env", "HalfCheetah-v5"),
        seeds=SEEDS,
        literature="10201.2 ± 772.8 (10 runs, HalfCheetah-v3, best of 1,000,000 steps)",
        source=TIANSHOU,
        minutes=40,
    ),
    Entry(
        section="MuJoCo, off-policy, 200,000 steps",
        algorithm="SAC",
        env="Hopper-v5",
        program="examples.mujoco",
        options=("--algo", "sac", "--env", "Hopper-v5"),
        seeds=SEEDS,
        literature="3542.2 ± 51.5 (10 runs, Hopper-v3, best of 1,000,000 steps)",
        source=TIANSHOU,
        minutes=45,
    ),
    Entry(
        section="MuJoCo, on-policy, 1,000,000 steps",
        algorithm="PPO",
        env="HalfCheetah-v5",
        program="examples.mujoco_ppo",
        options=("--env", "HalfCheetah-v5"),
        seeds=SEEDS,
        literature="5819.1 ± 663.5 (one run, HalfCheetah-v3, 1,000,000 steps)",
        source=ZOO,
        minutes=25,
    ),
]
