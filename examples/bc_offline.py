"""Offline learning: train an expert, save its actions as a dataset, and clone it from the data."""

from pathlib import Path

from dmiddleware import Task
from dmiddleware.data import OfflineDataset
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import BCPolicy, BCSettings, DQNSettings, Policy
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from examples import cartpole_dqn
from middleware import (
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OfflineDataSaver,
    OfflineLearner,
    OfflineRLContext,
    StepCollector,
    TerminationChecker,
)

ENV = cartpole_dqn.ENV
POLICY = BCSettings(batch_size=256)


def make_policy(env: EnvSettings = ENV, policy: BCSettings = POLICY, seed: int = 0) -> BCPolicy:
    """Build the policy that learns from the expert."""
    return BCPolicy.for_env(make_env_manager(env), policy, seed=seed)


def save_expert_data(
    expert: Policy, env: EnvSettings, path: Path, *, n_rows: int, seed: int
) -> None:
    """Let the expert play, and save its observations and actions."""
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("expert"))
        task.use(StepCollector(expert, envs, n_sample=1000))
        task.use(OfflineDataSaver(path, columns=["obs", "action", "done"], max_rows=n_rows))
        task.run()


def main(
    seed: Whole = 0,
    exp_name: str = "bc_offline",
    max_env_step: Count = 60_000,
    max_train_iter: Count = 10_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    expert: DQNSettings = cartpole_dqn.POLICY,
    policy: BCSettings = POLICY,
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=50, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Clone an expert of CartPole-v1 that was trained with DQN.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps of the expert.
        max_train_iter: updates of the clone.
        eval_env_num: number of envs that evaluate.
    """
    trained = cartpole_dqn.main(
        seed, f"{exp_name}_expert", max_env_step, env, policy=expert, experiment=experiment
    )
    teacher = cartpole_dqn.make_policy(env, expert, seed)
    teacher.collect_mode.load_state_dict(trained.load_best())
    data_path = trained.path / "expert.safetensors"
    save_expert_data(teacher, env, data_path, n_rows=min(20_000, max_env_step), seed=seed)

    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with OfflineDataset(data_path) as dataset, Task(OfflineRLContext(), seed=seed) as task:
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        task.use(OfflineLearner(agent, dataset))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_train_iter=max_train_iter))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
