"""The trainings of the algorithms for continuous actions, and those in simulators in torch."""

from __future__ import annotations

from tests.results.entry import Entry

__all__ = [
    "ENTRIES",
    "PPO_HALFCHEETAH",
    "SAC_HALFCHEETAH",
    "SAC_HOPPER",
    "TD3_HALFCHEETAH",
]

ZOO = "RL Baselines3 Zoo, benchmark.md"
TIANSHOU = "Tianshou, examples/mujoco/README.md"
SEEDS = (0, 1, 2)
SEVEN_SEEDS = tuple(range(7))


def _pendulum(algorithm: str, minutes: float, zoo: str = "") -> Entry:
    return Entry(
        section="Pendulum-v1, 10,000 steps",
        algorithm=algorithm,
        env="Pendulum-v1",
        program=algorithm.lower(),
        options=("Pendulum-v1",),
        seeds=SEEDS,
        at_least=-200,
        literature=f"{zoo} (one run, 20,000 steps)" if zoo else "",
        source=ZOO if zoo else "",
        minutes=minutes,
    )


def _simulator(algorithm: str, env: str, *, at_least: float, minutes: float) -> Entry:
    return Entry(
        section="Simulators in torch",
        algorithm=algorithm,
        env=env,
        program=algorithm.lower(),
        options=(f"dmiddleware.zoo.tensor_envs:{env}",),
        seeds=SEEDS,
        at_least=at_least,
        minutes=minutes,
    )


def _mujoco(
    algorithm: str,
    env: str,
    *,
    tianshou: str,
    minutes: float,
    seeds: tuple[int, ...] = SEEDS,
) -> Entry:
    old_env = env.replace("v5", "v3")
    return Entry(
        section="MuJoCo, off-policy, 200,000 steps",
        algorithm=algorithm,
        env=env,
        program=algorithm.lower(),
        options=(env, "--policy.compile"),
        seeds=seeds,
        literature=f"{tianshou} (10 runs, {old_env}, best of 1,000,000 steps)",
        source=TIANSHOU,
        minutes=minutes,
    )


SAC_HALFCHEETAH = _mujoco("SAC", "HalfCheetah-v5", tianshou="12138.8 ± 1049.3", minutes=30)
TD3_HALFCHEETAH = _mujoco("TD3", "HalfCheetah-v5", tianshou="10201.2 ± 772.8", minutes=25)
# Seven, because a policy either hops far or falls early: three seeds say little.
SAC_HOPPER = _mujoco("SAC", "Hopper-v5", tianshou="3542.2 ± 51.5", minutes=30, seeds=SEVEN_SEEDS)
PPO_HALFCHEETAH = Entry(
    section="MuJoCo, on-policy, 1,000,000 steps",
    algorithm="PPO",
    env="HalfCheetah-v5",
    program="ppo",
    options=("HalfCheetah-v5",),
    seeds=SEEDS,
    literature="5819.1 ± 663.5 (one run, HalfCheetah-v3, 1,000,000 steps)",
    source=ZOO,
    minutes=25,
)

ENTRIES = [
    _pendulum("SAC", 3, "-157.0 ± 88.7"),
    _pendulum("TD3", 2, "-151.9 ± 90.2"),
    _pendulum("DDPG", 2, "-152.1 ± 94.3"),
    _pendulum("D4PG", 5),
    _pendulum("TQC", 5),
    _pendulum("CrossQ", 6),
    _pendulum("FastTD3", 6),
    _simulator("PPO", "CartPole", at_least=475, minutes=0.5),
    _simulator("PQN", "CartPole", at_least=475, minutes=0.5),
    _simulator("PPO", "Pendulum", at_least=-200, minutes=1),
    _simulator("FastTD3", "Pendulum", at_least=-200, minutes=2),
    _simulator("PPO", "Reacher", at_least=150, minutes=1),
    _simulator("FastTD3", "Reacher", at_least=150, minutes=20),
    SAC_HALFCHEETAH,
    TD3_HALFCHEETAH,
    SAC_HOPPER,
    PPO_HALFCHEETAH,
    Entry(
        section="Hybrid actions",
        algorithm="P-DQN",
        env="golf",
        program="examples.golf_pdqn",
        seeds=SEEDS,
        at_least=-4,
        minutes=1,
    ),
]
