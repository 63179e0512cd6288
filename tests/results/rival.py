"""Train with another library: ``python -m tests.results.rival --case NAME --seed 0``.

The settings are those that the authors of stable-baselines3 and sb3-contrib publish for the task in
the RL Baselines3 Zoo (https://github.com/DLR-RM/rl-baselines3-zoo, the folder hyperparams). The
zoo's versions of the environments are older; their settings are used for today's.
It writes ``result.json`` as our ``Experiment`` does, with the same number of evaluations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.seeding import derive_seed
from tests.results.case import Case
from tests.results.rival_tianshou import train_c51

__all__ = ["CASES"]

N_FRESH = 100
N_EVAL_ENVS = 10


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
    ),
}


def train(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Train, and return the fields of ``result.json``."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)  # as Experiment does for small networks
    algorithm = getattr(stable_baselines3, case.algorithm, None) or getattr(
        sb3_contrib, case.algorithm
    )
    options = dict(case.options)
    for name in case.linear:
        options[name] = _linear(options[name])
    if case.noise is not None:
        shape = gym.make(case.env).action_space.shape
        options["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, case.noise))
    train_envs = _make_envs(case, case.env_num, seed)
    eval_envs = _make_envs(case, N_EVAL_ENVS, derive_seed(seed, "evaluation"), learns=False)
    model = algorithm(
        "MlpPolicy",
        train_envs,
        policy_kwargs=dict(case.policy_kwargs),
        seed=seed,
        device="cpu",
        **options,
    )
    evaluation = EvalCallback(
        eval_envs,
        callback_on_new_best=_statistics_saver(folder) if case.normalize else None,
        n_eval_episodes=case.n_episode,
        eval_freq=case.env_step // case.n_evaluations // case.env_num,
        best_model_save_path=str(folder),
        log_path=str(folder),
        verbose=0,
        warn=False,
    )
    started_at = time.perf_counter()
    model.learn(case.env_step, callback=evaluation, log_interval=10**9)
    train_s = time.perf_counter() - started_at
    fresh_seed = derive_seed(seed, "fresh episodes")
    last = _fresh_return(case, model, train_envs if case.normalize else None, fresh_seed)
    best_statistics = folder / "statistics.pkl" if case.normalize else None
    best = _fresh_return(case, algorithm.load(folder / "best_model"), best_statistics, fresh_seed)
    found = np.load(folder / "evaluations.npz")
    return {
        "mean_return": best,
        "last_return": last,
        "n_episode": N_FRESH,
        "env_step": int(model.num_timesteps),
        "train_iter": int(model._n_updates),
        "train_s": train_s,
        "evaluations": [
            (int(at), float(returns.mean()))
            for at, returns in zip(found["timesteps"], found["results"], strict=True)
        ],
    }


def _make_envs(case: Case, n: int, seed: int, *, learns: bool = True) -> Any:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs = make_vec_env(case.env, n, seed=seed)
    if not case.normalize:
        return envs
    gamma = case.options["gamma"]
    return VecNormalize(envs, training=learns, norm_reward=learns, gamma=gamma)


def _statistics_saver(folder: Path) -> Any:
    """Return a callback that saves the statistics of observations beside the best model."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Saver(BaseCallback):
        def _on_step(self) -> bool:
            self.model.get_vec_normalize_env().save(folder / "statistics.pkl")
            return True

    return Saver()


def _fresh_return(case: Case, model: Any, statistics: Any, seed: int) -> float:
    """Return the mean return in new episodes; ``statistics`` are envs, or a file of theirs."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

    if isinstance(statistics, Path):
        envs: Any = VecNormalize.load(str(statistics), make_vec_env(case.env, 25, seed=seed))
        envs.training = envs.norm_reward = False
    elif case.normalize:
        envs = _make_envs(case, 25, seed, learns=False)
        sync_envs_normalization(statistics, envs)
    else:
        envs = make_vec_env(case.env, 25, seed=seed)
    mean, _ = evaluate_policy(model, envs, N_FRESH, warn=False)
    envs.close()
    return float(mean)


def _linear(start: float) -> Callable[[float], float]:
    """Return a schedule of the remaining progress, from 1 to 0."""
    return lambda remaining: start * remaining


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.results.rival", description=__doc__)
    parser.add_argument("--case", required=True, choices=sorted(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exp-name", default="rival", help="folder of the run in runs/")
    arguments = parser.parse_args()
    folder = Path("runs") / arguments.exp_name
    folder.mkdir(parents=True, exist_ok=True)
    case, seed = CASES[arguments.case], arguments.seed
    result = train_c51(case, seed) if case.algorithm == "C51" else train(case, seed, folder)
    (folder / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"mean return {result['mean_return']:.1f} after {result['train_s']:.0f} s")


if __name__ == "__main__":
    main()
