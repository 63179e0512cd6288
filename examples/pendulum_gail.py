"""Generative adversarial imitation learning on Pendulum-v1, from ten episodes of an expert.

All episodes have 200 steps, so a reward for staying alive would teach nothing here.
"""

from pathlib import Path

from dmiddleware import Task
from dmiddleware.data import OfflineDataset
from dmiddleware.env import make_env_manager
from dmiddleware.policy import Policy, PPOPolicy
from dmiddleware.reward import GAIL
from dmiddleware.rl import Schedule
from examples import pendulum_ppo
from examples.common import command
from middleware import (
    EpisodeCollector,
    Experiment,
    ExperimentResult,
    OnPolicyLearner,
    RewardLearner,
    StepCollector,
    gae_estimator,
    interaction_evaluator,
    offline_data_saver,
    termination_checker,
)

ENV = pendulum_ppo.ENV


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build the policy that imitates the expert."""
    return PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        discount_factor=0.95,
        learning_rate=Schedule.linear(1e-3, 0.0, by="progress"),
        obs_norm=True,
    )


def save_episodes(expert: Policy, path: Path, *, n_episode: int, seed: int) -> None:
    """Let the expert play, and save its observations and actions."""
    with Task(seed=seed) as task:
        envs = make_env_manager(ENV, env_num=n_episode, seed=task.seed_for("expert"))
        task.use(EpisodeCollector(expert, envs, n_episode=n_episode))
        task.use(offline_data_saver(path, columns=["obs", "action", "done"]))
        task.run(max_step=1)


def main(
    seed: int = 0, exp_name: str = "pendulum_gail", max_env_step: int = 300_000
) -> ExperimentResult:
    """Imitate a PPO expert of Pendulum-v1, without the rewards of the environment."""
    trained = pendulum_ppo.main(seed, f"{exp_name}_expert", max_env_step)
    expert = pendulum_ppo.make_policy(seed)
    expert.collect_mode.load_state_dict(trained.load_best())
    path = trained.path / "expert.safetensors"
    save_episodes(expert, path, n_episode=10, seed=seed)

    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with OfflineDataset(path) as dataset, Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))
        gail = GAIL.for_env(
            collect_env, dataset.rows(slice(None)), seed=seed, learning_rate=1e-3, epochs=5
        )

        task.use(StepCollector(policy, collect_env, n_sample=2048))
        task.use(RewardLearner(gail))
        task.use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy, batch_size=128, epochs=10))
        task.use(
            interaction_evaluator(
                policy, eval_env, n_episode=50, every_train_iter=1600, stop_value=-170
            )
        )
        task.use(experiment)
        task.use(termination_checker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
