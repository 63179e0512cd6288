"""Proximal policy optimization in a room with a key and a door, with a reward for what is new."""

from typing import Any, Literal

import gymnasium as gym
from gymnasium.wrappers import FlattenObservation

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy
from dmiddleware.reward import ICM, RND, IntrinsicCritic
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    IntrinsicAdvantage,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)


def make_env(**options: Any) -> gym.Env:
    """Make a room of 8 by 8 places, of which the agent sees the part in front of it, one-hot."""
    from minigrid.envs import DoorKeyEnv
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

    return FlattenObservation(ImgObsWrapper(OneHotPartialObsWrapper(DoorKeyEnv(size=8, **options))))


ENV = make_env


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        obs_norm=True,
        entropy_weight=0.01,
        batch_size=256,
        epoch_per_collect=4,
    )


def main(
    seed: int = 0,
    exp_name: str = "doorkey_rnd",
    max_env_step: int = 500_000,
    algo: Literal["ppo", "rnd", "icm"] = "rnd",
) -> ExperimentResult:
    """Train PPO on DoorKey-8x8 with random network distillation, curiosity (icm) or neither."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=16, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=20, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=2048))
        task.use(GAEEstimator(policy))
        if algo != "ppo":
            model = {"rnd": RND, "icm": ICM}[algo].for_env(collect_env, policy, learning_rate=1e-3)
            critic = IntrinsicCritic.for_env(collect_env, policy)
            task.use(IntrinsicAdvantage(model, critic, weight=0.5))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy,
                eval_env,
                n_episode=20,
                every_train_iter=1600,
                stop_value=0.94,
                deterministic=False,
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
