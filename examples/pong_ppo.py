"""Proximal policy optimization on Pong, from images that EnvPool makes.

It needs the extras ``atari`` and ``envpool``, and a few minutes of one core. A run that was stopped
continues with ``--resume``.
"""

import torch

from dmiddleware import Task
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
from examples import pong_dqn
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

GAME = {"img_height": pong_dqn.SCREEN_SIZE, "img_width": pong_dqn.SCREEN_SIZE}
# EnvPool's defaults are DQN's preprocessing; its rewards are signs.
ENV = EnvSettings("Pong-v5", env_num=8, backend="envpool", env_kwargs=GAME)
POLICY = PPOSettings(
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


def make_policy(env: EnvSettings = ENV, policy: PPOSettings = POLICY, seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic on common convolutions, as CleanRL, with twice its rate."""
    return PPOPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "pong_ppo",
    max_env_step: Count = 2_000_000,
    resume: bool = False,
    env: EnvSettings = ENV,
    eval_env_num: Count = 10,
    policy: PPOSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=1024),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=10, every_train_iter=3200, stop_value=19.5
    ),
    experiment: ExperimentSettings = ExperimentSettings(n_fresh_episode=30),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=1600),
) -> ExperimentResult:
    """Train PPO on Pong until it hardly misses the ball.

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

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # a new run has no snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    # The same game, which can be rendered.
    run_program(main, make_policy=make_policy, play_env=pong_dqn.ENV)
