"""What an env fills again after it returned it does not change what was returned.

The same env is played twice: once it returns copies, and once the same objects every time.
"""

import copy
import functools
from collections import namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from strange_envs import LIMIT, Refilling

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import (
    AsyncEnvManager,
    BattleEnv,
    OpponentEnv,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.env.batching import own_copy
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rollout import RolloutCollector


class RefillingVector(gym.vector.VectorEnv):
    """Steps three envs, and returns the same arrays every time, if it shares them."""

    num_envs = 3

    def __init__(self, mode, *, shares=True, continuous=False):
        self.metadata = {"autoreset_mode": mode}
        self.mode, self.shares = mode, shares
        one = Refilling(nested=False, continuous=continuous)
        self.single_observation_space = one.observation_space
        self.single_action_space = one.action_space
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 3)
        self.obs, self.final = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
        self.reward, self.done = np.zeros(3), np.zeros(3, np.bool_)
        self.terminated = np.zeros(3, np.bool_)
        self.mask, self.words = np.ones((3, 3), np.int8), np.empty(3, object)
        self.info = {"action_mask": self.mask, "words": self.words, "deep": {"x": self.obs}}
        if continuous:
            del self.info["action_mask"]
        self.at, self.n_filled = np.zeros(3, int), 0

    def reset(self, *, seed=None, options=None):
        mask = np.ones(3, bool) if options is None else options["reset_mask"]
        self.at[mask] = 0
        self.done[mask] = False
        self.fill()
        return self.out(self.obs), self.out(self.info)

    def step(self, actions):
        resets = self.done.copy() if self.mode is AutoresetMode.NEXT_STEP else self.done & False
        self.at = np.where(resets, 0, self.at + np.array([1, 1, 2]))
        self.fill()
        if actions.dtype == np.float32:
            actions *= 0
        self.done[:] = self.at >= LIMIT
        info = self.info
        if self.mode is AutoresetMode.SAME_STEP and self.done.any():
            self.final[:] = self.obs
            final_info = {"n": self.obs[:, 0], "_n": self.done}
            info = {**info, "final_obs": self.final, "final_info": final_info}
            self.at[self.done] = 0
            flags, info = self.done.copy(), copy.deepcopy(info)
            self.fill()
            return tuple(map(self.out, (self.obs, self.reward, self.terminated, flags, info)))
        return tuple(map(self.out, (self.obs, self.reward, self.terminated, self.done, info)))

    def fill(self):
        self.n_filled += 1
        self.obs[:] = self.n_filled
        self.reward[:] = self.n_filled
        self.mask[:] = self.n_filled % 2, 1, (self.n_filled + 1) % 2
        for row in range(3):
            self.words[row] = [self.n_filled]

    def out(self, value):
        return value if self.shares else copy.deepcopy(value)


def sync(**kwargs):
    return SyncEnvManager([functools.partial(Refilling, **kwargs)] * 2)


def in_wrappers(**kwargs):
    def make():
        return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(Refilling(**kwargs)), 3)

    return SyncEnvManager([make] * 2)


def in_process(**kwargs):
    return AsyncEnvManager([functools.partial(Refilling, **kwargs)] * 2, envs_per_process=2)


def sync_vector(mode, **kwargs):
    env_fns = [functools.partial(Refilling, **kwargs)] * 2
    return VectorEnvManager(lambda: gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode), 2)


def vector(mode, **kwargs):
    kwargs.pop("nested", None)
    return VectorEnvManager(functools.partial(RefillingVector, mode, **kwargs), 3)


NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MANAGERS = [
    sync,
    in_wrappers,
    in_process,
    # Gymnasium's SAME_STEP does not copy the final observation before the reset.
    functools.partial(sync_vector, NEXT),
    functools.partial(sync_vector, DISABLED),
    functools.partial(vector, NEXT),
    functools.partial(vector, SAME),
    functools.partial(vector, DISABLED),
]


def tape(manager, n_steps=3 * LIMIT):
    """Return everything that a manager returned, read after the last step."""
    with manager:
        seen = [(manager.ready_obs, manager.ready_info)]
        steps = []
        for _ in range(n_steps):
            steps.append(manager.step(np.zeros(manager.env_num, int)))
            seen.append((manager.ready_obs, manager.ready_info))
        names = ("ready_obs", "next_obs", "reward", "done", "terminated", "truncated", "valid")
        return [
            *({name: getattr(step, name) for name in names} for step in steps),
            *(step.info.rows() for step in steps),
            *((obs, info.rows()) for obs, info in seen),
        ]


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("nested", [True, False])
def test_results_are_those_of_an_env_that_returns_copies(make, nested):
    shared, copied = (tape(make(nested=nested, shares=shares)) for shares in (True, False))
    np.testing.assert_equal(shared, copied)


@pytest.mark.parametrize("make", MANAGERS)
def test_collected_rows_are_those_of_an_env_that_returns_copies(make):
    found = []
    for shares in (True, False):
        with make(nested=False, shares=shares) as manager:
            policy = DQNPolicy.for_env(manager, seed=0)
            collector = RolloutCollector(policy, manager)
            batch = collector.collect(8 * manager.env_num, policy_kwargs={"eps": 0.5})
            found.append({key: batch[key] for key in batch if key != "episode_id"})
    assert found[0].keys() == found[1].keys()
    assert "next_action_mask" in found[0]
    for key, column in found[0].items():
        torch.testing.assert_close(column, found[1][key])


