"""RLPD on MountainCarContinuous-v0: SAC that draws half of each sample from a few shown episodes.

The reward is at the flag, where random actions hardly ever get, and each push costs a little, so
SAC alone learns to stand still: ``--share 0``. The episodes that are shown are those of a rule.
"""

import gymnasium as gym
import numpy as np

from dmiddleware import Task
from dmiddleware.data import Batch, MixedReplay, TensorBuffer, TensorBufferSettings, as_tree, stack
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import SACPolicy, SACSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Fraction, Whole
from middleware import (
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("MountainCarContinuous-v0", env_num=4)
POLICY = SACSettings(
    model={
        "norm": "layer",
        "n_critics": 4,
        "actor_hidden_sizes": [64, 64],
        "critic_hidden_sizes": [64, 64],
    },
    learning_rate_q=1e-3,
    learning_rate_policy=1e-3,
    learning_rate_alpha=1e-3,
    alpha=0.1,
)


def make_policy(env: EnvSettings = ENV, policy: SACSettings = POLICY, seed: int = 0) -> SACPolicy:
    """Build the policy."""
    return SACPolicy.for_env(make_env_manager(env), policy, seed=seed)


def shown_rows(env: EnvSettings, n_episode: int, seed: int) -> Batch:
    """Return episodes of a rule: push where the car is moving to, as on a swing."""
    car = gym.make(str(env.id))
    rows = []
    for episode in range(n_episode):
        obs, _ = car.reset(seed=seed + episode)
        ended = False
        while not ended:
            action = np.sign(obs[1:] + 1e-9)
            next_obs, reward, terminated, truncated, _ = car.step(action)
            rows.append(
                as_tree(
                    {
                        "obs": obs,
                        "action": action,
                        "reward": np.float32(reward),
                        "next_obs": next_obs,
                        "terminated": np.bool_(terminated),
                    }
                )
            )
            obs, ended = next_obs, terminated or truncated
    return stack(rows)


def main(
    seed: Whole = 0,
    exp_name: str = "mountain_car_rlpd",
    max_env_step: Count = 5_000,
    n_episode: Count = 5,
    share: Fraction = 0.5,
    env: EnvSettings = ENV,
    eval_env_num: Count = 20,
    policy: SACSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=16, random_steps=400),
    buffer: TensorBufferSettings = TensorBufferSettings(5_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=32),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=20, every_train_iter=1_000, stop_value=90, stop_evaluations=2
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Learn MountainCarContinuous-v0 from a few shown episodes and from play.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        n_episode: episodes that are shown.
        share: which share of each sample is from these; 0 is SAC without them.
        eval_env_num: number of envs that evaluate.
    """
    shown = shown_rows(env, n_episode, seed)
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        own = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))
        replay = MixedReplay(own, shown, share=share)
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
