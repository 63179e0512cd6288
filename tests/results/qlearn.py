"""Algorithms for discrete actions that learn values, on CartPole, LunarLander and Pong.

Settings that differ from the papers come from:

- DQN: hyperparams/dqn.yml of rl-baselines3-zoo for LunarLander-v2 (learning rate, batch size,
  period of the target network, network, ε); C51 and IQN have the same, since their papers have
  settings for Atari only.
- QR-DQN: hyperparams/qrdqn.yml of the same (learning rate, batch size, γ, target network, ε), with
  64 quantiles instead of 170, to save time.
- Rainbow: Hessel et al. (2018), table 1, for the n-step return, the exponents of prioritized replay
  and the noise; the rest as DQN.
- Discrete SAC: Christodoulou (2019) for everything but the target entropy and the first
  temperature, which are lower, 3-step returns, and the learning rates, batch size and network,
  which are those of DQN.
- CartPole: examples/cartpole_dqn.py.
- Pong: the learning rate, batch size and period of the target network of hyperparams/dqn.yml,
  "atari"; with 3-step returns, images of 42 by 42 that are normalized, the network of Mnih et al.
  (2013), and half as many updates as steps.
"""

from __future__ import annotations

from tests.results.entry import Entry

SEEDS = (0, 1, 2)
SOLVED = "solved at 200"
GYMNASIUM = "Gymnasium, documentation of LunarLander-v3"


def _lunar_lander(algorithm: str, algo: str, minutes: float) -> Entry:
    return Entry(
        "Box2D",
        algorithm,
        "LunarLander-v3",
        algo,
        ("LunarLander-v3", "--policy.compile"),
        seeds=SEEDS,
        at_least=200,
        literature=SOLVED,
        source=GYMNASIUM,
        minutes=minutes,
    )


def _cartpole(algorithm: str, algo: str) -> Entry:
    return Entry(
        "CartPole-v1, variants of DQN",
        algorithm,
        "CartPole-v1",
        algo,
        ("CartPole-v1",),
        seeds=SEEDS,
        at_least=475,
    )


ENTRIES = [
    _cartpole("soft Q-learning", "sql"),
    _cartpole("Munchausen DQN", "mdqn"),
    _cartpole("FQF", "fqf"),
    _cartpole("PQN", "pqn"),
    _lunar_lander("DQN", "dqn", 3),
    _lunar_lander("C51", "c51", 4),
    _lunar_lander("QR-DQN", "qrdqn", 3),
    _lunar_lander("IQN", "iqn", 8),
    _lunar_lander("Rainbow", "rainbow", 6),
    _lunar_lander("discrete SAC", "discrete_sac", 7),
    Entry(
        "Games and images",
        "DQN",
        "ALE/Pong-v5",
        "dqn",
        ("ALE/Pong-v5",),
        at_least=18,
        literature="18.9",
        source="Mnih et al., Nature 2015, extended data table 2",
        minutes=27,
    ),
]
