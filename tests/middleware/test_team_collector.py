"""Collecting for several teams of a game in one chain."""

from __future__ import annotations

from typing import Any

import pytest

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.policy import (
    DQNPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QMIXPolicy,
    RecurrentQMIXPolicy,
    SACPolicy,
)
from dmiddleware.rollout import OpponentPool, against
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    GAEEstimator,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    SelfPlay,
    TeamCollector,
)
from tests.dmiddleware.rollout.test_games import make_duel, make_tictactoe

SMALL: Any = {"encoder_hidden_sizes": [8]}


def learners_of(name: str, policy: Any) -> list[Any]:
    """Return what learns from the trajectories of a team."""
    if policy.collect_mode.spec.on_policy:
        return [GAEEstimator(policy, name=name), OnPolicyLearner(policy, name=name)]
    has_memory = isinstance(policy, RecurrentQMIXPolicy)
    buffer = TensorBuffer(200, unroll_len=4 if has_memory else None, seed=0)
    explorers = [EpsGreedyHandler(policy, name=name)] if isinstance(policy, DQNPolicy) else []
    learner = OffPolicyLearner(policy, buffer, update_per_collect=2, name=name)
    return [*explorers, DataPusher(buffer, name=name), learner]


@pytest.mark.parametrize(
    ("red", "blue"),
    [
        (DQNPolicy, PPOPolicy),
        (MAPPOPolicy, SACPolicy),
        (QMIXPolicy, SACPolicy),
        (RecurrentQMIXPolicy, SACPolicy),
    ],
)
def test_each_team_learns_with_its_algorithm_and_has_its_counters_and_metrics(
    red: Any, blue: Any
) -> None:
    game = make_duel()
    policies = {
        "red": red.for_env(game["red"], seed=0, batch_size=8),
        "blue": blue.for_env(game["blue"], seed=0, batch_size=8),
    }
    logged = []
    with Task(OnlineRLContext(), seed=0) as task:
        if red in (QMIXPolicy, RecurrentQMIXPolicy):
            task.use(EpsGreedyHandler(policies["red"], name="red"))
        task.use(TeamCollector(game, policies, n_sample=12))
        for name, policy in policies.items():
            for part in learners_of(name, policy):
                task.use(part)
        eval_envs = against(make_duel(seed=1), "blue", {"red": "random"})
        task.use(
            InteractionEvaluator(
                policies["blue"], eval_envs, n_episode=2, every_train_iter=1, name="blue"
            )
        )
        task.use(lambda ctx: logged.append(dict(ctx.logged)))
        task.run(max_step=2)
        ctx = task.ctx
    parts = {name: ctx.part(name) for name in policies}
    # One row for the team or each of its agents, and 12 steps until blue has 12 rows.
    n_red = 24 if not red.several_agents else 12
    assert parts["blue"].env_step == 2 * 12
    assert parts["red"].env_step == 2 * n_red
    assert ctx.env_step == parts["red"].env_step + parts["blue"].env_step
    assert all(part.train_iter > 0 for part in parts.values())
    assert logged[-1]["blue/collect/return_mean"] == 105.0
    assert logged[-1]["red/collect/return_mean"] == 30.0
    assert parts["blue"].last_eval_value == 105.0
    assert parts["red"].trajectories["done"].numel() == n_red
    ends = parts["blue"].trajectory_end_idx
    assert parts["blue"].trajectories["done"].flatten()[ends].all()
    assert game.closed


def test_what_all_teams_collect_counts_for_the_whole_chain() -> None:
    game = make_duel()
    blue = SACPolicy.for_env(game["blue"], seed=0)
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(TeamCollector(game, {"red": "random", "blue": blue}, n_sample=12))
        task.run(max_step=2)
        assert (task.ctx.env_step, task.ctx.env_episode) == (24, 4)


def test_the_games_of_a_team_that_learns_against_its_past_are_rated() -> None:
    game = make_tictactoe(env_num=8)

    def version() -> PPOPolicy:
        return PPOPolicy.for_env(game["o"], seed=0, model=SMALL)

    policy, pool = version(), OpponentPool(version, size=2, prioritized=True)
    logged: dict[str, float] = {}
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(SelfPlay(policy, pool, every_train_iter=1, name="x"))
        task.use(TeamCollector(game, {"x": policy, "o": pool}, n_sample=64))
        for part in learners_of("x", policy):
            task.use(part)
        task.use(lambda ctx: logged.update(ctx.logged))
        task.run(max_step=4)
    assert len(pool) == 2
    assert {"x/self_play/elo", "x/self_play/version2_win_rate"} <= logged.keys()
    assert logged["x/self_play/elo"] != 1200


def test_what_lacks_a_team_or_its_name_is_an_error_before_the_first_step() -> None:
    game = make_duel()
    blue = SACPolicy.for_env(game["blue"], seed=0)
    collector = TeamCollector(game, {"red": "random", "blue": blue}, n_sample=4)
    with Task(OnlineRLContext(), seed=0) as task:
        # The learner has no name, so it is not blue's.
        task.use(collector).use(DataPusher(TensorBuffer(9)))
        with pytest.raises(ChainError, match="blue"):
            task.run(max_step=1)
    game = make_duel()
    policies = {
        "red": DQNPolicy.for_env(game["red"], seed=0),
        "blue": SACPolicy.for_env(game["blue"], seed=0, batch_size=8),
    }
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(TeamCollector(game, policies, n_sample=4))
        for part in learners_of("blue", policies["blue"]):
            task.use(part)
        with pytest.raises(ChainError, match=r"team 'red'.*Frozen"):
            task.run(max_step=1)
    with pytest.raises(ConfigError, match="n_sample"):
        TeamCollector(game, {"red": "random", "blue": blue}, n_sample=0)
    with pytest.raises(ConfigError, match="nobody acts for the team 'red'"):
        TeamCollector(game, {"blue": blue}, n_sample=4)


def test_a_teams_name_is_that_of_a_part() -> None:
    from dmiddleware.rollout import make_game
    from tests.dmiddleware.team_games import Duel

    game = make_game(Duel, teams={"collect": "red_*", "b/c": "blue_*"}, env_num=1)
    policies = {
        "collect": DQNPolicy.for_env(game["collect"], seed=0),
        "b/c": SACPolicy.for_env(game["b/c"], seed=0),
    }
    for name in policies:
        players = {**dict.fromkeys(policies, "random"), name: policies[name]}
        with pytest.raises(ConfigError, match=name):
            TeamCollector(game, players, n_sample=4)
