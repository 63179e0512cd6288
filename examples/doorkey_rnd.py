"""Proximal policy optimization in a room with a key and a door, with a reward for what is new."""

from typing import Any, Literal

import gymnasium as gym
from gymnasium.wrappers import FlattenObservation

from dmiddleware import Task
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings
from dmiddleware.program import run_program
from dmiddleware.reward import ICM, RND, IntrinsicCritic
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    IntrinsicAdvantage,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)


def make_env(**options: Any) -> gym.Env:
    """Make a room of 8 by 8 places, of which the agent sees the part in front of it, one-hot."""
    from minigrid.envs import DoorKeyEnv
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

    return FlattenObservation(ImgObsWrapper(OneHotPartialObsWrapper(DoorKeyEnv(size=8, **options))))


ENV = EnvSettings("examples.doorkey_rnd:make_env", env_num=16)
POLICY = PPOSettings(
    obs_norm=True,
    entropy_weight=0.01,
    batch_size=256,
    epoch_per_collect=4,
)


def make_policy(env: EnvSettings = ENV, policy: PPOSettings = POLICY, seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return PPOPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "doorkey_rnd",
    max_env_step: Count = 500_000,
    algo: Literal["ppo", "rnd", "icm"] = "rnd",
    env: EnvSettings = ENV,
    eval_env_num: Count = 20,
    policy: PPOSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=2048),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=20, every_train_iter=1600, stop_value=0.94, deterministic=False
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train PPO on DoorKey-8x8 with random network distillation, curiosity (icm) or neither.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: what rewards the agent for what is new: RND, ICM, or nothing (ppo).
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(GAEEstimator(agent))
        if algo != "ppo":
            model = {"rnd": RND, "icm": ICM}[algo].for_env(envs, agent, learning_rate=1e-3)
            critic = IntrinsicCritic.for_env(envs, agent)
            task.use(IntrinsicAdvantage(model, critic, weight=0.5))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
