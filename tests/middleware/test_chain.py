"""Whole chains of stock middleware, and their errors."""

from typing import Any

import pytest
import torch

import middleware
from dmiddleware.data import TensorBuffer, as_tree, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import (
    ChainError,
    ConfigError,
    MiddlewareError,
    NonFiniteLoss,
    SpaceError,
    StructureError,
)
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rl import Schedule
from middleware import (
    BaseMiddleware,
    CkptSaver,
    EpisodeCollector,
    LearningCurve,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    ProgressBar,
    Role,
    RunFolder,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    final_ctx_saver,
    gae_estimator,
    interaction_evaluator,
    online_logger,
    termination_checker,
)
from tests.variants import mostly_slow

MODEL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}
DQN = {
    "seed": 0,
    "model": MODEL,
    "batch_size": 16,
    "eps": Schedule.linear(1.0, 0.1, decay=200),
}


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(DQN)


def envs(name: str = "CartPole-v1", seed: int = 0) -> Any:
    return make_env_manager(name, env_num=2, seed=seed)


def dqn_chain(task: Any, policy: DQNPolicy, run: RunFolder, buffer: TensorBuffer) -> None:
    task.use(eps_greedy_handler(policy))
    task.use(StepCollector(policy.collect_mode, envs(), n_sample=20, random_steps=40))
    task.use(data_pusher(buffer))
    task.use(OffPolicyLearner(policy.learn_mode, buffer, update_per_collect=4))
    task.use(
        interaction_evaluator(policy.eval_mode, envs(seed=1), n_episode=2, every_train_iter=20)
    )
    task.use(CkptSaver(policy.learn_mode, run)).use(online_logger(run, every_env_step=50))
    task.use(ProgressBar()).use(LearningCurve(run)).use(final_ctx_saver(run))
    task.use(termination_checker(max_env_step=200))


def test_whole_chain_runs_and_writes_its_files(run: RunFolder, dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        dqn_chain(task, dqn, run, TensorBuffer(1000, seed=0))
        task.run()
        assert task.ctx.env_step == 200
        assert task.ctx.train_iter == 36
        assert task.stop_reason == "env_step reached 200 (max_env_step is 200)"
    assert sorted(path.name for path in run.path.iterdir()) == [
        "ckpt",
        "curve.png",
        "final_ctx.json",
        "metrics.jsonl",
        "tb",
    ]
    state = load_checkpoint(run.ckpt_dir / "final.safetensors")
    assert (state["last_iter"], state["last_step"]) == (36, 200)


def test_same_seeds_give_the_same_policy(tmp_path: Any) -> None:
    def train(name: str) -> Any:
        policy = DQNPolicy(DQN)
        with RunFolder.create(name, root=tmp_path) as folder, Task(OnlineRLContext()) as task:
            dqn_chain(task, policy, folder, TensorBuffer(1000, seed=0))
            task.run()
        return policy.eval_mode.state_dict()["model"]

    first, second = train("a"), train("b")
    assert all(torch.equal(first[name], second[name]) for name in first)


class PPOByLanes(PPOPolicy):
    minibatch_unit = "lanes"


@pytest.mark.learning
@pytest.mark.parametrize(
    ("cls", "value_norm", "learn"),
    mostly_slow(
        [
            (PPOPolicy, False, {}),
            (PPOPolicy, True, {"recompute_advantage": True}),
            (PPOByLanes, True, {"learning_rate": Schedule.linear(1e-3, 1e-4, decay=4096)}),
        ],
        keep=[2],
    ),
    ids=["rows", "recomputed", "lanes"],
)
def test_chain_of_ppo_learns_cartpole(
    cls: type[PPOPolicy], value_norm: bool, learn: dict[str, Any]
) -> None:
    policy = cls(
        {
            "seed": 0,
            "discount": 0.98,
            "value_norm": value_norm,
            "batch_size": 128,
            "epoch_per_collect": 10,
            "learning_rate": 1e-3,
            **learn,
            "model": {"obs_shape": 4, "action_shape": 2},
        }
    )
    collect_env = make_env_manager("CartPole-v1", env_num=8, seed=0)
    returns: list[float] = []

    def note(ctx: OnlineRLContext) -> None:
        if "collect/return_mean" in ctx.logged:
            returns.append(ctx.logged["collect/return_mean"])

    with Task(OnlineRLContext()) as task:
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=256))
        task.use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy.learn_mode))
        task.use(note).run(max_step=16)
    assert sum(returns[:3]) / 3 < 40
    assert sum(returns[-3:]) / 3 > 60


