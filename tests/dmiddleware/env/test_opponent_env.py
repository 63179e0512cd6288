"""Games from the seat of one player."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest

from dmiddleware.env import BattleEnv, OpponentEnv, PettingZooAdapter, make_env_manager
from dmiddleware.errors import ConfigError


def tictactoe():
    return PettingZooAdapter(pettingzoo.make("aec", "classic/tictactoe-v3"), flatten=True)


class Counting(BattleEnv):
    """Players add up to 3 in turn. Reaching 7 gives 1, and -1 to the others. One may not add 2."""

    observation_space = gym.spaces.Box(0, 20, (2,))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, n_player=2, together=False, at_once=False):
        self.n_player, self.together, self.at_once = n_player, together, at_once

    def reset(self, seed=None):
        self.seed, self.total, self.turn = seed, 6 if self.at_once else 0, 0
        return self._obs()

    def _obs(self):
        return [np.array([self.total, p], np.float32) for p in range(self.n_player)]

    def to_move(self):
        return tuple(range(self.n_player)) if self.together else (self.turn,)

    def action_mask(self, player):
        return np.array([1, 0, 1])

    def step(self, actions):
        given = [p for p, action in enumerate(actions) if action is not None]
        assert given == list(self.to_move())
        assert all(self.action_mask(p)[actions[p]] for p in given)
        self.total += sum(1 + int(actions[p]) for p in given)
        won = self.total >= 7
        rewards = [(1.0 if p in given else -1.0) if won else 0.25 for p in range(self.n_player)]
        self.turn = (self.turn + 1) % self.n_player
        return self._obs(), rewards, won, False, [{"turn": self.turn} for _ in rewards]


class Always:
    """Opponents who all take one action."""

    def __init__(self, action, seen=None):
        self.action, self.seen = action, seen

    def draw(self, rng):
        return 0

    def act(self, number, obs, mask, rng):
        if self.seen is not None:
            self.seen.append((obs.tolist(), mask.tolist()))
        return self.action


class OfTwoKinds:
    """Opponents who take the first action that is allowed, or a random one."""

    def draw(self, rng):
        return int(rng.integers(2))

    def act(self, number, obs, mask, rng):
        return rng.choice(np.flatnonzero(mask)[: 1 + number * 8])


def test_opponents_move_until_the_players_next_turn():
    seen = []
    env = OpponentEnv(Counting(3), Always(0, seen), seat=1)
    obs, info = env.reset(seed=0)
    assert obs.tolist() == [1, 1]
    assert info["action_mask"].tolist() == [1, 0, 1]
    obs, reward, terminated, truncated, info = env.step(0)
    assert obs.tolist() == [4, 1]
    assert (reward, terminated, truncated) == (0.75, False, False)
    assert seen == [([0, 0], [1, 0, 1]), ([2, 2], [1, 0, 1]), ([3, 0], [1, 0, 1])]
    assert env.step(2)[1:4] == (1.0, True, False)


def test_a_game_that_an_opponent_wins_is_lost():
    env = OpponentEnv(Counting(), Always(2), seat=0)
    env.reset(seed=0)
    obs, reward, terminated, _, _ = env.step(0)
    assert (obs[0], reward, terminated) == (4, 0.5, False)
    assert env.step(0)[1:3] == (-0.75, True)


def test_players_may_move_together():
    env = OpponentEnv(Counting(3, together=True), Always(0), seat=2)
    assert env.reset()[0].tolist() == [0, 2]
    obs, reward, *_ = env.step(0)
    assert (obs[0], reward) == (3, 0.25)


def test_a_game_that_ends_before_the_players_turn_is_played_again():
    env = OpponentEnv(Counting(at_once=True), Always(0))
    seats = {env.reset(seed=seed)[0][1] for seed in range(8)}
    assert seats == {0.0}  # the first player moves, and wins at once


def test_seats_and_random_moves_follow_the_seed():
    def rollout(seed):
        env = OpponentEnv(tictactoe())
        told, obs = [], env.reset(seed=seed)[0]
        for _ in range(12):
            told.append(obs["observation"].tolist())
            obs, reward, *ends, _ = env.step(int(np.flatnonzero(obs["action_mask"])[0]))
            told.append(reward)
            if any(ends):
                obs = env.reset()[0]
        return told

    assert rollout(1) == rollout(1)
    assert rollout(1) != rollout(2)


def test_games_against_random_opponents_are_won_and_lost_in_a_manager():
    with make_env_manager(lambda: OpponentEnv(tictactoe()), env_num=4, seed=0) as envs:
        returns = []
        while len(returns) < 60:
            mask = envs.ready_obs["action_mask"]
            step = envs.step(np.array([np.flatnonzero(one)[0] for one in mask]))
            returns += step.returns
    assert set(map(float, returns)) == {-1.0, 0.0, 1.0}


def played(envs, n_steps):
    obs = []
    for _ in range(n_steps):
        mask = envs.ready_obs["action_mask"]
        obs.append(envs.step(np.array([np.flatnonzero(one)[-1] for one in mask])).ready_obs)
    return [one["observation"].tolist() for one in obs]


@pytest.mark.parametrize("opponents", [None, OfTwoKinds()])
@pytest.mark.parametrize("seed", range(3))
def test_episodes_continue_after_a_resume(opponents, seed):
    def make(seed):
        return make_env_manager(lambda: OpponentEnv(tictactoe(), opponents), env_num=4, seed=seed)

    with make(seed) as envs:
        played(envs, 5)
        state = envs.state_dict()
        expected = played(envs, 20)
    with make(seed + 10) as envs:  # the players sit elsewhere, and play against others
        assert envs.load_state_dict(state)
        assert played(envs, 20) == expected


def test_random_opponents_without_masks_draw_from_the_space():
    class Free(Counting):
        def action_mask(self, player):
            return None

        def step(self, actions):
            assert all(action in range(3) for action in actions if action is not None)
            self.total += 1
            self.turn = 1 - self.turn
            return self._obs(), [0.0, 0.0], False, self.total == 6, [{}, {}]

    env = OpponentEnv(Free(), seat=0)
    _, info = env.reset(seed=0)
    assert info == {}
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]
    env.close()


class Nameless(Counting):
    observation_space = None


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        (Nameless(), {}, "has no observation_space"),
        (Counting(), {"seat": 2}, "seat must be 0 to 1"),
        (Counting(), {"opponents": lambda rng: None}, "methods draw and act"),
    ],
)
def test_what_cannot_be_played_is_refused(game, options, message):
    with pytest.raises(ConfigError, match=message):
        OpponentEnv(game, **options)
