"""Games of teams as one env."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest

from dmiddleware.env import GameEnv, make_env_manager
from dmiddleware.env.game_env import agents_of_teams
from dmiddleware.errors import ConfigError, EnvProtocolError, SpaceError
from tests.dmiddleware.env.optional import needed
from tests.dmiddleware.env.test_parallel_env import Relay
from tests.dmiddleware.team_games import Auction, Duel

needed("mpe2")

AGENTS = ["red_0", "red_1", "blue_0"]


@pytest.mark.parametrize(
    ("teams", "word"),
    [
        ({"red": ["red_*", "blue_0"], "blue": ["blue_*"]}, "'blue_0' is in two teams"),
        ({"red": ["red_0"], "blue": ["blue_0"]}, "no team has the agent 'red_1'"),
        ({"red": ["red_*"], "blue": ["blue_1"]}, "'blue_1', which matches no agent"),
        ({"red": ["red_*"], "blue": ["green_*"]}, "'green_\\*', which matches no agent"),
        ({"red": ["red_*"], "blue": []}, "team 'blue' has the agents \\[\\]"),
        ({"red": ["red_*"], "blue": 3}, "team 'blue' has the agents 3"),
        ({3: ["red_*"], "blue": ["blue_0"]}, "team 3"),
        ([["red_*"], ["blue_0"]], "teams must be a dictionary"),
        ({}, "teams must be a dictionary"),
    ],
)
def test_a_map_that_does_not_divide_the_agents_is_an_error(teams, word):
    with pytest.raises(ConfigError, match=word):
        agents_of_teams(teams, AGENTS)


def test_names_and_patterns_divide_the_agents():
    teams = {"blue": "blue_?", "red": ["red_1", "red_*"]}
    assert agents_of_teams(teams, AGENTS) == {"blue": ("blue_0",), "red": ("red_0", "red_1")}
    # A name that an agent has is not read as a pattern, and agents may be numbers.
    assert agents_of_teams({"a": ["x[1]"], "b": ["x1"]}, ["x[1]", "x1"])["a"] == ("x[1]",)
    assert agents_of_teams({"a": ["1"], "b": [2]}, [1, 2]) == {"a": (1,), "b": (2,)}


def test_agents_of_one_team_have_the_same_spaces():
    with pytest.raises(ConfigError, match=r"'red_0' and 'blue_0' of team 'all'.*two teams"):
        GameEnv(Duel(), {"all": "*"})


def test_what_is_no_game_is_an_error():
    with pytest.raises(ConfigError, match="not a game of several agents"):
        GameEnv(gym.make("CartPole-v1"), {"all": "*"})


def test_an_observation_says_who_acts_and_a_step_what_became_of_each():
    env = GameEnv(Relay("infos"), {"left": ["a", "b"], "right": ["c"]})
    obs, _ = env.reset(seed=0)
    assert obs["agent_mask"].tolist() == [1, 1, 0]
    assert obs["action_mask"]["left"].tolist() == [[1, 0], [1, 0]]
    assert obs["action_mask"]["right"].tolist() == [[1, 1]]
    moves = {"left": (1, 1), "right": (1,)}
    steps = [env.step(moves) for _ in range(4)]
    assert [step[0]["agent_mask"].tolist() for step in steps] == [
        [1, 1, 1],
        [1, 0, 1],
        [1, 0, 1],
        [0, 0, 0],
    ]
    assert [step[1].tolist() for step in steps] == [[1, 1, 0], [2, 2, 2], [3, 0, 3], [4, 0, 4]]
    flags = [np.concatenate([step[0]["flags"][team] for team in env.teams]) for step in steps]
    going, gone, away = [1, 0, 0], [1, 1, 0], [0, 0, 0]
    assert [flag.tolist() for flag in flags] == [
        [going, going, away],
        [going, gone, going],
        [going, away, going],
        [gone, away, gone],
    ]
    assert [step[2:4] for step in steps] == [(False, False)] * 3 + [(True, False)]
    assert steps[1][4] == {"a": {"t": 2}, "b": {"t": 2}, "c": {"t": 2}}
    assert all(env.observation_space.contains(step[0]) for step in steps)


def test_a_game_that_cuts_an_agent_off_is_truncated():
    env = GameEnv(Relay("none", ends=("terminated", "truncated")), {"left": "[ab]", "right": "c"})
    env.reset()
    *_, last = [env.step({"left": (0, 0), "right": (0,)}) for _ in range(4)]
    assert last[2:4] == (False, True)
    assert last[0]["flags"]["right"].tolist() == [[1, 0, 1]]


def test_a_turn_lasts_from_an_action_to_the_next_one_and_sums_the_rewards():
    env = GameEnv(Auction(), {"first": "a", "others": ["b", "c"]})
    assert env.takes_turns
    obs, _ = env.reset(seed=0)
    moves = {"first": (0,), "others": (0, 0)}
    rewards, masks, closed = [], [obs["agent_mask"].tolist()], []
    for _ in range(5):
        obs, reward, terminated, truncated, _ = env.step(moves)
        rewards.append(reward.tolist())
        masks.append(obs["agent_mask"].tolist())
        closed.append([int(row[0]) for team in env.teams for row in obs["flags"][team]])
    # b leaves where its turn would come, and not before: what the others do still pays it.
    assert masks == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert closed == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 0, 1]]
    assert rewards == [[0, 0, 0], [0, 0, 0], [111, 0, 0], [0, 112, 112], [101, 0, 100]]
    assert (terminated, truncated) == (True, False)
    # With what came before an agent's first move, each has what it got in the whole game.
    assert np.sum(rewards, axis=0).tolist() == env.get_wrapper_attr("paid")


def test_masks_need_discrete_actions():
    class Masked(Duel):
        def reset(self, seed=None, options=None):
            obs, _ = super().reset(seed=seed)
            return obs, {agent: {"action_mask": np.ones(2)} for agent in obs}

    with pytest.raises(SpaceError, match="team 'blue' have action masks"):
        GameEnv(Masked(), {"red": "red_*", "blue": "blue_*"})


def test_one_flag_for_all_agents_ends_the_game_of_all():
    class Gymnasium(Duel):
        def step(self, actions):
            obs, rewards, terminated, truncated, infos = super().step(actions)
            return obs, rewards, any(terminated.values()), any(truncated.values()), infos

    env = GameEnv(Gymnasium(), {"red": "red_*", "blue": "blue_*"})
    env.reset(seed=0)
    moves = {"red": (0, 0), "blue": (np.zeros(2, np.float32),)}
    ends = [env.step(moves)[2:4] for _ in range(Duel.length)]
    assert ends == [(False, False)] * (Duel.length - 1) + [(True, False)]


def test_unknown_agents_and_a_game_in_which_nobody_acts_are_errors():
    class Stranger(Duel):
        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            return obs, {**rewards, "green_0": 1.0}, *rest

    class Silent(Duel):
        agents = ("red_0",)

        def step(self, actions):
            return {}, {}, {}, {}, {}

    moves = {"red": (0, 0), "blue": (np.zeros(2, np.float32),)}
    for game, word in ((Stranger, "'green_0'"), (Silent, "observation of none")):
        env = GameEnv(game(), {"red": "red_*", "blue": "blue_*"})
        env.reset(seed=0)
        with pytest.raises(EnvProtocolError, match=word):
            env.step(moves)


def test_env_managers_step_games_in_processes_too():
    def make():
        return GameEnv(Duel(), {"red": "red_*", "blue": "blue_*"})

    batches = []
    for mode in ("sync", "async"):
        with make_env_manager(make, env_num=2, mode=mode, seed=3) as envs:
            step = [envs.step(envs.sample_actions()) for _ in range(4)][-1]
            batches.append((step.reward, step.next_obs["agents"]["red"][0]))
    for first, second in zip(*batches, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["classic/tictactoe-v3", "classic/rps-v2"])
def test_pettingzoos_turn_based_games_are_played_to_their_ends(name):
    env = GameEnv(pettingzoo.make("aec", name), {"one": "player_*1", "rest": "player_*[02]"})
    rng = np.random.default_rng(0)
    for _ in range(3):
        obs, _ = env.reset(seed=1)
        total, over = np.zeros(2), False
        while not over:
            masks = obs.get("action_mask", {})
            moves = {
                team: tuple(
                    int(rng.choice(np.flatnonzero(masks[team][row]) if team in masks else 3))
                    for row in range(1)
                )
                for team in env.teams
            }
            obs, reward, terminated, truncated, _ = env.step(moves)
            total, over = total + reward, terminated or truncated
        assert total.sum() == 0 and all(
            flag[0] for flag in np.concatenate([*obs["flags"].values()])
        )
