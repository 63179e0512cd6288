"""Win rates and ratings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.errors import ConfigError
from dmiddleware.worker.league import BattlePayoff, elo_change

RESULT = st.sampled_from(["wins", "draws", "losses"])


def play(payoff, results, home="a", away="b"):
    for result in results:
        payoff.add(home, away, result)


def test_the_win_rate_is_the_share_of_wins_with_draws_as_half():
    payoff = BattlePayoff({"decay": 1.0, "min_win_rate_games": 4})
    play(payoff, ["wins", "wins", "draws", "losses"])
    assert payoff.win_rate("a", "b") == 0.625
    assert payoff.win_rate("b", "a") == 0.375
    assert payoff.record("b", "a") == {"wins": 1, "draws": 1, "losses": 2, "games": 4}


def test_few_games_say_nothing():
    payoff = BattlePayoff({"decay": 1.0})
    play(payoff, ["wins"] * 7)
    assert payoff.win_rate("a", "b") == 0.5
    play(payoff, ["wins"])
    assert payoff.win_rate("a", "b") == 1.0
    assert BattlePayoff({"min_win_rate_games": 0}).win_rate("a", "b") == 0.5


def test_a_player_against_itself_counts_nothing():
    payoff = BattlePayoff({"min_win_rate_games": 1})
    play(payoff, ["wins"] * 20, away="a")
    assert payoff.win_rate("a", "a") == 0.5
    assert payoff.state_dict() == {}


@given(results=st.lists(RESULT, max_size=30), decay=st.floats(0.0, 1.0))
def test_each_game_decays_the_earlier_ones(results, decay):
    payoff = BattlePayoff({"decay": decay, "min_win_rate_games": 0})
    play(payoff, results)
    record = payoff.record("a", "b")
    for kind in ("wins", "draws", "losses"):
        ages = [age for age, result in enumerate(reversed(results)) if result == kind]
        assert record[kind] == pytest.approx(sum(decay**age for age in ages))
    assert record["games"] == pytest.approx(sum(decay**age for age in range(len(results))))
    assert payoff.win_rate("a", "b") + payoff.win_rate("b", "a") == pytest.approx(1.0)


def test_counts_are_saved_and_restored():
    payoff, other = BattlePayoff(), BattlePayoff()
    play(payoff, ["wins"] * 9)
    other.load_state_dict(payoff.state_dict())
    play(payoff, ["losses"] * 9)
    assert other.win_rate("a", "b") == 1.0
    assert payoff.win_rate("a", "b") < 0.5


def test_equal_players_win_half_of_what_a_game_changes():
    assert elo_change(1000, 1000, ["wins"]) == 8.0
    assert elo_change(1000, 1000, ["draws"]) == 0.0
    assert elo_change(1000, 1400, ["wins"], k=11) == pytest.approx(10.0)
    assert elo_change(1000, 1400, []) == 0.0


@given(home=st.floats(0, 3000), away=st.floats(0, 3000), results=st.lists(RESULT, max_size=10))
def test_one_player_gains_what_the_other_loses(home, away, results):
    mirrored = [{"wins": "losses", "losses": "wins"}.get(result, result) for result in results]
    change = elo_change(home, away, results)
    assert change == pytest.approx(-elo_change(away, home, mirrored), abs=1e-6)


def test_an_unusable_config_is_refused():
    with pytest.raises(ConfigError, match="decay"):
        BattlePayoff({"decay": 1.5})
