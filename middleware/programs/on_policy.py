"""The program of the algorithms that learn from what they have just collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PolicySettings
from dmiddleware.settings import Count, Positive, Whole
from middleware.advantage import GAEEstimator, MonteCarloReturnEstimator
from middleware.collect import (
    EpisodeCollector,
    EpisodeCollectorSettings,
    StepCollector,
    StepCollectorSettings,
)
from middleware.eps_greedy import EpsGreedyHandler
from middleware.evaluate import InteractionEvaluator, InteractionEvaluatorSettings
from middleware.exchange import (
    ContextExchanger,
    ContextExchangerSettings,
    ModelExchanger,
    ModelExchangerSettings,
)
from middleware.learn import OnPolicyLearner
from middleware.programs.parts import (
    default_settings,
    eval_settings,
    make_policy,
    make_run,
    name_of_run,
)
from middleware.record.experiment import Experiment, ExperimentResult, ExperimentSettings
from middleware.record.snapshot import SnapshotSaver, SnapshotSaverSettings
from middleware.termination import TerminationChecker

__all__ = ["ON_POLICY", "on_policy"]

ON_POLICY: Final = default_settings(
    (
        *("ppo", "ppg", "pg", "a2c", "impala", "pqn", "ppo_recurrent"),
        *("ippo", "mappo", "ippo_recurrent", "mappo_recurrent"),
    )
)
"""The algorithms of :func:`on_policy`, and their default settings."""

COLLECTORS: Final[Mapping[str, StepCollectorSettings | EpisodeCollectorSettings]] = {
    **dict.fromkeys(ON_POLICY, StepCollectorSettings(n_sample=2048)),
    "pg": EpisodeCollectorSettings(n_episode=8),
}
"""How each of them collects."""


def on_policy(
    algo: str = "ppo",
    env: EnvSettings = EnvSettings("CartPole-v1", env_num=8),
    seed: Whole = 0,
    exp_name: str = "",
    max_env_step: Count = 1_000_000,
    max_train_iter: Count | None = None,
    max_time_s: Positive | None = None,
    resume: bool = False,
    eval_env_num: Count = 10,
    eval_env_kwargs: Mapping[str, Any] = {},
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", ON_POLICY)] = None,
    exchanger: ContextExchangerSettings = ContextExchangerSettings(max_ahead=1),
    weights: ModelExchangerSettings = ModelExchangerSettings(),
    collector: Annotated[
        StepCollectorSettings | EpisodeCollectorSettings | None, DefaultsBy("algo", COLLECTORS)
    ] = None,
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(n_episode=20),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(),
) -> ExperimentResult:
    """Train an algorithm that learns from the steps that it has just collected.

    Args:
        algo: the algorithm.
        seed: seed of everything random.
        exp_name: folder of the run in runs/; empty: the algorithm and the env.
        max_env_step: maximum number of environment steps.
        max_train_iter: maximum number of updates; None: no limit.
        max_time_s: maximum duration in seconds, over all resumes; None: no limit.
        resume: continue the run in the folder, from its newest snapshot.
        eval_env_num: number of envs that evaluate.
        eval_env_kwargs: keyword arguments that envs have only to evaluate in.
        policy: settings of the algorithm; None: its defaults.
        exchanger: the exchange of data in a run of several processes.
        weights: that of weights.
        collector: how much to collect at a time; None: what suits the algorithm.
    """
    agent = make_policy(algo, env, policy or ON_POLICY[algo], seed)
    collector = collector or COLLECTORS[algo]
    run = make_run(exp_name or name_of_run(algo, env), experiment, resume=resume)
    record = Experiment.of(experiment, run, agent)
    saver = SnapshotSaver.of(snapshots, run)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        judged = eval_settings(env, eval_env_kwargs, eval_env_num)
        eval_envs = make_env_manager(judged, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger.of(exchanger))
        task.use(ModelExchanger.of(weights, agent))
        if not agent.explores:
            task.use(EpsGreedyHandler(agent))
        if isinstance(collector, EpisodeCollectorSettings):
            task.use(EpisodeCollector.of(collector, agent, envs))
            task.use(MonteCarloReturnEstimator(agent))
        else:
            task.use(StepCollector.of(collector, agent, envs))
            if not agent.learns_from_trajectories:
                task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record).use(saver)
        task.use(
            TerminationChecker(
                max_env_step=max_env_step, max_train_iter=max_train_iter, max_time_s=max_time_s
            )
        )
        saver.resume(task)  # only a run that continues has a snapshot
        task.run()
    return record.result
