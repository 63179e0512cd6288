"""Proximal policy optimization on Pong, from images that EnvPool makes.

It needs the extras ``atari`` and ``envpool``, and a few minutes of one core. A run that was stopped
continues with ``--resume``.
"""

import torch

from dmiddleware import Task
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.policy import PPOPolicy
from dmiddleware.rl import Schedule
from examples import pong_dqn
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

ENV = pong_dqn.ENV  # the same game, which can be filmed
GAME = {"img_height": pong_dqn.SCREEN_SIZE, "img_width": pong_dqn.SCREEN_SIZE}


def make_envs(env_num: int, seed: int | None = None) -> BaseEnvManager:
    """Make Pong in EnvPool, whose defaults are DQN's preprocessing; its rewards are signs."""
    return make_env_manager(
        "Pong-v5", env_num=env_num, backend="envpool", env_kwargs=GAME, seed=seed
    )


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic on common convolutions, as CleanRL, with twice its rate."""
    return PPOPolicy.for_env(
        make_envs(env_num=1),
        seed=seed,
        model=pong_dqn.NETWORK,
        cuda=torch.cuda.is_available(),
        obs_norm=True,  # the ball has few pixels, and hardly differs from the ground
        learning_rate=Schedule.linear(5e-4, 0.0, by="progress"),
        clip_ratio=0.1,
        value_clip=0.1,
        entropy_weight=0.01,
        batch_size=256,
        epoch_per_collect=4,
    )


def main(
    seed: int = 0,
    exp_name: str = "pong_ppo",
    max_env_step: int = 2_000_000,
    resume: bool = False,
) -> ExperimentResult:
    """Train PPO on Pong until it hardly misses the ball."""
    policy = make_policy(seed)
    run = RunFolder.create(exp_name, resume=resume)
    experiment = Experiment(run, policy, n_fresh_episode=30)
    snapshots = SnapshotSaver(run, every_train_iter=1600)
    with Task(seed=seed) as task:
        collect_env = make_envs(env_num=8, seed=task.seed_for("collector"))
        eval_env = make_envs(env_num=10, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=1024))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=10, every_train_iter=3200, stop_value=19.5
            )
        )
        task.use(experiment).use(snapshots)
        task.use(TerminationChecker(max_env_step=max_env_step))
        snapshots.resume(task)  # a new run has no snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
