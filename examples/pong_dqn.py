"""Deep Q-learning on Pong, from images; 21 points are a game without a miss.

It needs the extra ``atari``. A run that was stopped continues with ``--resume``.
"""

from dataclasses import replace
from typing import Any

import gymnasium as gym

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, atari_preprocessing, make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
from dmiddleware.program import run_program
from dmiddleware.schedule import Schedule
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    RunFolder,
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

GAME = {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"}


def make_env(**kwargs: Any) -> gym.Env[Any, Any]:
    """Make Pong with the preprocessing of DQN; it has no lives, and its rewards are signs."""
    return atari_preprocessing(
        gym.make("ale_py:ALE/Pong-v5", **GAME, **kwargs), screen_size=SCREEN_SIZE
    )


ENV = EnvSettings("examples.pong_dqn:make_env", env_num=8)
SCREEN_SIZE = 42
"""Half of the usual side, which Pong can be played with, and a fifth of the work."""
NETWORK = {"conv_layers": [(16, 6, 3), (32, 4, 2)], "encoder_hidden_sizes": [256]}
"""Two convolutions, as in Mnih et al., "Playing Atari with Deep RL" (2013)."""
POLICY = DQNSettings(
    model=NETWORK,
    obs_norm=True,  # the ball has few pixels, and hardly differs from the ground
    n_step=3,
    learning_rate=1e-4,
    batch_size=32,
    target_update_freq=1000,
    eps=Schedule.linear(1.0, 0.01, decay=100_000),
)


def make_policy(env: EnvSettings = ENV, policy: DQNSettings = POLICY, seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with 3-step returns."""
    return DQNPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "pong_dqn",
    max_env_step: Count = 1_500_000,
    resume: bool = False,
    env: EnvSettings = ENV,
    eval_env_num: Count = 10,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=32, random_steps=10_000),
    buffer: TensorBufferSettings = TensorBufferSettings(
        200_000, frame_stacks=("obs",), store_next_obs=False
    ),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=16),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=10, every_train_iter=12_500, stop_value=19.5
    ),
    experiment: ExperimentSettings = ExperimentSettings(n_fresh_episode=30),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=50_000),
) -> ExperimentResult:
    """Train DQN on Pong until it hardly misses the ball.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        resume: continue the run in the folder, from its newest snapshot.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    run = RunFolder.create(exp_name, resume=resume)
    record = Experiment(run, agent, **vars(experiment))
    saver = SnapshotSaver(run, **vars(snapshots))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer(
            **vars(replace(buffer, n_step=agent.n_step, seed=task.seed_for("buffer")))
        )

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner(agent, replay, **vars(learner)))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # a new run has no snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
