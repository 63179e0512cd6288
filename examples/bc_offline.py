"""Offline learning: train an expert, save its actions as a dataset, and clone it from the data."""

from pathlib import Path

from dmiddleware import Task
from dmiddleware.data import OfflineDataset
from dmiddleware.env import make_env_manager
from dmiddleware.policy import BCPolicy, Policy
from examples import cartpole_dqn
from examples.common import command
from middleware import (
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    OfflineDataSaver,
    OfflineLearner,
    OfflineRLContext,
    StepCollector,
    TerminationChecker,
)

ENV = cartpole_dqn.ENV
TRAIN_ITER = 10_000


def make_policy(seed: int = 0) -> BCPolicy:
    """Build the policy that learns from the expert."""
    return BCPolicy.for_env(make_env_manager(ENV, env_num=1), seed=seed, batch_size=256)


def save_expert_data(expert: Policy, path: Path, *, n_rows: int, seed: int) -> None:
    """Let the expert play, and save its observations and actions."""
    with Task(seed=seed) as task:
        envs = make_env_manager(ENV, env_num=8, seed=task.seed_for("expert"))
        task.use(StepCollector(expert, envs, n_sample=1000))
        task.use(OfflineDataSaver(path, columns=["obs", "action", "done"], max_rows=n_rows))
        task.run()


def main(
    seed: int = 0, exp_name: str = "bc_offline", max_env_step: int = 60_000
) -> ExperimentResult:
    """Clone an expert of CartPole-v1 that was trained with DQN."""
    trained = cartpole_dqn.main(seed, f"{exp_name}_expert", max_env_step)
    expert = cartpole_dqn.make_policy(seed)
    expert.collect_mode.load_state_dict(trained.load_best())
    data_path = trained.path / "expert.safetensors"
    save_expert_data(expert, data_path, n_rows=min(20_000, max_env_step), seed=seed)

    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with OfflineDataset(data_path) as dataset, Task(OfflineRLContext(), seed=seed) as task:
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        task.use(OfflineLearner(policy, dataset))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=500, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_train_iter=TRAIN_ITER))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
