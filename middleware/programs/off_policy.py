"""The program of the algorithms that learn from a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import PrioritySamplerSettings, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PolicySettings
from dmiddleware.settings import Count, Positive, Whole
from middleware.advantage import GAEEstimator
from middleware.collect import StepCollector, StepCollectorSettings
from middleware.eps_greedy import EpsGreedyHandler
from middleware.evaluate import InteractionEvaluator, InteractionEvaluatorSettings
from middleware.exchange import (
    ContextExchanger,
    ContextExchangerSettings,
    ModelExchanger,
    ModelExchangerSettings,
)
from middleware.learn import OffPolicyLearner, OffPolicyLearnerSettings
from middleware.programs.parts import (
    default_settings,
    eval_settings,
    make_policy,
    make_replay,
    make_run,
    name_of_run,
)
from middleware.record.experiment import Experiment, ExperimentResult, ExperimentSettings
from middleware.record.snapshot import SnapshotSaver, SnapshotSaverSettings
from middleware.replay_buffer import DataPusher
from middleware.termination import TerminationChecker

__all__ = ["OFF_POLICY", "off_policy"]

OFF_POLICY: Final = default_settings(
    (
        *("dqn", "sql", "mdqn", "c51", "qrdqn", "iqn", "fqf", "rainbow", "r2d2", "discrete_sac"),
        *("sac", "td3", "ddpg", "d4pg", "tqc", "crossq", "fasttd3", "pdqn"),
        *("sac_recurrent", "td3_recurrent"),
        *("ppo_offpolicy", "ppg_offpolicy"),
        *("qmix", "wqmix", "vdn", "qmix_recurrent"),
    )
)
"""The algorithms of :func:`off_policy`, and their default settings."""


def off_policy(
    algo: str = "dqn",
    env: EnvSettings = EnvSettings("CartPole-v1", env_num=8),
    seed: Whole = 0,
    exp_name: str = "",
    max_env_step: Count = 200_000,
    max_train_iter: Count | None = None,
    max_time_s: Positive | None = None,
    resume: bool = False,
    eval_env_num: Count = 10,
    eval_env_kwargs: Mapping[str, Any] = {},
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", OFF_POLICY)] = None,
    exchanger: ContextExchangerSettings = ContextExchangerSettings(),
    weights: ModelExchangerSettings = ModelExchangerSettings(),
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=64),
    buffer: TensorBufferSettings = TensorBufferSettings(100_000),
    sampler: PrioritySamplerSettings = PrioritySamplerSettings(),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=32),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(n_episode=20),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(),
) -> ExperimentResult:
    """Train an algorithm that learns from a replay buffer.

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
        sampler: how rows are drawn by priority, if the policy has priorities.
    """
    agent = make_policy(algo, env, policy or OFF_POLICY[algo], seed)
    run = make_run(exp_name or name_of_run(algo, env), experiment, resume=resume)
    record = Experiment.of(experiment, run, agent)
    saver = SnapshotSaver.of(snapshots, run)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        judged = eval_settings(env, eval_env_kwargs, eval_env_num)
        eval_envs = make_env_manager(judged, seed=task.seed_for("evaluator"))
        replay = make_replay(agent, buffer, sampler, task.seed_for("buffer"))

        task.use(ContextExchanger.of(exchanger))
        task.use(ModelExchanger.of(weights, agent))
        if not agent.explores:
            task.use(EpsGreedyHandler(agent))
        task.use(StepCollector.of(collector, agent, envs))
        if agent.spec.gae_lambda is None:
            task.use(DataPusher(replay))
        else:
            task.use(GAEEstimator(agent)).use(DataPusher(replay, what="train_data"))
        task.use(OffPolicyLearner.of(learner, agent, replay))
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
