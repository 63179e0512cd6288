"""Tune DQN on CartPole-v1 with Ray Tune: a sweep with checkpoints, in which bad trials end early.

Needs `pip install 'dmiddleware[ray]' 'ray[tune]'`. Each trial is a program of one process, so a
cluster runs as many trials at once as it has CPUs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from dmiddleware import Task, middleware
from dmiddleware.data import TensorBuffer, load_checkpoint, save_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    Role,
    StepCollector,
    TerminationChecker,
)

ENV = "CartPole-v1"
FILE = "policy.safetensors"
GRACE_STEPS = 5_000


def train(config: dict[str, Any]) -> None:
    """Train one trial; it continues from its checkpoint if Ray has restarted it."""
    with Task(seed=config["seed"]) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=10, seed=task.seed_for("evaluator"))
        policy = DQNPolicy.for_env(
            collect_env,
            seed=config["seed"],
            learning_rate=config["learning_rate"],
            target_update_freq=config["target_update_freq"],
            eps=Schedule.linear(1.0, 0.05, decay=5_000),
        )
        saved = tune.get_checkpoint()
        if saved is not None:
            with saved.as_directory() as folder:
                policy.learn_mode.load_state_dict(load_checkpoint(Path(folder) / FILE))

        @middleware(roles=[Role.EVALUATOR])
        def report(ctx: OnlineRLContext) -> None:
            if ctx.eval_value is None:
                return
            with tempfile.TemporaryDirectory() as folder:
                save_checkpoint(Path(folder) / FILE, policy.learn_mode.state_dict())
                tune.report(
                    {"eval_return": float(ctx.eval_value), "env_step": ctx.env_step},
                    checkpoint=tune.Checkpoint.from_directory(folder),
                )

        buffer = TensorBuffer(config["max_env_step"], seed=task.seed_for("buffer"))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=64))
        task.use(InteractionEvaluator(policy, eval_env, n_episode=10, every_train_iter=640))
        task.use(report)
        task.use(TerminationChecker(max_env_step=config["max_env_step"]))
        task.run()


def main(
    samples: Count = 8,
    max_env_step: Count = 30_000,
    address: str | None = None,
    folder: Path | None = None,
) -> None:
    """Sweep over the learning rate and the target network's period, and print the best trial.

    Args:
        samples: number of trials.
        max_env_step: maximum number of environment steps of a trial.
        address: the Ray cluster, or auto; None: the one of this host, or a new one.
        folder: where Tune writes its results; None: its default.
    """
    import ray

    ray.init(address, ignore_reinit_error=True)
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={
            "learning_rate": tune.loguniform(1e-4, 1e-2),
            "target_update_freq": tune.choice([64, 256]),
            "seed": 0,
            "max_env_step": max_env_step,
        },
        tune_config=tune.TuneConfig(
            metric="eval_return",
            mode="max",
            num_samples=samples,
            scheduler=ASHAScheduler(
                time_attr="env_step",
                max_t=max_env_step,
                grace_period=min(GRACE_STEPS, max_env_step),
            ),
        ),
        run_config=tune.RunConfig(
            name="cartpole_dqn",
            storage_path=None if folder is None else str(folder),
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    best = tuner.fit().get_best_result()
    assert best.metrics is not None
    print(f"best mean return {best.metrics['eval_return']:.1f} with {best.config}")
    print(f"its policy is in {best.checkpoint}")


if __name__ == "__main__":
    run_program(main)
