"""Masked policies play PettingZoo's board games through the battle collectors."""

from __future__ import annotations

import pettingzoo
import pytest

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import PettingZooAdapter
from dmiddleware.model import action_mask_of
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.worker import BattleEpisodeSerialCollector


@pytest.mark.parametrize("name", ["tictactoe-v3", "connect_four-v3"])
def test_board_games_never_see_a_forbidden_action(name, tmp_path):
    def make():
        return PettingZooAdapter(pettingzoo.make("aec", f"classic/{name}"), flatten=True)

    games = BattleEnvManager([make] * 2, seed=0)
    players = [DQNPolicy.for_env(games, seed=0), PPOPolicy.for_env(games, seed=1)]
    with BattleEpisodeSerialCollector({}, games, players, exp_name=str(tmp_path)) as collector:
        data, infos = collector.collect(6, policy_kwargs=[{"eps": 0.5}, {}])
    for mine, theirs in zip(*infos, strict=True):
        assert mine["eval_episode_return"] == -theirs["eval_episode_return"]
    for player, episodes in enumerate(data):
        for episode, info in zip(episodes, infos[player], strict=True):
            for row in episode:
                assert action_mask_of(row["obs"])[int(row["action"])]
            rewards = [float(row["reward"]) for row in episode]
            assert sum(rewards) == info["eval_episode_return"]
            assert [bool(row["terminated"]) for row in episode] == [False] * (len(rewards) - 1) + [
                True
            ]
