"""The trainings in other libraries that ours are compared with.

The settings are those that the authors of stable-baselines3 and sb3-contrib publish for the task in
the RL Baselines3 Zoo (https://github.com/DLR-RM/rl-baselines3-zoo, the folder hyperparams). The
zoo's versions of the environments are older; their settings are used for today's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CASES", "N_FRESH", "Case", "parse_arguments"]

N_FRESH = 100
"""The fresh episodes that judge a policy, as those of ``Experiment``."""


@dataclass(frozen=True)
class Case:
    """A training in another library.

    Attributes:
        algorithm: the class of stable-baselines3 or sb3-contrib; C51 is Tianshou's.
        env: the environment's id.
        env_step: the budget.
        options: arguments of the class.
        policy_kwargs: its networks.
        env_num: environments that are collected from.
        normalize: whether observations and rewards are normalized.
        noise: the standard deviation of the Gaussian noise on actions; None: no noise.
        linear: options whose value falls linearly to 0.
        n_evaluations: evaluations in the training.
        n_episode: episodes of each.
        eval_env_num: environments that an evaluation plays them in.
    """

    algorithm: str
    env: str
    env_step: int
    options: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_num: int = 1
    normalize: bool = False
    noise: float | None = None
    linear: tuple[str, ...] = ()
    n_evaluations: int = 20
    n_episode: int = 10
    eval_env_num: int = 10


_WIDE = {"net_arch": [256, 256]}
_TALL = {"net_arch": [400, 300]}

_DQN_LUNARLANDER = {
    "learning_rate": 6.3e-4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 0,
    "gamma": 0.99,
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": -1,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
}

CASES: dict[str, Case] = {
    "sac_halfcheetah": Case("SAC", "HalfCheetah-v5", 200_000, {"learning_starts": 10_000}),
    "sac_hopper": Case("SAC", "Hopper-v5", 200_000, {"learning_starts": 10_000}),
    "td3_halfcheetah": Case(
        "TD3",
        "HalfCheetah-v5",
        200_000,
        {
            "learning_starts": 10_000,
            "batch_size": 256,
            "learning_rate": 1e-3,
            "train_freq": 1,
            "gradient_steps": 1,
        },
        _TALL,
        noise=0.1,
    ),
    "ppo_halfcheetah": Case(
        "PPO",
        "HalfCheetah-v5",
        1_000_000,
        {
            "batch_size": 64,
            "n_steps": 512,
            "gamma": 0.98,
            "learning_rate": 2.0633e-05,
            "ent_coef": 0.000401762,
            "clip_range": 0.1,
            "n_epochs": 20,
            "gae_lambda": 0.92,
            "max_grad_norm": 0.8,
            "vf_coef": 0.58096,
        },
        {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
        normalize=True,
    ),
    "ddpg_pendulum": Case(
        "DDPG",
        "Pendulum-v1",
        20_000,
        {
            "gamma": 0.98,
            "buffer_size": 200_000,
            "learning_starts": 10_000,
            "gradient_steps": -1,
            "train_freq": (1, "episode"),
            "learning_rate": 1e-3,
        },
        _TALL,
        noise=0.1,
        n_evaluations=8,
        n_episode=50,
    ),
    "dqn_lunarlander": Case(
        "DQN",
        "LunarLander-v3",
        100_000,
        _DQN_LUNARLANDER,
        _WIDE,
        n_evaluations=15,
        n_episode=50,
    ),
    "qrdqn_lunarlander": Case(
        "QRDQN",
        "LunarLander-v3",
        100_000,
        {
            "learning_rate": 1.5e-3,
            "batch_size": 128,
            "buffer_size": 100_000,
            "learning_starts": 10_000,
            "gamma": 0.995,
            "target_update_interval": 1,
            "train_freq": 256,
            "gradient_steps": -1,
            "exploration_fraction": 0.24,
            "exploration_final_eps": 0.18,
        },
        {**_WIDE, "n_quantiles": 170},
        linear=("learning_rate",),
        n_evaluations=15,
        n_episode=50,
    ),
    "c51_lunarlander": Case(
        "C51",
        "LunarLander-v3",
        100_000,
        {**_DQN_LUNARLANDER, "v_min": -200.0, "v_max": 200.0},
        _WIDE,
        n_evaluations=15,
        n_episode=50,
        eval_env_num=25,
    ),
}


def parse_arguments(side: str, description: str | None, names: Iterable[str]) -> argparse.Namespace:
    """Parse the command line of a program that trains one case: ``case``, ``seed``, ``exp_name``.

    Args:
        side: the module of the program, for example ``"rival"``.
        description: what ``--help`` says.
        names: the cases that it can train.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.results.{side}", description=description
    )
    parser.add_argument("--case", required=True, choices=sorted(names))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exp-name", default=side, help="folder of the run in runs/")
    return parser.parse_args()