def test_something_that_is_not_callable_is_rejected(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task, pytest.raises(MiddlewareError, match="not callable"):
        task.use(TensorBuffer(10))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    sorted(name for name in middleware.__all__ if isinstance(getattr(middleware, name), type)),
)
def test_class_that_was_not_built_is_rejected(name: str) -> None:
    with Task(OnlineRLContext()) as task, pytest.raises(MiddlewareError, match="pass an instance"):
        task.use(getattr(middleware, name))


def test_second_yield_is_rejected_while_envs_and_files_are_closed(
    run: RunFolder, dqn: DQNPolicy
) -> None:
    def twice(ctx: OnlineRLContext) -> Any:
        yield
        yield

    collect_env = envs()
    with (
        pytest.raises(MiddlewareError, match="yielded a second time"),
        Task(OnlineRLContext()) as task,
    ):
        task.use(twice).use(StepCollector(dqn.collect_mode, collect_env, n_sample=2))
        task.use(CkptSaver(dqn.learn_mode, run))
        task.run(max_step=1)
    assert collect_env.closed
    assert (run.ckpt_dir / "final.safetensors").exists()


def test_reads_that_nothing_writes_are_all_reported(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(data_pusher(TensorBuffer(10)))
        task.use(OnPolicyLearner(PPOPolicy({"model": MODEL})))
        with pytest.raises(ChainError) as raised:
            task.run(max_step=1)
    message = str(raised.value)
    assert "middleware 1 (DataPusher) reads ctx.trajectories" in message
    assert "add StepCollector(" in message
    assert "middleware 2 (OnPolicyLearner) reads ctx.train_data" in message
    assert "GAEEstimator(" in message


def test_estimator_before_its_collector_is_rejected(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(gae_estimator(PPOPolicy({"model": MODEL})))
        task.use(StepCollector(dqn, envs(), n_sample=2))
        with pytest.raises(ChainError, match="after it"):
            task.run(max_step=1)


def test_unknown_key_of_a_config_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean learning_rate"):
        DQNPolicy({"learning_rat": 1e-3})


def test_envs_that_do_not_fit_are_rejected_before_anything_is_collected(
    run: RunFolder, dqn: DQNPolicy
) -> None:
    buffer = TensorBuffer(100)
    with Task(OnlineRLContext()) as task:
        task.use(StepCollector(dqn, envs(), n_sample=2)).use(data_pusher(buffer))
        task.use(OffPolicyLearner(dqn, buffer)).use(eps_greedy_handler(dqn))
        task.use(interaction_evaluator(dqn, envs("Acrobot-v1"), n_episode=2))
        with pytest.raises(SpaceError):
            task.run(max_step=1)
    assert buffer.count() == 0


def test_batch_of_another_structure_leaves_the_buffer_as_it_was(dqn: DQNPolicy) -> None:
    buffer = TensorBuffer(100)

    def forget_a_column(ctx: OnlineRLContext) -> None:
        if ctx.total_step == 1:
            rows = dict(ctx.trajectories.items())
            del rows["logit"]
            ctx.trajectories = as_tree(rows)

    with Task(OnlineRLContext()) as task:
        task.use(StepCollector(dqn.collect_mode, envs(), n_sample=2)).use(forget_a_column)
        task.use(data_pusher(buffer))
        with pytest.raises(StructureError, match="logit missing") as raised:
            task.run(max_step=3)
    assert buffer.count() == 2
    notes = "".join(raised.value.__notes__)
    assert "DataPusher" in notes
    assert "step 1" in notes


def test_nan_loss_stops_the_run_names_the_iteration_and_saves_the_policy(
    run: RunFolder, dqn: DQNPolicy
) -> None:
    buffer = TensorBuffer(1000, seed=0)

    def spoil(ctx: OnlineRLContext) -> None:
        if ctx.total_step == 3:
            buffer.clear()
            ctx.trajectories["reward"][:] = float("nan")

    with Task(OnlineRLContext()) as task:
        task.use(eps_greedy_handler(dqn))
        task.use(StepCollector(dqn, envs(), n_sample=20)).use(spoil)
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(dqn, buffer, update_per_collect=4))
        task.use(CkptSaver(dqn, run)).use(LearningCurve(run))
        with pytest.raises(NonFiniteLoss, match="collected at train_iter 12"):
            task.run(max_step=9)
    state = load_checkpoint(run.ckpt_dir / "final.safetensors")
    assert state["last_iter"] == 12
    assert all(torch.isfinite(value).all() for value in state["model"].values())
    assert run.curve_path.exists()


def test_episodes_can_be_pushed_and_learned_from(dqn: DQNPolicy) -> None:
    buffer = TensorBuffer(1000, seed=0)
    with Task(OnlineRLContext()) as task:
        task.use(eps_greedy_handler(dqn))
        task.use(EpisodeCollector(dqn, envs(), n_episode=3))
        task.use(data_pusher(buffer, what="episodes"))
        task.use(OffPolicyLearner(dqn.learn_mode, buffer))
        task.run(max_step=2)
        assert buffer.count() <= task.ctx.env_step
        assert task.ctx.train_iter == 2


def test_every_role_has_its_part_of_the_chain(run: RunFolder, dqn: DQNPolicy) -> None:
    buffer = TensorBuffer(1000, seed=0)
    with Task(OnlineRLContext()) as task:
        dqn_chain(task, dqn, run, buffer)
        table = str(task.describe())
    for name in ("EpsGreedyHandler", "StepCollector", "InteractionEvaluator", "CkptSaver"):
        assert name in table
    for role in (Role.LEARNER, Role.COLLECTOR, Role.EVALUATOR):
        assert role in table


NAMES = """
OnlineRLContext OfflineRLContext RLContext Role BaseMiddleware ContextExchanger
ContextExchangerSettings ModelExchanger ModelExchangerSettings PeriodicalModelExchanger
PeriodicalModelExchangerSettings Barrier BarrierSettings EpsGreedyHandler eps_greedy_handler
SelfPlay SelfPlaySettings Curriculum CurriculumSettings StepCollector StepCollectorSettings
labeled_by TeamCollector TeamCollectorSettings EpisodeCollector EpisodeCollectorSettings
data_pusher DataPusher DataPusherSettings
priority_calculator PriorityCalculator nstep_reward_enhancer NStepRewardEnhancer gae_estimator
GAEEstimator montecarlo_return_estimator MonteCarloReturnEstimator RewardLearner
RewardLearnerSettings IntrinsicAdvantage IntrinsicAdvantageSettings offline_data_saver
OfflineDataSaver OfflineDataSaverSettings OffPolicyLearner OffPolicyLearnerSettings OnPolicyLearner
OfflineLearner interaction_evaluator InteractionEvaluator InteractionEvaluatorSettings Experiment
ExperimentSettings ExperimentResult CkptSaver CkptSaverSettings SnapshotSaver SnapshotSaverSettings
MetricsLogger MetricsLoggerSettings online_logger offline_logger
termination_checker TerminationChecker TerminationCheckerSettings epoch_timer EpochTimer
EpochTimerSettings ProgressBar ProgressBarSettings LearningCurve LearningCurveSettings WandbLogger
WandbLoggerSettings TrackioLogger TrackioLoggerSettings final_ctx_saver FinalCtxSaver RunFolder
"""


def test_public_names_are_pinned_and_each_documents_its_reads_and_writes() -> None:
    assert middleware.__all__ == NAMES.split()
    for name in middleware.__all__:
        documented = getattr(middleware, name).__doc__
        assert documented
        kind = getattr(middleware, name)
        is_class = isinstance(kind, type)
        is_stock = is_class and issubclass(kind, BaseMiddleware) and kind is not BaseMiddleware
        silent = ("Barrier", "EpochTimer", "epoch_timer", "FinalCtxSaver", "final_ctx_saver")
        silent = (*silent, "WandbLogger", "TrackioLogger")
        assert name in silent or not is_stock or "Reads:" in documented or "Writes:" in documented