@pytest.mark.parametrize("make", MANAGERS)
def test_an_env_may_write_to_its_action(make):
    with make(nested=False, continuous=True) as manager:
        policy = PPOPolicy.for_env(manager, seed=0, model={"action_space": "continuous"})
        batch = RolloutCollector(policy, manager).collect(2 * manager.env_num)
        assert batch["action"].abs().min() > 0


class RefillingGame(BattleEnv):
    """A game that returns the same lists and arrays every time, if it shares them."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, *, shares=True):
        self.shares = shares
        self.obs = [np.zeros(2, np.float32) for _ in range(2)]
        self.infos = [{"where": self.obs[player], "list": []} for player in range(2)]
        self.rewards, self.mask, self.n_filled = np.zeros(2), np.ones(3, np.int8), 0

    def reset(self, seed=None):
        self.at = 0
        self.fill()
        return self.out(self.obs)

    def step(self, actions):
        self.at += 1
        self.fill()
        result = (self.obs, self.rewards, self.at == LIMIT, False, self.infos)
        return tuple(map(self.out, result))

    def action_mask(self, player):
        return self.out(self.mask)

    def fill(self):
        self.n_filled += 1
        for player in range(2):
            self.obs[player][:] = self.n_filled + player
            self.infos[player]["n"] = self.n_filled
            self.infos[player]["list"].append(self.n_filled)
        self.rewards[:] = self.n_filled
        self.mask[:] = self.n_filled % 2, 1, (self.n_filled + 1) % 2

    def out(self, value):
        return value if self.shares else copy.deepcopy(value)


def test_the_results_of_games_are_those_of_a_game_that_returns_copies():
    found = []
    for shares in (True, False):
        with BattleEnvManager([functools.partial(RefillingGame, shares=shares)]) as manager:
            seen, steps = [manager.ready_obs], []
            for _ in range(3 * LIMIT):
                steps.append(manager.step({0: [0, 1]})[0])
                seen.append(manager.ready_obs)
            found.append((seen, [(one.obs, one.reward, one.info, one.done) for one in steps]))
    np.testing.assert_equal(*found)


def test_a_game_from_one_seat_is_that_of_a_game_that_returns_copies():
    def make(shares):
        return make_env_manager(
            lambda: OpponentEnv(RefillingGame(shares=shares), seat=0), env_num=2, seed=0
        )

    np.testing.assert_equal(tape(make(True)), tape(make(False)))


def test_the_agents_of_a_pettingzoo_env_may_share_what_they_return():
    pettingzoo = pytest.importorskip("pettingzoo")

    class Agents(pettingzoo.ParallelEnv):
        metadata = {"name": "agents"}
        possible_agents = ["a", "b"]

        def __init__(self, shares):
            self.game, self.agents = RefillingGame(shares=shares), []

        def observation_space(self, agent):
            return RefillingGame.observation_space

        def action_space(self, agent):
            return RefillingGame.action_space

        def reset(self, seed=None, options=None):
            self.agents = ["a", "b"]
            obs = self.game.reset()
            return self.named(obs), self.infos()

        def step(self, actions):
            obs, rewards, terminated, _, _ = self.game.step([])
            flags = self.named([terminated] * 2)
            if terminated:
                self.agents = []
            return (
                self.named(obs), self.named(rewards), flags,
                self.named([False] * 2), self.infos(),
            )  # fmt: skip

        def infos(self):
            masked = [{**info, "action_mask": self.game.mask} for info in self.game.infos]
            return self.named(self.game.out(masked))

        def named(self, values):
            return dict(zip("ab", values, strict=True))

    def tape_of(shares):
        manager = make_env_manager(lambda: Agents(shares), env_num=1)
        with manager:
            steps = [manager.step(np.zeros((1, 2), int)) for _ in range(3 * LIMIT)]
        return [(one.ready_obs, one.next_obs, one.reward, one.info.rows()) for one in steps]

    np.testing.assert_equal(tape_of(True), tape_of(False))


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": [np.zeros(2), {"b": np.zeros(1)}]},
        lambda: Pair(np.zeros(2), [1]),
        lambda: np.array([{"a": np.zeros(1)}, [2], None], object),
        lambda: (torch.zeros(2), {1, 2}),
        lambda: bytearray(b"ab"),
    ],
)
def test_a_copy_shares_nothing_that_can_change(make):
    def change(value):
        if isinstance(value, dict):
            change(list(value.values()))
            value["new"] = 0
        elif isinstance(value, list | tuple):
            for item in value:
                change(item)
        elif isinstance(value, np.ndarray) and value.dtype == object:
            change(value.tolist())
            value[:] = None
        elif isinstance(value, np.ndarray | torch.Tensor):
            value += 1
        elif isinstance(value, set | bytearray):
            value.clear()

    value = make()
    copied = own_copy(value)
    assert type(copied) is type(value)
    change(value)
    assert str(copied) == str(make())
