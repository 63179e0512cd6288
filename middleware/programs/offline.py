"""The program of the algorithms that learn from recorded data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import TensorBuffer, load_rows
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DecisionTransformerPolicy, Policy, PolicySettings
from dmiddleware.rl import with_returns_to_go
from dmiddleware.settings import Count, Positive, Whole
from dmiddleware.tree import Batch
from middleware.context import OfflineRLContext
from middleware.evaluate import InteractionEvaluator, InteractionEvaluatorSettings
from middleware.learn import OffPolicyLearner, OffPolicyLearnerSettings
from middleware.programs.parts import (
    default_settings,
    eval_settings,
    make_policy,
    make_run,
    name_of_run,
)
from middleware.record.experiment import Experiment, ExperimentResult, ExperimentSettings
from middleware.record.snapshot import SnapshotSaver, SnapshotSaverSettings
from middleware.support.replay import bind_to_policy
from middleware.termination import TerminationChecker

__all__ = ["OFFLINE", "make_dataset_buffer", "offline"]

OFFLINE: Final = default_settings(
    ("bc", "td3_bc", "bcq", "cql", "discrete_cql", "edac", "iql", "decision_transformer")
)
"""The algorithms of :func:`offline`, and their default settings."""


def make_dataset_buffer(policy: Policy, rows: Batch, seed: int) -> TensorBuffer:
    """Return a buffer of all rows, or of the sequences that a decision transformer needs."""
    length = None
    if isinstance(policy, DecisionTransformerPolicy):
        rows, length = with_returns_to_go(rows), policy.context_length
    buffer = TensorBuffer(rows["done"].numel(), unroll_len=length, seed=seed)
    bind_to_policy(buffer, policy.learn_mode)
    buffer.push(rows)
    return buffer


def offline(
    algo: str = "iql",
    env: EnvSettings = EnvSettings("Pendulum-v1", env_num=10),
    data: str = "",
    seed: Whole = 0,
    exp_name: str = "",
    max_train_iter: Count = 20_000,
    max_time_s: Positive | None = None,
    resume: bool = False,
    eval_env_kwargs: Mapping[str, Any] = {},
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", OFFLINE)] = None,
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=100),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=20, every_train_iter=2000
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(),
) -> ExperimentResult:
    """Learn from recorded data, and evaluate in an environment.

    Args:
        algo: the algorithm.
        data: recorded data: a file of OfflineDataSaver, an HDF5 file, or the id or the folder of a
            Minari dataset.
        seed: seed of everything random.
        exp_name: folder of the run in runs/; empty: the algorithm and the env.
        max_train_iter: maximum number of updates.
        max_time_s: maximum duration in seconds, over all resumes; None: no limit.
        resume: continue the run in the folder, from its newest snapshot.
        eval_env_kwargs: keyword arguments that envs have only to evaluate in.
        policy: settings of the algorithm; None: its defaults.
    """
    rows = load_rows(data)
    agent = make_policy(algo, env, policy or OFFLINE[algo], seed)
    agent.observe(rows["obs"])
    replay = make_dataset_buffer(agent, rows, seed)
    run = make_run(exp_name or name_of_run(algo, env), experiment, resume=resume)
    record = Experiment.of(experiment, run, agent)
    saver = SnapshotSaver.of(snapshots, run)
    with Task(OfflineRLContext(), seed=seed) as task:
        judged = eval_settings(env, eval_env_kwargs)
        eval_envs = make_env_manager(judged, seed=task.seed_for("evaluator"))

        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_train_iter=max_train_iter, max_time_s=max_time_s))
        saver.resume(task)  # only a run that continues has a snapshot
        task.run()
    return record.result
