from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest
from pettingzoo.utils import AgentSelector

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import PettingZooAdapter
from dmiddleware.errors import ConfigError


def adapted(kind, name, **options):
    return PettingZooAdapter(pettingzoo.make(kind, f"classic/{name}"), **options)


@pytest.mark.parametrize(("name", "n_actions"), [("tictactoe-v3", 9), ("connect_four-v3", 7)])
def test_board_games_are_played_in_turn_to_their_end(name, n_actions):
    rng, results = np.random.default_rng(0), []
    with BattleEnvManager([lambda: adapted("aec", name)] * 3, seed=1) as games:
        assert games.action_space.n == n_actions
        while len(results) < 20:
            actions = {}
            for env_id, obs in games.ready_obs.items():
                (mover,) = games.to_move[env_id]
                assert games.observation_space.contains(obs[mover])
                assert not obs[1 - mover]["action_mask"].any()
                allowed = np.flatnonzero(obs[mover]["action_mask"])
                actions[env_id] = [None, None]
                actions[env_id][mover] = rng.choice(allowed)
            for step in games.step(actions).values():
                if step.done:
                    assert step.terminated
                    results.append(tuple(one["eval_episode_return"] for one in step.info))
    assert set(results) <= {(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)}
    assert len(set(results)) >= 2


def test_the_first_player_wins_with_a_row():
    game = adapted("aec", "tictactoe-v3")
    game.reset(seed=0)
    for turn, cell in enumerate([0, 3, 1, 4, 2]):
        assert game.to_move() == (turn % 2,)
        assert game.action_mask(turn % 2)[cell] == 1
        actions = [None, None]
        actions[turn % 2] = cell
        obs, rewards, terminated, truncated, infos = game.step(actions)
        assert terminated == (turn == 4)
    assert rewards == [1.0, -1.0]
    assert not truncated
    assert obs[0]["observation"][0].tolist() == [[1, 0], [1, 0], [1, 0]]
    assert len(infos) == 2
    game.close()


def test_arrays_are_flattened_on_request():
    game = adapted("aec", "connect_four-v3", flatten=True)
    obs = game.reset()
    assert obs[0]["observation"].shape == (84,)
    assert game.observation_space.contains(obs[0])
    plain = adapted("aec", "connect_four-v3")
    assert plain.reset()[0]["observation"].shape == (6, 7, 2)


def test_parallel_envs_move_together():
    game = adapted("parallel", "rps-v2")
    game.reset(seed=0)
    assert game.to_move() == (0, 1)
    assert game.action_mask(0) is None
    obs, rewards, *_ = game.step([0, 1])
    assert rewards == [-1.0, 1.0]
    assert [int(one) for one in obs] == [1, 0]
    n_steps, ends = 1, (False, False)
    while not any(ends):
        ends = game.step([2, 2])[2:4]
        n_steps += 1
    assert ends == (False, True)
    assert n_steps == 15


class Leaving(pettingzoo.ParallelEnv):
    """Three agents; after step t, agent t - 1 terminates (the last one is truncated)."""

    metadata = {"name": "leaving"}
    possible_agents = ["a", "b", "c"]

    def observation_space(self, agent):
        return gym.spaces.Discrete(4 if agent == "a" else 5)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.t = [*self.possible_agents], 0
        return {agent: 0 for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents
        self.t += 1
        agents = self.agents
        gone = agents[:1]
        self.agents = agents[1:]
        return (
            {agent: self.t for agent in agents},
            {agent: 1.0 for agent in agents},
            {agent: agent in gone and self.t < 3 for agent in agents},
            {agent: agent in gone and self.t == 3 for agent in agents},
            {agent: {"t": self.t, "action_mask": np.array([1, 0])} for agent in agents},
        )


class LeavingInTurns(pettingzoo.AECEnv):
    """Three agents; each move terminates its agent, and the next one moves."""

    metadata = {"name": "leaving_in_turns"}
    possible_agents = ["a", "b", "c"]

    def observation_space(self, agent):
        return gym.spaces.Discrete(9)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def observe(self, agent):
        return self.t * (2 if agent == self.agent_selection else 1)

    def reset(self, seed=None, options=None):
        self.t = 0
        self.agents = [*self.possible_agents]
        self.selector = AgentSelector([*self.possible_agents])
        self.agent_selection = self.selector.next()
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self.t += 1
        self.rewards = {agent: float(self.t) for agent in self.agents}
        self.terminations[self.agent_selection] = True
        self.agent_selection = self.selector.next()
        self._deads_step_first()


def test_agents_that_leave_keep_their_last_observation():
    game = PettingZooAdapter(Leaving())
    assert game.n_player == 3
    assert game.observation_space is None
    game.reset()
    assert game.to_move() == (0, 1, 2)
    assert game.step([0, 0, 0])[2:4] == (False, False)
    assert game.to_move() == (1, 2)
    assert game.action_mask(1).tolist() == [1, 0]
    obs, rewards, *_ = game.step([None, 0, 0])
    assert [int(one) for one in obs] == [1, 2, 2]
    assert rewards == [0.0, 1.0, 1.0]
    obs, _, terminated, truncated, infos = game.step([None, None, 0])
    assert [int(one) for one in obs] == [1, 2, 3]
    assert (terminated, truncated) == (False, True)
    assert [info["t"] for info in infos] == [1, 2, 3]


def test_turn_based_agents_may_leave_too():
    game = PettingZooAdapter(LeavingInTurns())
    game.reset()
    obs, rewards, terminated, _, _ = game.step([0, None, None])
    assert game.to_move() == (1,)
    assert rewards == [1.0, 1.0, 1.0]
    assert int(obs[1]) == 2  # observed as the one to move
    assert not terminated
    obs, rewards, *_ = game.step([None, 0, None])
    assert game.to_move() == (2,)
    assert rewards == [0.0, 2.0, 2.0]
    _, rewards, terminated, truncated, _ = game.step([None, None, 0])
    assert (terminated, truncated) == (True, False)
    assert rewards == [0.0, 0.0, 3.0]


def test_games_of_pettingzoo_can_be_saved():
    def make():
        return adapted("aec", "tictactoe-v3", flatten=True)

    with BattleEnvManager([make]) as games, BattleEnvManager([make]) as other:
        games.step({0: [4, None]})
        assert other.load_state_dict(games.state_dict())
        moved = [one.step({0: [None, 0]})[0].obs[0]["observation"] for one in (games, other)]
    assert np.array_equal(*moved)
    assert moved[0].sum() == 2


def test_what_is_not_a_pettingzoo_env_is_refused():
    with pytest.raises(ConfigError, match=r"pettingzoo\.make"):
        PettingZooAdapter(gym.make("CartPole-v1"))


def test_without_pettingzoo_the_constructor_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ConfigError, match="pip install"):
        PettingZooAdapter(object())
