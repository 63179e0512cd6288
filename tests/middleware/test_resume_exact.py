"""Stock chains continue exactly, and what does not is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import middleware
from dmiddleware import Task
from dmiddleware.data import (
    HindsightReplay,
    OfflineDataset,
    PrioritySampler,
    TensorBuffer,
    UniformSampler,
    flatten_lead,
    save_dataset,
)
from dmiddleware.env import OpponentEnv, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import (
    BCPolicy,
    DecisionTransformerPolicy,
    DQNPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QMIXPolicy,
    SACPolicy,
)
from dmiddleware.reward import GAIL, ICM, RND, IntrinsicCritic
from dmiddleware.rollout import OpponentPool, RolloutCollector, against, make_game
from dmiddleware.testing import assert_resume_exact
from middleware import (
    Barrier,
    BaseMiddleware,
    CkptSaver,
    ContextExchanger,
    Curriculum,
    DataPusher,
    EpisodeCollector,
    EpochTimer,
    EpsGreedyHandler,
    Experiment,
    FinalCtxSaver,
    GAEEstimator,
    IntrinsicAdvantage,
    LearningCurve,
    ModelExchanger,
    OfflineDataSaver,
    OfflineLearner,
    OfflineRLContext,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    PeriodicalModelExchanger,
    ProgressBar,
    RewardLearner,
    RunFolder,
    SelfPlay,
    SnapshotSaver,
    StepCollector,
    TeamCollector,
    TerminationChecker,
    TrackioLogger,
    WandbLogger,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    interaction_evaluator,
    montecarlo_return_estimator,
    nstep_reward_enhancer,
    online_logger,
    priority_calculator,
)
from tests.dmiddleware.data.blocks import shrink_blocks
from tests.dmiddleware.env.test_opponent_env import tictactoe
from tests.dmiddleware.goal_envs import PointGoal, near
from tests.dmiddleware.policy.every_policy import EVERY, buffer_of, collected, env_for, made
from tests.dmiddleware.policy.grouped_envs import BOX, GROUPS, Parts
from tests.dmiddleware.rollout.test_games import make_tictactoe
from tests.dmiddleware.team_games import Auction
from tests.middleware.test_saved_config import usual_chain
from tests.variants import mostly_slow


def chain_of(
    cls: Any, *further: Callable[[], Any]
) -> Callable[[Path], tuple[Task[Any], SnapshotSaver]]:
    """Return a program with the usual chain of a policy."""

    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        policy = made(cls)
        run = RunFolder(folder)
        snapshots = SnapshotSaver(run)
        task = Task(seed=0)
        for one in usual_chain(policy):
            task.use(one)
        task.use(Experiment(run, policy)).use(snapshots)
        task.use(TerminationChecker(max_time_s=1000.0))
        for make in further:
            task.use(make())
        return task, snapshots

    return main


@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy])
def test_a_chain_whose_critic_sees_more_than_its_actor_resumes_exactly(cls: Any) -> None:
    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        space = BOX if cls is SACPolicy else gym.spaces.Discrete(3)
        envs = make_env_manager(lambda: Parts(space), env_num=2, seed=0)
        policy = cls.for_env(envs, seed=0, obs_groups=GROUPS, obs_norm=True, batch_size=8)
        snapshots = SnapshotSaver(folder)
        buffer = TensorBuffer(60, seed=0)
        task = Task(seed=0)
        task.use(StepCollector(policy, envs, n_sample=20))
        if cls is PPOPolicy:
            task.use(GAEEstimator(policy)).use(OnPolicyLearner(policy))
        else:
            task.use(DataPusher(buffer)).use(OffPolicyLearner(policy, buffer))
        return task.use(snapshots), snapshots

    assert_resume_exact(main, n_step=4, stop_after=[2])


IN_MAKE_TEST = ("DQNPolicy", "PPOPolicy")


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(
            cls, id=cls.__name__, marks=() if cls.__name__ in IN_MAKE_TEST else pytest.mark.slow
        )
        for cls in EVERY
        if cls is not DecisionTransformerPolicy  # its chain has no online context
    ],
)
def test_the_stock_chain_of_every_policy_resumes_exactly(cls: Any) -> None:
    assert_resume_exact(chain_of(cls), n_step=3)


def dqn_of(
    run: RunFolder,
    *,
    env: Callable[[], Any] | str = "CartPole-v1",
    mode: str = "sync",
    n_step: int = 1,
    collect: Callable[..., Any] = StepCollector,
    before: Callable[..., Sequence[Any]] = lambda *_: (),
    after: Callable[..., Sequence[Any]] = lambda *_: (),
    **options: Any,
) -> list[Any]:
    """Return the chain of DQN, with the options of its buffer.

    Args:
        run: the run's folder.
        env: an env's name, or what makes one.
        mode: how envs are stepped.
        n_step: rewards that a return sums.
        collect: makes the collector.
        before: makes the middleware between the collector and the buffer.
        after: makes the middleware at the end.
        **options: options of the buffer, whose rows are soon overwritten.
    """
    envs = make_env_manager(env, env_num=2, mode=mode, seed=0)
    policy = DQNPolicy.for_env(
        envs, seed=0, batch_size=8, eps=0.2, n_step=n_step, model={"encoder_hidden_sizes": [8]}
    )
    amount = {"n_episode": 2} if collect is EpisodeCollector else {"n_sample": 32}
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    if "storage" in options:
        options["storage"] = run.path / options["storage"]
    buffer = TensorBuffer(**{"size": 90, "seed": 0, **options})
    return [
        eps_greedy_handler(policy),
        collect(policy, envs, **amount),
        *before(policy, envs, run),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=2),
        *after(policy, envs, run),
    ]


def evaluated(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    judged = make_env_manager("CartPole-v1", env_num=2, seed=1)
    return [
        interaction_evaluator(policy, judged, n_episode=2, every_train_iter=3),
        Experiment(run, policy, n_fresh_episode=2),
    ]


def goal_on_a_line() -> gym.Env[Any, Any]:
    """Return a goal-conditioned env with discrete actions."""
    moves = [np.array([x, y], np.float32) for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1))]
    return gym.wrappers.TransformAction(
        PointGoal(), lambda action: moves[action], gym.spaces.Discrete(4)
    )


def hindsight(run: RunFolder) -> list[Any]:
    return dqn_of(run, env=goal_on_a_line, follow_episodes=True, transform=HindsightReplay(near))


def self_play(run: RunFolder) -> list[Any]:
    def small() -> DQNPolicy:
        return DQNPolicy.for_env(
            OpponentEnv(tictactoe()),
            seed=0,
            batch_size=8,
            eps=0.2,
            model={"encoder_hidden_sizes": [8]},
        )

    policy = small()
    pool = OpponentPool(small, size=2, policy_kwargs={"eps": 0.3})
    envs = make_env_manager(lambda: OpponentEnv(tictactoe(), pool), env_num=3, seed=0)
    buffer = TensorBuffer(90, seed=0)
    return [
        SelfPlay(policy, pool, every_train_iter=3),
        eps_greedy_handler(policy),
        StepCollector(policy, envs, n_sample=16),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=2),
    ]


def teams(run: RunFolder) -> list[Any]:
    """Return a chain of two teams that take turns, and of one against its past versions."""
    game, other = make_tictactoe(env_num=2), make_tictactoe(seed=1, env_num=2)
    small: Any = {"encoder_hidden_sizes": [8]}
    x = DQNPolicy.for_env(game["x"], seed=0, batch_size=8, model=small)
    o = PPOPolicy.for_env(game["o"], seed=0, batch_size=8, model=small)

    def version() -> PPOPolicy:
        return PPOPolicy.for_env(game["o"], seed=0, model=small)

    pool = OpponentPool(version, size=2, prioritized=True)
    buffer, more = TensorBuffer(90, seed=0), TensorBuffer(90, seed=1)
    y = DQNPolicy.for_env(other["x"], seed=3, batch_size=8, model=small)
    # Both are the team x of their game.
    against_pool = StepCollector(y, against(other, "x", {"o": pool}), n_sample=16, name="y")
    return [
        EpsGreedyHandler(x, name="x"),
        TeamCollector(game, {"x": x, "o": o}, n_sample=16),
        DataPusher(buffer, name="x"),
        OffPolicyLearner(x, buffer, update_per_collect=2, name="x"),
        GAEEstimator(o, name="o"),
        OnPolicyLearner(o, name="o"),
        SelfPlay(o, pool, every_train_iter=3, name="o"),
        EpsGreedyHandler(y, name="y"),
        against_pool,
        DataPusher(more, name="y"),
        OffPolicyLearner(y, more, update_per_collect=2, name="y"),
    ]


def turns(run: RunFolder) -> list[Any]:
    """Return a chain of a team whose agents take turns, stopped where others are at move."""
    game = make_game(Auction, teams={"ab": ["a", "b"], "c": "c"}, env_num=2, seed=0)
    ab = MAPPOPolicy.for_env(game["ab"], seed=0, batch_size=8)
    c = DQNPolicy.for_env(game["c"], seed=1, batch_size=4)
    buffer = TensorBuffer(60, seed=0)
    return [
        # Its rows end with its turn, in which a row of the others has just begun.
        TeamCollector(game, {"c": c, "ab": ab}, n_sample=5),
        GAEEstimator(ab, name="ab"),
        OnPolicyLearner(ab, name="ab"),
        EpsGreedyHandler(c, name="c"),
        DataPusher(buffer, name="c"),
        OffPolicyLearner(c, buffer, name="c"),
    ]


def exchanged(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    """Return what exchanges data with other processes, which there are none of."""
    return [ContextExchanger(), ModelExchanger(policy), PeriodicalModelExchanger(policy, period=2)]


def observed(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    """Return the parts of an Experiment, and the other observers."""
    judged = make_env_manager("CartPole-v1", env_num=2, seed=1)
    return [
        interaction_evaluator(policy, judged, n_episode=2, every_train_iter=3),
        CkptSaver(policy, run, every_train_iter=3),
        online_logger(run, every_train_iter=3),
        LearningCurve(run),
        FinalCtxSaver(run),
        EpochTimer(),
        ProgressBar(),
        Barrier(),
        TerminationChecker(max_env_step=10_000),
    ]


def first_priorities(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    return [priority_calculator(lambda rows: rows["reward"] + rows["obs"][..., 0].abs())]


def n_step_rewards(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    return [nstep_reward_enhancer(policy)]


def monte_carlo(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    return [montecarlo_return_estimator(policy)]


def ppo_with(kind: Any, *, own_critic: bool = False) -> Callable[[RunFolder], list[Any]]:
    """Return a program of PPO with learned rewards."""

    def build(run: RunFolder) -> list[Any]:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = PPOPolicy.for_env(envs, seed=0, batch_size=16)
        model = kind.for_env(envs, policy, hidden_sizes=(8,))
        gae, learner = gae_estimator(policy), OnPolicyLearner(policy)
        collector = StepCollector(policy, envs, n_sample=32)
        if not own_critic:
            return [collector, RewardLearner(model, weight=0.1, env_weight=1.0), gae, learner]
        critic = IntrinsicCritic.for_env(envs, policy, hidden_sizes=(8,))
        return [collector, gae, IntrinsicAdvantage(model, critic), learner]

    return build


def imitated(run: RunFolder) -> list[Any]:
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    policy = PPOPolicy.for_env(envs, seed=0, batch_size=16)
    with make_env_manager("CartPole-v1", env_num=2, seed=1) as others:
        expert = flatten_lead(RolloutCollector(policy, others).collect(64), 2)
    gail = GAIL.for_env(envs, expert, seed=0, hidden_sizes=(8,), epochs=1)
    collector = StepCollector(policy, envs, n_sample=32)
    return [collector, RewardLearner(gail), gae_estimator(policy), OnPolicyLearner(policy)]


def team(run: RunFolder) -> list[Any]:
    policy = made(QMIXPolicy)
    envs = make_env_manager(lambda: env_for(QMIXPolicy), env_num=2, mode="async", seed=0)
    buffer = buffer_of(policy, collected(policy))
    return [
        eps_greedy_handler(policy),
        StepCollector(policy, envs, n_sample=48),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=2),
    ]


def offline(run: RunFolder) -> list[Any]:
    path = run.path.parent / "rows.safetensors"
    policy = made(BCPolicy, batch_size=8)
    if not path.exists():
        save_dataset(path, flatten_lead(collected(policy), 2))
    return [OfflineLearner(policy, OfflineDataset(path))]


def transformer(run: RunFolder) -> list[Any]:
    policy = made(DecisionTransformerPolicy)
    buffer = buffer_of(policy, collected(policy))
    return [OffPolicyLearner(policy, buffer, update_per_collect=2)]


def learned_rows(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    return [RewardLearner(RND.for_env(envs, policy, hidden_sizes=(8,)), weight=0.5, env_weight=1.0)]


def saved_rows(policy: Any, envs: Any, run: RunFolder) -> list[Any]:
    return [OfflineDataSaver(run.path / "rows.safetensors")]


PROGRAMS: dict[str, Callable[[RunFolder], list[Any]]] = {
    "evaluator and experiment": partial(dqn_of, after=evaluated),
    "successors stored once": partial(dqn_of, store_next_obs=False),
    "prioritized": partial(dqn_of, sampler=PrioritySampler),
    "without replacement": partial(dqn_of, sampler=partial(UniformSampler, replace=False)),
    "mapped": partial(dqn_of, storage="columns"),
    "envs in processes": partial(dqn_of, mode="async"),
    "a vector env": partial(dqn_of, mode="vector"),
    "whole episodes": partial(dqn_of, collect=EpisodeCollector),
    "learned rewards in a buffer": partial(dqn_of, before=learned_rows),
    "saved rows": partial(dqn_of, before=saved_rows),
    "RND": ppo_with(RND),
    "RND with a critic": ppo_with(RND, own_critic=True),
    "ICM": ppo_with(ICM),
    "offline": offline,
    "self-play": self_play,
    "teams": teams,
    "a team that takes turns": turns,
    "hindsight": hindsight,
    "observers": partial(dqn_of, after=observed),
    "exchangers of one process": partial(dqn_of, after=exchanged),
    "first priorities": partial(dqn_of, before=first_priorities, sampler=PrioritySampler),
    "n-step rewards": partial(dqn_of, before=n_step_rewards, n_step=3),
    "Monte Carlo returns": partial(dqn_of, collect=EpisodeCollector, before=monte_carlo),
    "GAIL": imitated,
    "a team in processes": team,
    "a transformer of offline data": transformer,
}
OFFLINE = (offline, transformer)


@pytest.mark.parametrize("build", mostly_slow(
    (pytest.param(build, id=name) for name, build in PROGRAMS.items()), keep=(13, 14, 15, 16)
))  # fmt: skip
def test_the_other_stock_parts_resume_exactly(
    build: Callable[[RunFolder], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_blocks(monkeypatch)

    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        task = Task(OfflineRLContext() if build in OFFLINE else OnlineRLContext(), seed=0)
        run = RunFolder(folder)
        task.at_close(run.close)
        snapshots = SnapshotSaver(run)
        for one in (*build(run), snapshots):
            task.use(one)
        return task, snapshots

    assert_resume_exact(main, n_step=5)


NOT_HERE = {
    Curriculum,  # in test_curriculum.py
    SnapshotSaver,  # in every program
    WandbLogger,  # in test_wandb_logger.py
    TrackioLogger,  # in test_trackers.py
}


def test_every_stock_middleware_resumes_exactly(tmp_path: Path) -> None:
    stock = {
        one
        for one in vars(middleware).values()
        if isinstance(one, type) and issubclass(one, BaseMiddleware) and one is not BaseMiddleware
    }
    tested = set[type]()
    for number, build in enumerate(PROGRAMS.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        tested |= {type(one) for one in build(RunFolder(folder))}
    assert tested | NOT_HERE == stock


class Forgets:
    """A middleware that changes what it does after a resume."""

    def __init__(self, saves: bool) -> None:
        self.n, self.saves = 0, saves

    def __call__(self, ctx: Any) -> None:
        self.n += 1
        ctx.env_episode += self.n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        if self.saves:
            self.n = state["n"]


def test_the_first_thing_that_differs_is_named() -> None:
    assert_resume_exact(chain_of(DQNPolicy, lambda: Forgets(saves=True)), n_step=2)
    with pytest.raises(AssertionError, match=r"after step 1 .* differs in .*(env_episode|\bn\b)"):
        assert_resume_exact(chain_of(DQNPolicy, lambda: Forgets(saves=False)), n_step=2)


def test_one_step_cannot_be_interrupted() -> None:
    with pytest.raises(ConfigError, match="n_step"):
        assert_resume_exact(chain_of(DQNPolicy), n_step=1)
