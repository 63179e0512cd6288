"""Games whose observations count, for tests of what plays them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import BattleEnv


class Together(BattleEnv):
    """All players move at the same time, for ``lengths`` steps, over and over again.

    An observation is (game, player, episode, step). Player p gets the reward ``rewards[p]`` in each
    step. Episodes with an even number terminate, the others are truncated. The game raises at each
    ``(episode, step)`` in ``crashes``.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, index=0, lengths=(3,), rewards=(1.0, -1.0), crashes=()):
        self.index, self.lengths, self.rewards = index, tuple(lengths), tuple(rewards)
        self.crashes = set(crashes)
        self.n_player = len(rewards)
        self.episode, self.t, self.taken = -1, 0, []

    def _obs(self):
        return [
            np.array([self.index, player, self.episode, self.t], np.float32)
            for player in range(self.n_player)
        ]

    def reset(self, seed=None):
        self.seed = seed
        self.episode, self.t = self.episode + 1, 0
        return self._obs()

    def step(self, actions):
        if (self.episode, self.t) in self.crashes:
            raise RuntimeError("a crash for the test")
        self.taken = [*self.taken[-9:], list(actions)]
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        ends = over and self.episode % 2 == 0
        infos = [{"player": player} for player in range(self.n_player)]
        return self._obs(), list(self.rewards), ends, over and not ends, infos


class InTurns(Together):
    """The players move in turn, player 0 first; each step gives player p the reward 10**p."""

    def __init__(self, index=0, lengths=(3,), n_player=2, crashes=()):
        super().__init__(index, lengths, tuple(10.0**p for p in range(n_player)), crashes)

    def to_move(self):
        return (self.t % self.n_player,)


def battle_envs(kind=Together, n_game=2, n_player=2, **options):
    """Return a manager of games; ``crashes`` applies to the first one, until it is restarted.

    A restarted game counts its episodes from 100.
    """
    crashes, keeps_crashing = options.pop("crashes", ()), options.pop("keeps_crashing", False)
    max_retry = options.pop("max_retry", 3)
    if issubclass(kind, InTurns):
        options["n_player"] = n_player
    built = set()

    def build(index):
        is_first = index not in built
        built.add(index)
        own = crashes if index == 0 and (is_first or keeps_crashing) else ()
        game = kind(index, crashes=own, **options)
        if not is_first and not keeps_crashing:
            game.episode = 99
        return game

    env_fns = [lambda index=index: build(index) for index in range(n_game)]
    return BattleEnvManager(env_fns, n_player, max_retry=max_retry)
