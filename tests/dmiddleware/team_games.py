"""Games of teams for tests: simultaneous with different spaces, and turn-based."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pettingzoo


class Duel:
    """Two red agents (Discrete) and a blue one (Box); it has PettingZoo's methods alone.

    Each agent earns its number, and red_1 leaves after step ``leaves``, if that is not 0.
    """

    possible_agents = ["red_0", "red_1", "blue_0"]
    length = 5

    def __init__(self, leaves=0, fails_at=0):
        red, blue = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
        self.observation_space = {"red_0": red, "red_1": red, "blue_0": blue}
        self.action_space = {
            "red_0": gym.spaces.Discrete(4),
            "red_1": gym.spaces.Discrete(4),
            "blue_0": gym.spaces.Box(-1, 1, (2,)),
        }
        self.leaves, self.fails_at = leaves, fails_at
        self.rng, self.t = np.random.default_rng(0), 0

    def observed(self, agents):
        return {
            agent: self.rng.uniform(-1, 1, self.observation_space[agent].shape).astype(np.float32)
            for agent in agents
        }

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.agents = 0, list(self.possible_agents)
        return self.observed(self.agents), {}

    def step(self, actions):
        self.t += 1
        if self.t == self.fails_at:
            raise RuntimeError("broken")
        assert list(actions) == list(self.agents), "only the agents that take part act"
        is_over = self.t == self.length
        rewards = {agent: 1.0 + 10 * self.possible_agents.index(agent) for agent in actions}
        leaving = [a for a in actions if is_over or (a == "red_1" and self.t == self.leaves)]
        terminated = {agent: agent in leaving for agent in actions}
        obs = self.observed(actions)
        self.agents = [agent for agent in actions if agent not in leaving]
        return obs, rewards, terminated, dict.fromkeys(actions, False), {}


class Turns(pettingzoo.AECEnv):
    """Base of games in which one agent acts after the other."""

    def begin(self):
        """Let all agents take part, and the first one act."""
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]


class Auction(Turns):
    """Three agents bid in turn, and b leaves after its first bid; each bid pays all who are there.

    An action is not used. An agent earns 1 for each bid of a, 10 for b's, 100 for c's.
    """

    metadata = {"name": "auction"}
    possible_agents = ["a", "b", "c"]
    pays = {"a": 1.0, "b": 10.0, "c": 100.0}
    rounds = 2

    def observation_space(self, agent):
        return gym.spaces.Box(0, 100, (2,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def observe(self, agent):
        return np.array([self.possible_agents.index(agent), self.t], np.float32)

    def reset(self, seed=None, options=None):
        self.t = 0
        self.paid = [0.0] * 3
        self.begin()

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            place = self.agents.index(agent)
            self._was_dead_step(None)
            if self.agents:
                self.agent_selection = self.agents[place % len(self.agents)]
            return
        self.t += 1
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, self.pays[agent])
        for one in self.agents:
            self.paid[self.possible_agents.index(one)] += self.pays[agent]
        self._accumulate_rewards()
        if agent == "b":
            self.terminations["b"] = True
        if agent == "c" and self.t > 3:
            self.terminations = dict.fromkeys(self.agents, True)
        place = self.agents.index(agent)
        self.agent_selection = self.agents[(place + 1) % len(self.agents)]


class Exits(Auction):
    """The auction with turns as given; those who have left are not asked any more.

    Args:
        turns: of each bid, the agent, and how others leave after it: "terminations",
            "truncations", or "" for one that is no longer there.
    """

    def __init__(self, turns):
        self.turns = turns

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.agent_selection = self.turns[0][0]

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(None)
        else:
            self._cumulative_rewards[agent] = 0.0
            self.rewards = dict.fromkeys(self.agents, self.pays[agent])
            self._accumulate_rewards()
            for leaver, way in self.turns[self.t][1].items():
                if way:
                    getattr(self, way)[leaver] = True
                else:
                    self.agents.remove(leaver)
            self.t += 1
        leavers = [a for a in self.agents if self.terminations[a] or self.truncations[a]]
        if self.agents:
            self.agent_selection = leavers[0] if leavers else self.turns[self.t][0]


class Telephone(Turns):
    """The caller passes a number on, which the listener says; both earn 1 if nobody is wrong.

    Args:
        box: whether actions are of a Box.
    """

    metadata = {"name": "telephone"}
    possible_agents = ["caller", "listener"]
    numbers = 3
    rng = np.random.default_rng(0)

    def __init__(self, box=False):
        self.box = box

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (2, self.numbers))

    def action_space(self, agent):
        return gym.spaces.Box(0, 1, (1,)) if self.box else gym.spaces.Discrete(self.numbers)

    def observe(self, agent):
        obs = np.zeros((2, self.numbers), np.float32)
        if agent == "caller":
            obs[0, self.number] = 1
        elif self.word is not None:
            obs[1, self.word] = 1
        return obs

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.number, self.word = int(self.rng.integers(self.numbers)), None
        self.begin()

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(None)
            self.agent_selection = "listener"
            return
        self._cumulative_rewards[agent] = 0.0
        if agent == "caller":
            self.word, self.agent_selection = int(action), "listener"
            return
        is_right = int(action) == self.word == self.number
        self.rewards = dict.fromkeys(self.agents, float(is_right))
        self._accumulate_rewards()
        self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = "caller"


class Solo:
    """A single-agent env as a game of one agent."""

    def __init__(self, env_id="CartPole-v1"):
        self.env = gym.make(env_id)
        self.observation_space = {"it": self.env.observation_space}
        self.action_space = {"it": self.env.action_space}

    def reset(self, seed=None, options=None):
        obs, info = self.env.reset(seed=seed)
        return {"it": obs}, {"it": info}

    def step(self, actions):
        return tuple({"it": part} for part in self.env.step(actions["it"]))
