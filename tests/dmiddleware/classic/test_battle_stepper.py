from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.classic import BattleTimestep
from dmiddleware.classic.battle_stepper import TurnTracker
from dmiddleware.errors import ConfigError
from dmiddleware.policy import Policy
from dmiddleware.rollout.opponents import check_sees_games

N_PLAYER = 3


@st.composite
def games(draw):
    """A game: for each step who moves and each player's reward."""
    n_steps = draw(st.integers(1, 12))
    movers = st.sets(st.integers(0, N_PLAYER - 1), min_size=1)
    rewards = st.lists(st.integers(-9, 9), min_size=N_PLAYER, max_size=N_PLAYER)
    return [(draw(movers), draw(rewards)) for _ in range(n_steps)]


def step_of(time, rewards, to_move, done):
    return BattleTimestep(
        0, [None] * N_PLAYER, [float(one) for one in rewards], done, done, False,
        tuple(sorted(to_move)), [{} for _ in range(N_PLAYER)],
    )  # fmt: skip


def literal_turns(game, player):
    """Follow one player: (time of its move, time of what it sees next, rewards in between)."""
    moves = [time for time, (movers, _) in enumerate(game) if player in movers]
    ends = [*moves[1:], len(game)]
    return [
        (move, end, sum(game[time][1][player] for time in range(move, end)))
        for move, end in zip(moves, ends, strict=False)
    ]


@given(games())
def test_turns_are_those_of_following_each_player(game):
    tracker = TurnTracker()
    found = {player: [] for player in range(N_PLAYER)}
    for time, (movers, rewards) in enumerate(game):
        for player in movers:
            tracker.begin(0, player, torch.tensor(time), {"action": torch.tensor(player)})
        done = time == len(game) - 1
        following = () if done else game[time + 1][0]
        if time % 3 == 1:  # a checkpoint in between
            other = TurnTracker()
            other.load_state_dict(tracker.state_dict())
            tracker = other
        turns = tracker.advance(
            step_of(time, rewards, following, done), [torch.tensor(time + 1)] * N_PLAYER
        )
        for player, turn in turns.items():
            assert int(turn.output["action"]) == player
            assert turn.timestep.done == done
            found[player].append((int(turn.obs), int(turn.timestep.obs), turn.timestep.reward))
    for player in range(N_PLAYER):
        assert found[player] == literal_turns(game, player)
    assert tracker.drop(0) == 0


def test_open_turns_of_a_game_can_be_dropped():
    tracker = TurnTracker()
    for env_id in range(2):
        for player in range(2):
            tracker.begin(env_id, player, torch.tensor(0), {})
    assert tracker.drop(1) == 2
    assert tracker.drop(1) == 0
    assert len(tracker.advance(step_of(0, [1, 1, 1], (0, 1), False), [torch.tensor(1)] * 3)) == 2


class Remembering(Policy):
    act_inputs = ("action_mask", "prev_reward")

    def initial_state(self, n):
        return torch.zeros(n)

    def act_eval(self, obs, env_id, *, prev_reward, state):
        return {"action": torch.zeros(len(env_id)), "state": state}


def test_policies_that_need_more_than_a_games_observations_are_rejected():
    mode = Remembering(model=torch.nn.Identity(), modes=["eval"]).eval_mode
    with pytest.raises(ConfigError, match="needs prev_reward, a recurrent state to act"):
        check_sees_games([mode, mode], user="the test")
