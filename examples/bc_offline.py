"""Offline: train an expert, save what it does as a data set, and clone it from that alone."""

from pathlib import Path

from dmiddleware import OfflineRLContext, OnlineRLContext, Task
from dmiddleware.data import OfflineDataset
from dmiddleware.env import make_env_manager
from dmiddleware.policy import BCPolicy, Policy
from examples import cartpole_dqn
from examples.common import Result, command, finish, start
from middleware import (
    CkptSaver,
    StepCollector,
    interaction_evaluator,
    learning_curve,
    offline_data_fetcher,
    offline_data_saver,
    offline_logger,
    progress_bar,
    termination_checker,
    trainer,
)

ENV = cartpole_dqn.ENV
TRAIN_ITER = 3000


def make_policy(seed: int = 0) -> BCPolicy:
    """Build the policy that learns from the expert."""
    return BCPolicy({"seed": seed, "model": {"obs_shape": 4, "action_shape": 2}})


def save_expert_data(expert: Policy, path: Path, *, n_rows: int, seed: int) -> None:
    """Let the expert play, and save what it saw and did."""
    with Task(OnlineRLContext(), seed=seed) as task:
        envs = make_env_manager(ENV, env_num=8, seed=task.seed_for("expert"))
        task.use(StepCollector(expert.collect_mode, envs, n_sample=1000))
        task.use(offline_data_saver(path, columns=["obs", "action", "done"], max_rows=n_rows))
        task.run()


def main(seed: int = 0, exp_name: str = "bc_offline", max_env_step: int = 60_000) -> Result:
    """Clone an expert of CartPole-v1 that was trained with DQN."""
    expert = cartpole_dqn.main(seed, f"{exp_name}_expert", max_env_step)
    teacher = cartpole_dqn.make_policy(seed)
    teacher.collect_mode.load_state_dict(expert.load_best())
    data_path = expert.path / "expert.safetensors"
    save_expert_data(teacher, data_path, n_rows=min(20_000, max_env_step), seed=seed)

    policy = make_policy(seed)
    with (
        start(exp_name, policy.cfg, seed=seed) as run,
        OfflineDataset(data_path) as dataset,
        Task(OfflineRLContext(), seed=seed) as task,
    ):
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        task.use(offline_data_fetcher(dataset, batch_size=256))
        task.use(trainer(policy.learn_mode))
        task.use(
            interaction_evaluator(
                policy.eval_mode, eval_env, n_episode=50, every_train_iter=500, stop_value=495
            )
        )
        task.use(CkptSaver(policy.learn_mode, run)).use(offline_logger(run))
        task.use(progress_bar(max_train_iter=TRAIN_ITER)).use(learning_curve(run))
        task.use(termination_checker(max_train_iter=TRAIN_ITER))
        task.run()
    return finish(run, task, policy, ENV)


if __name__ == "__main__":
    command(ENV, make_policy, main)()
