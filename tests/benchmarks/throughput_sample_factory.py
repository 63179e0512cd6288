"""Sample Factory's side of the throughput benchmark, a file for an environment of its own.

In one process it runs in serial mode, which is synchronous. Otherwise it is asynchronous, as it
comes. Batched sampling without double buffering is the fastest of its ways to sample here. Inputs
and returns are not normalized, and no checkpoints or summaries are written. Rewards are scaled as
in its own example for CartPole, because it logs and summarizes every large loss.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import gymnasium as gym
import throughput_setting as S
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

NEVER_S = 10**6
NO_LIMIT = 10**6


class Measurement(AlgoObserver):
    """Stops at the end of the measurement, and prints the rate."""

    def __init__(self) -> None:
        self._meter = S.Meter.from_environment()

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        # The workers start one after the other, and learning begins with those that are there.
        heartbeats = [one for group in runner.heartbeat_dict.values() for one in group.values()]
        if None in heartbeats and not runner.cfg.serial_mode:
            return
        rate = self._meter.rate(training_iteration_since_resume * S.BATCH_SIZE)
        if rate is not None:
            S.print_rate(rate)
            runner.cfg.train_for_env_steps = 0


def make_env(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    """Make an environment, as the registry calls it."""
    return gym.make(S.ENV, disable_env_checker=True)


def options(folder: str) -> list[str]:
    """Return the command line."""
    n = S.n_collectors()
    chosen = {
        "env": S.ENV,
        "experiment": "throughput",
        "train_dir": folder,
        "device": "cpu",
        "seed": 0,
        "serial_mode": n == 0,
        "async_rl": n > 0,
        "batched_sampling": True,
        "worker_num_splits": 1,
        "num_workers": max(1, n),
        "num_envs_per_worker": S.envs_per_process(),
        "rollout": S.BATCH_SIZE // S.ENV_NUM,
        "batch_size": S.MINIBATCH_SIZE,
        "num_batches_per_epoch": S.BATCH_SIZE // S.MINIBATCH_SIZE,
        "num_epochs": S.EPOCHS,
        "use_rnn": False,
        "nonlinearity": "tanh",
        "actor_critic_share_weights": True,
        "normalize_input": False,
        "normalize_returns": False,
        "reward_scale": 0.1,
        "learning_rate": S.LEARNING_RATE,
        "gamma": S.DISCOUNT,
        "gae_lambda": S.GAE_LAMBDA,
        "ppo_clip_ratio": S.CLIP_RATIO,
        "ppo_clip_value": NO_LIMIT,
        "value_loss_coeff": S.VALUE_WEIGHT,
        "exploration_loss_coeff": S.ENTROPY_WEIGHT,
        "max_grad_norm": S.GRAD_CLIP_NORM,
        "heartbeat_interval": 1,
        "save_every_sec": NEVER_S,
        "save_best_every_sec": NEVER_S,
        "experiment_summaries_interval": NEVER_S,
        "log_to_file": False,
    }
    hidden = [str(size) for size in S.HIDDEN_SIZES]
    return [f"--{name}={value}" for name, value in chosen.items()] + [
        "--encoder_mlp_layers",
        *hidden,
    ]


def main() -> int:
    """Train PPO on CartPole."""
    register_env(S.ENV, make_env)
    with tempfile.TemporaryDirectory() as folder:
        command_line = options(folder)
        parser, _ = parse_sf_args(command_line)
        _, runner = make_runner(parse_full_cfg(parser, command_line))
        runner.register_observer(Measurement())
        return int(runner.init() or runner.run())


if __name__ == "__main__":
    sys.exit(main())
