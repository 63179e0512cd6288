"""Train with another library: ``python -m tests.results.rival --case NAME --seed 0``.

It writes ``result.json`` as our ``Experiment`` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.seeding import derive_seed
from tests.results.cases import CASES, N_FRESH, Case, parse_arguments
from tests.results.rival_tianshou import train_c51


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
    eval_envs = _make_envs(case, case.eval_env_num, derive_seed(seed, "evaluation"), learns=False)
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
    arguments = parse_arguments("rival", __doc__, CASES)
    folder = Path("runs") / arguments.exp_name
    folder.mkdir(parents=True, exist_ok=True)
    case, seed = CASES[arguments.case], arguments.seed
    result = train_c51(case, seed) if case.algorithm == "C51" else train(case, seed, folder)
    (folder / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"mean return {result['mean_return']:.1f} after {result['train_s']:.0f} s")


if __name__ == "__main__":
    main()
