"""Deep Q-learning on Pong, from images; 21 points are a game without a miss.

It needs the extra ``atari``. A run that was stopped continues with ``--resume``.
"""

from typing import Any

import gymnasium as gym

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import atari_preprocessing, make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.schedule import Schedule
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

GAME = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}


def make_env(**kwargs: Any) -> gym.Env[Any, Any]:
    """Make Pong with the preprocessing of DQN; it has no lives, and its rewards are signs."""
    return atari_preprocessing(
        gym.make("ale_py:ALE/Pong-v5", **GAME, **kwargs), screen_size=SCREEN_SIZE
    )


ENV = make_env
RANDOM_STEPS = 10_000
SCREEN_SIZE = 42
"""Half of the usual side, which Pong can be played with, and a fifth of the work."""
NETWORK = {"conv_layers": [(16, 6, 3), (32, 4, 2)], "encoder_hidden_sizes": [256]}
"""Two convolutions, as in Mnih et al., "Playing Atari with Deep RL" (2013)."""


def make_policy(seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with 3-step returns."""
    return DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        model=NETWORK,
        obs_norm=True,  # the ball has few pixels, and hardly differs from the ground
        n_step=3,
        learning_rate=1e-4,
        batch_size=32,
        target_update_freq=1000,
        eps=Schedule.linear(1.0, 0.01, decay=100_000),
    )


def main(
    seed: int = 0,
    exp_name: str = "pong_dqn",
    max_env_step: int = 1_500_000,
    resume: bool = False,
) -> ExperimentResult:
    """Train DQN on Pong until it hardly misses the ball."""
    policy = make_policy(seed)
    run = RunFolder.create(exp_name, resume=resume)
    experiment = Experiment(run, policy, n_fresh_episode=30)
    snapshots = SnapshotSaver(run, every_train_iter=50_000)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=10, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(
            200_000,
            n_step=policy.n_step,
            frame_stacks=("obs",),
            store_next_obs=False,
            seed=task.seed_for("buffer"),
        )

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=32, random_steps=RANDOM_STEPS))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=16))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=10, every_train_iter=12_500, stop_value=19.5
            )
        )
        task.use(experiment).use(snapshots)
        task.use(TerminationChecker(max_env_step=max_env_step))
        snapshots.resume(task)  # a new run has no snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
