"""PPO on CartPole-v1 in the classic parallel mode: a coordinator, a learner, two collectors.

Over the router::

    ditask --roles coordinator=1,learner=1,collector=2 --main examples.classic_parallel.main

With ``--on-failure restart`` the training survives the loss of any of its processes.

Over HTTP, with the step data in files; this starts the workers itself::

    python -m examples.classic_parallel
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from dmiddleware.classic import CollectMode, LearnMode, StockPolicy, collate, create_policy
from dmiddleware.classic.policy_config import ClassicSettings
from dmiddleware.data import as_tree, cat, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.policy import POLICY_REGISTRY, HasModes, PPOPolicy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.seeding import derive_seed
from dmiddleware.worker import classic_run

ENV = "CartPole-v1"


@POLICY_REGISTRY.register("trajectory_ppo")  # type: ignore[arg-type]  # of the classic interface
class TrajectoryPPO(StockPolicy):
    """PPO whose samples are whole trajectories, so that there are few of them to send."""

    core = PPOPolicy

    @property
    def collect_mode(self) -> CollectMode:
        """Return the mode, which makes one sample of each trajectory."""
        mode = super().collect_mode

        def whole(transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
            rows = collate(mode.get_train_sample(transitions))
            return [{str(name): rows[name] for name in rows}]

        return mode._replace(get_train_sample=whole)

    @property
    def learn_mode(self) -> LearnMode:
        """Return the mode, which learns from several trajectories, in minibatches of their rows."""
        mode, learn = super().learn_mode, self.cfg.learn

        def forward(data: list[dict[str, Any]], **kwargs: Any) -> list[Any]:
            columns = mode.spec.learn_columns
            rows = cat([as_tree({name: sample[name] for name in columns}) for sample in data])
            return [
                mode.forward(rows[index], **kwargs)
                for _ in range(learn.epoch_per_collect)
                for index in torch.randperm(len(rows["adv"])).split(learn.batch_size)
            ]

        settings = ClassicSettings(self.cfg, own={"batch_size": 8})
        spec = dataclasses.replace(mode.spec, settings=settings)
        return mode._replace(forward=forward, spec=spec)


def config(exp_name: str, stop_value: float) -> dict[str, Any]:
    """Return the main config, in the classic shape."""
    return {
        "exp_name": exp_name,
        "env": {
            "id": ENV,
            "collector_env_num": 8,
            "collector_episode_num": 4,
            "evaluator_env_num": 25,
            "evaluator_episode_num": 2,
            "stop_value": stop_value,
        },
        "policy": {
            "type": "trajectory_ppo",
            "import_names": ["examples.classic_parallel"],
            "discount_factor": 0.98,
            "gae_lambda": 0.8,
            "model": {"obs_shape": 4, "action_shape": 2, "action_space": "discrete"},
            "learn": {
                "learning_rate": {"start": 1e-3, "end": 0.0, "decay": 4000, "by": "update"},
                "batch_size": 256,
                "learner": {"train_iterations": 1e9, "hook": {"save_ckpt_after_iter": 100}},
            },
            "collect": {
                "n_sample": 128,
                "collector": {"type": "zergling", "update_policy_second": 0.1},
            },
            "other": {
                "replay_buffer": {"type": "advanced", "replay_buffer_size": 64, "max_use": 1},
                "commander": {"type": "solo", "collector_task_space": 2, "eval_interval": 3},
            },
        },
    }


def best_return(exp_name: str, policy_cfg: dict[str, Any], seed: int) -> float:
    """Return the mean return of the best of the last policies over 100 fresh episodes.

    The learner continues for a moment after the evaluation that ends the training, so the last
    checkpoints compete in 50 episodes first.
    """
    policy = create_policy(policy_cfg, enable_field=["eval"])
    files = sorted(Path(exp_name).glob("ckpt*/*"), key=lambda path: path.stat().st_mtime)
    states = [load_checkpoint(path) for path in files[-5:]]
    best = max(states, key=lambda state: mean_return(policy, state, 50, seed, "choice"))
    return mean_return(policy, best, 100, seed, "fresh episodes")


def mean_return(policy: HasModes, state: Any, n_episode: int, seed: int, purpose: str) -> float:
    """Return the mean return of a saved policy in episodes that training does not use."""
    policy.eval_mode.load_state_dict(state)
    with make_env_manager(ENV, env_num=25, seed=derive_seed(seed, purpose)) as envs:
        returns = evaluate_episodes(policy.eval_mode, envs, n_episode).get_episode_return()
    return sum(returns) / len(returns)


def main(
    seed: int = 0,
    exp_name: str = "runs/classic_parallel",
    communication: str = "router",
    stop_value: float = 499.0,
) -> float | None:
    """Train until CartPole is solved; return the mean return of 100 fresh episodes.

    The processes of the workers return None.
    """
    main_config = config(exp_name, stop_value)
    system = {
        "communication": communication,
        "path_data": f"{exp_name}/data",
        "path_policy": f"{exp_name}/policy",
        # A coordinator that is restarted continues from here.
        "coordinator": {"state_path": f"{exp_name}/coordinator.safetensors"},
    }
    is_solved = classic_run(main_config, system, seed)
    if is_solved is None:
        return None
    mean = best_return(exp_name, main_config["policy"], seed)
    print(f"{'solved' if is_solved else 'stopped'}: mean return {mean:.1f} over 100 fresh episodes")
    return mean


if __name__ == "__main__":
    main(communication="flask_fs")
