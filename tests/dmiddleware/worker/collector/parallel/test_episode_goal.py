"""How many episodes the envs of a parallel collector play."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dmiddleware.env import SyncEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.worker.collector.parallel.episode_goal import EpisodeGoal
from tests.dmiddleware.battle_envs import battle_envs
from tests.dmiddleware.counting_env import CountingEnv


def test_the_envs_are_done_when_each_has_finished_its_episodes():
    make = functools.partial(CountingEnv, lengths=(3,))
    with SyncEnvManager([make] * 3, seed=5) as manager:
        goal = EpisodeGoal(manager, 2)
        for _ in range(6):
            assert not goal.done
            manager.step(np.zeros(3, np.int64))
        assert goal.done
        assert not EpisodeGoal(manager).done


def test_the_games_are_done_when_each_has_finished_its_episodes():
    with battle_envs(lengths=(2,)) as games:
        goal = EpisodeGoal(games, 2)
        for _ in range(4):
            assert not goal.done
            games.step({0: [0, 0]})
        assert goal.unfinished == [1]
        for _ in range(4):
            games.step({1: [0, 0]})
        assert goal.done


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "2"])
def test_an_invalid_number_of_episodes_is_refused(value):
    with pytest.raises(ConfigError, match="episode_num"):
        EpisodeGoal(SyncEnvManager([CountingEnv]), value)
