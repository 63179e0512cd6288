from pathlib import Path
from typing import Any

import numpy as np
import pytest
from easydict import EasyDict

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker import player_league as league

CFG = EasyDict(
    one_phase_step=10,
    strong_win_rate=0.7,
    branch_probs={"pfsp": 1.0},
    mutate_prob=0.0,
    min_valid_win_rate=0.2,
)


@pytest.fixture
def payoff() -> league.BattleSharedPayoff:
    return league.create_payoff(EasyDict(type="battle", decay=1.0, min_win_rate_games=2))


def add(payoff: league.BattleSharedPayoff, kind: str, name: str, **kwargs: Any) -> league.Player:
    rating = league.LeagueMetricEnv().create_rating()
    player = league.create_player(
        {}, kind, CFG, "zerg", payoff, f"{name}.pth", name, 0, rating, **kwargs
    )
    payoff.add_player(player)
    return player


def test_ratings_change_as_trueskill_says() -> None:
    env = league.LeagueMetricEnv(mu=0)
    home, away = env.rate_1vs1(env.create_rating(), env.create_rating(), drawn=True)
    assert (home.mu, home.sigma) == pytest.approx((0.0, 6.4575), abs=1e-4)
    home, away = env.rate_1vs1(home, away)
    assert (home.mu, away.sigma) == pytest.approx((3.2300, 5.6673), abs=1e-4)
    beaten, _ = env.rate_1vs1(home, away, result=["losses"])
    assert beaten.mu < home.mu and beaten.elo < home.elo


@pytest.mark.parametrize("end", ["wins", "draws", "losses"])
def test_an_extreme_difference_of_ratings_gives_finite_ones(end: str) -> None:
    home, away = league.PlayerRating(mu=1e4), league.PlayerRating(mu=-1e4)
    ratings = league.LeagueMetricEnv().rate_1vs1(home, away, result=[end])
    assert np.isfinite([(rating.mu, rating.sigma) for rating in ratings]).all()


def test_elo_of_two_players_is_that_of_the_table() -> None:
    rating, games = np.array([1613, 1573]), np.array([[0, 1], [1, 0]])
    table = league.get_elo_array(rating, np.array([[0, -1], [1, 0]]), games)
    assert tuple(table) == league.get_elo(1613, 1573, -1) == (1595, 1591)


def test_win_rates_are_those_of_either_side(payoff: league.BattleSharedPayoff) -> None:
    b, a = (add(payoff, "naive_sp_player", name) for name in "ba")
    assert payoff[b, a] == [0.5]
    assert payoff.update({"player_id": ["b", "a"], "result": [["wins", "draws"], ["wins"]]})
    assert payoff[b, a] == pytest.approx([5 / 6])
    assert payoff[a, [a, b]] == pytest.approx([0.5, 1 / 6])
    assert payoff[[a, b], [a, b]].shape == (2, 2)
    assert "| a | b | 0.00 | 1.00 | 2.00 |" in repr(payoff)


def test_unknown_players_and_results_are_not_counted(payoff: league.BattleSharedPayoff) -> None:
    add(payoff, "naive_sp_player", "a")
    assert not payoff.update({"player_id": ["a", "a"], "result": ["error"]})
    assert not payoff.update({"player_id": ["a", "b"], "result": ["wins"]})


def test_a_player_that_loses_to_an_opponent_meets_it_more_often(
    payoff: league.BattleSharedPayoff,
) -> None:
    chances = league.pfsp(np.array([0.1, 0.9]), "squared")
    assert chances == pytest.approx([0.81 / 0.82, 0.01 / 0.82])
    assert league.pfsp(np.array([1.0, 1.0]), "squared") == pytest.approx([0.5, 0.5])
    with pytest.raises(ConfigError, match="cubed"):
        league.pfsp(np.array([0.5]), "cubed")


def test_an_exploiter_meets_snapshots_of_a_main_player_that_it_never_beats(
    payoff: league.BattleSharedPayoff,
) -> None:
    main, exploiter = (add(payoff, kind, kind) for kind in ("main_player", "main_exploiter"))
    assert isinstance(main, league.MainPlayer) and isinstance(exploiter, league.MainExploiter)
    assert exploiter._main_players_branch() is main
    payoff.update({"player_id": ["main_exploiter", "main_player"], "result": ["losses"] * 9})
    assert exploiter._main_players_branch() is main, "no snapshot exists yet"
    snapshot = main.snapshot(league.LeagueMetricEnv())
    payoff.add_player(snapshot)
    assert exploiter._main_players_branch() is snapshot


def test_a_league_keeps_snapshots_and_plays_against_them(tmp_path: Path) -> None:
    games = league.create_league(
        {
            "league_type": "one_vs_one",
            "path_policy": str(tmp_path / "policies"),
            "naive_sp_player": {"branch_probs": {"pfsp": 1.0, "sp": 0.0}},
        }
    )
    (player,) = games.active_players
    Path(player.checkpoint_path).write_bytes(b"policy")
    assert not games.judge_snapshot(player.player_id)
    games.update_active_player({"player_id": player.player_id, "train_iteration": 20})
    assert games.judge_snapshot(player.player_id)
    (snapshot,) = games.historical_players
    assert Path(snapshot.checkpoint_path).read_bytes() == b"policy"
    job = games.get_job_info()
    assert job["player_id"] == [player.player_id, snapshot.player_id]
    assert job["player_active_flag"] == [True, False]
    games.finish_job({"player_id": job["player_id"], "result": [["wins"]], "eval_flag": True})
    rank = games.player_rank()
    assert isinstance(rank, dict) and rank[player.player_id] > rank[snapshot.player_id]
    assert games.get_job_info(eval_flag=True)["eval_opponent"] == "RULE_BASED"


def test_unknown_types_and_players_are_named(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="two_vs_two"):
        league.create_league({"league_type": "two_vs_two"})
    games = league.OneVsOneLeague({"path_policy": str(tmp_path)})
    with pytest.raises(ConfigError, match="stranger"):
        games.get_job_info("stranger")
