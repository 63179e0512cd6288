"""PettingZoo's parallel envs as envs of several agents."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import ParallelEnvAdapter, PettingZooAdapter, make_env_manager
from dmiddleware.errors import ConfigError
from tests.dmiddleware.env.optional import needed

mpe2 = needed("mpe2")


class Relay(pettingzoo.ParallelEnv):
    """Three agents: b leaves after step 2, c joins after step 1; step 4 ends the episode."""

    metadata = {"name": "relay"}
    possible_agents = ["a", "b", "c"]
    state_space = gym.spaces.Box(0, 9, (1,))

    def __init__(self, masks="infos", ends=("terminated", "terminated")):
        self.masks, self.ends = masks, ends

    def observation_space(self, agent):
        box = gym.spaces.Box(0, 9, (2,))
        mask = gym.spaces.MultiBinary(2)
        if self.masks == "observations":
            return gym.spaces.Dict({"observation": box, "action_mask": mask})
        return box

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def state(self):
        return np.array([self.t])

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)

    def _obs(self, agents):
        obs = {a: np.array([ord(a) - ord("a"), self.t], np.float32) for a in agents}
        if self.masks == "observations":
            allowed = np.array([0, 0] if self.t == 4 else [0, 1], np.int8)
            return {a: {"observation": one, "action_mask": allowed} for a, one in obs.items()}
        return obs

    def _infos(self, agents):
        mask = {"action_mask": np.array([1, 0])} if self.masks == "infos" else {}
        return {agent: {"t": self.t, **mask} for agent in agents}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, ["a", "b"]
        return self._obs(self.agents), self._infos(self.agents)

    def step(self, actions):
        assert list(actions) == self.agents, "only the agents that take part act"
        self.t += 1
        shown = self.agents + (["c"] if self.t == 1 else [])
        over = {"a": self.t == 4, "b": self.t == 2, "c": self.t == 4}
        how = {"a": self.ends[0], "b": "terminated", "c": self.ends[1]}
        self.agents = [agent for agent in shown if not over[agent]]
        flags = {
            kind: {agent: over[agent] and how[agent] == kind for agent in shown}
            for kind in ("terminated", "truncated")
        }
        rewards = {agent: float(self.t) for agent in actions}
        return (
            self._obs(shown), rewards, flags["terminated"], flags["truncated"], self._infos(shown)
        )  # fmt: skip


def play(env):
    obs, _ = env.reset(seed=0)
    steps = [obs]
    for _ in range(4):
        steps.append(env.step(np.ones(3, np.int64)))
    return steps


def test_agents_come_and_go_and_are_masked():
    first, *steps = play(ParallelEnvAdapter(Relay()))
    assert first["agents"].tolist() == [[0, 0], [1, 0], [0, 0]]
    masks = [first["agent_mask"], *(step[0]["agent_mask"] for step in steps)]
    assert [mask.tolist() for mask in masks] == [
        [1, 1, 0],
        [1, 1, 1],
        [1, 0, 1],
        [1, 0, 1],
        [0] * 3,
    ]
    assert [step[1].tolist() for step in steps] == [[1, 1, 0], [2, 2, 2], [3, 0, 3], [4, 0, 4]]
    assert [step[2:4] for step in steps] == [(False, False)] * 3 + [(True, False)]
    assert [step[0]["state"].tolist() for step in steps] == [[1], [2], [3], [4]]
    assert steps[1][4] == {"a": {"t": 2}, "b": {"t": 2}, "c": {"t": 2}}
    # The agent that leaves is still observed, but nothing follows for it.
    assert steps[1][0]["agents"][1].tolist() == [1, 2]
    assert steps[2][0]["agents"][1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ends", "flags", "mask"),
    [
        (("truncated", "truncated"), (False, True), [1, 0, 1]),
        (("terminated", "truncated"), (False, True), [0, 0, 1]),
        (("terminated", "terminated"), (True, False), [0, 0, 0]),
    ],
)
def test_values_are_bootstrapped_for_agents_that_a_limit_cut_off(ends, flags, mask):
    obs, _, terminated, truncated, _ = play(ParallelEnvAdapter(Relay(ends=ends)))[-1]
    assert (terminated, truncated) == flags
    assert obs["agent_mask"].tolist() == mask


class TakingOver(Relay):
    """a leaves after step 2, where c joins, of which that step has an observation and no flags."""

    def step(self, actions):
        self.t += 1
        leaves = self.t in (2, 4)
        self.agents = ["c"] if self.t in (2, 3) else ["a"] if self.t == 1 else []
        flags = {agent: leaves for agent in actions}
        shown = list(dict.fromkeys([*actions, *self.agents]))
        return self._obs(shown), dict.fromkeys(actions, 1.0), flags, {}, self._infos(shown)


def test_an_agent_that_takes_over_as_the_last_other_leaves_continues_the_episode():
    env, game = ParallelEnvAdapter(TakingOver()), PettingZooAdapter(TakingOver())
    env.reset()
    steps = [env.step([0, 0, 0]) for _ in range(4)]
    assert [terminated for _, _, terminated, *_ in steps] == [False, False, False, True]
    assert [obs["agent_mask"].tolist() for obs, *_ in steps[1:]] == [[0, 0, 1]] * 2 + [[0, 0, 0]]
    game.reset()
    assert [game.step([0, 0, 0])[2] for _ in range(4)] == [False, False, False, True]


def test_action_masks_come_from_observations_and_infos():
    in_infos = ParallelEnvAdapter(Relay("infos"))
    obs, _ = in_infos.reset()
    assert obs["action_mask"].tolist() == [[1, 0], [1, 0], [1, 1]]
    assert in_infos.observation_space.contains(obs)
    steps = play(env := ParallelEnvAdapter(Relay("observations")))
    assert env.observation_space["agents"].shape == (3, 2)
    assert steps[0]["action_mask"].tolist() == [[0, 1], [0, 1], [1, 1]]
    # A mask that allows nothing, at the end of a game, allows everything.
    assert steps[-1][0]["action_mask"].tolist() == [[1, 1]] * 3
    assert all(env.observation_space.contains(step[0]) for step in steps[1:])


def test_without_masks_there_is_no_key():
    assert set(ParallelEnvAdapter(Relay("none")).reset()[0]) == {"agents", "agent_mask", "state"}


def test_env_managers_take_parallel_envs():
    with make_env_manager(Relay, env_num=2, env_kwargs={"masks": "none"}, seed=0) as envs:
        returns = []
        for _ in range(8):
            step = envs.step(envs.sample_actions())
            returns += [step.info.row(row) for row in np.flatnonzero(step.done)]
        assert len(returns) == 4
        assert {one["eval_episode_return_1"] for one in returns} == {3.0}
        assert {one["eval_episode_return"] for one in returns} == {np.float32(22 / 3)}


def test_simple_spread_steps_with_its_state_and_can_be_saved():
    make = mpe2_env()
    with (
        make_env_manager(make, env_num=2, seed=3) as envs,
        make_env_manager(make, env_num=2, seed=4) as others,
    ):
        assert {key: one.shape for key, one in envs.ready_obs.items()} == {
            "agents": (2, 3, 18), "agent_mask": (2, 3), "state": (2, 54),
        }  # fmt: skip
        envs.step(np.ones((2, 3), np.int64))
        assert others.load_state_dict(envs.state_dict())
        steps = [one.step(np.full((2, 3), 2)) for one in (envs, others)]
        assert np.array_equal(steps[0].next_obs["agents"], steps[1].next_obs["agents"])
        assert np.array_equal(steps[0].reward, steps[1].reward)


def mpe2_env():
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env


def test_agents_with_continuous_actions_act():
    with make_env_manager(mpe2_env(), env_num=1, env_kwargs={"continuous_actions": True}) as envs:
        assert envs.action_space.shape == (3, 5)
        assert envs.step(envs.sample_actions()).reward.shape == (1, 3)


def test_the_same_env_can_be_played_as_a_game():
    with BattleEnvManager([lambda: PettingZooAdapter(Relay("none"))], n_player=3) as games:
        assert games.to_move == {0: (0, 1)}


def test_an_image_is_rendered():
    env = ParallelEnvAdapter(Relay())
    assert env.render().shape == (2, 2, 3)
    env.close()


class Alone(Relay):
    possible_agents = ["a"]


class Different(Relay):
    def action_space(self, agent):
        return gym.spaces.Discrete(2 if agent == "a" else 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pettingzoo.make("aec", "classic/tictactoe-v3"), "takes a PettingZoo parallel env"),
        (Alone, "a single agent"),
        (Different, "different spaces"),
    ],
)
def test_what_is_no_team_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        ParallelEnvAdapter(make())
