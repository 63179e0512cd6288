"""Past versions of a policy as opponents."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import BattleEnv, OpponentEnv, make_env_manager
from dmiddleware.errors import CheckpointMismatch, ConfigError
from dmiddleware.policy import DQNPolicy, PPOPolicy, RecurrentPPOPolicy
from dmiddleware.rollout import OpponentPool, RolloutCollector
from tests.dmiddleware.env.test_opponent_env import Counting, tictactoe

MODEL = {"obs_shape": 2, "action_shape": 3, "encoder_hidden_sizes": [4]}


def policy_that_takes(action: int) -> DQNPolicy:
    policy = make_policy()
    head = policy.model.head[0]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.eye(3)[action])
    return policy


def make_policy() -> DQNPolicy:
    return DQNPolicy({"model": MODEL, "seed": 0})


def actions_of(pool: OpponentPool, n: int = 300, mask: Any = None) -> Counter[int]:
    rng = np.random.default_rng(0)
    obs = np.zeros(2, np.float32)
    return Counter(int(pool.act(pool.draw(rng), obs, mask, rng)) for _ in range(n))


def test_versions_are_drawn_uniformly_and_the_oldest_is_dropped() -> None:
    pool = OpponentPool(make_policy, size=2)
    learner = policy_that_takes(0)
    pool.add(learner)
    assert actions_of(pool, 5) == {0: 5}
    learner.collect_mode.load_state_dict(policy_that_takes(1).collect_mode.state_dict())
    assert actions_of(pool, 5) == {0: 5}, "a version does not follow the policy"
    pool.add(learner)
    counts = actions_of(pool)
    assert set(counts) == {0, 1}
    assert min(counts.values()) > 110
    pool.add(policy_that_takes(2))
    assert len(pool) == 2
    assert set(actions_of(pool)) == {1, 2}


def test_versions_with_a_memory_are_refused_where_nothing_keeps_it() -> None:
    def make() -> RecurrentPPOPolicy:
        return RecurrentPPOPolicy({"model": {"obs_shape": 2, "action_shape": 3}})

    pool = OpponentPool(make)
    pool.add(make())
    with pytest.raises(ConfigError, match="a recurrent state to act, but OpponentPool gives"):
        actions_of(pool, 1)


def test_a_version_with_a_memory_and_an_env_of_one_player_refuse_each_other_at_once() -> None:
    def make() -> RecurrentPPOPolicy:
        return RecurrentPPOPolicy({"model": {"obs_shape": 4, "action_shape": 2}})

    filled, empty = OpponentPool(make), OpponentPool(make)
    filled.add(make())
    with pytest.raises(ConfigError, match="a recurrent state to act, but OpponentPool gives"):
        OpponentEnv(Counting(), filled)
    env = OpponentEnv(Counting(), empty)
    with pytest.raises(ConfigError, match="a recurrent state to act, but OpponentPool gives"):
        empty.add(make())
    env.close()


def test_masks_that_are_not_in_observations_are_respected() -> None:
    pool = OpponentPool(make_policy)
    pool.add(policy_that_takes(1))
    assert actions_of(pool, 5, np.array([1, 0, 0])) == {0: 5}
    pool = OpponentPool(make_policy, policy_kwargs={"eps": 1.0})
    pool.add(policy_that_takes(1))
    assert set(actions_of(pool, 50, np.array([1, 0, 1]))) == {0, 2}


def test_a_pool_is_saved_with_all_versions() -> None:
    pool, other = OpponentPool(make_policy, size=3), OpponentPool(make_policy, size=3)
    for action in (0, 1, 2, 2):
        pool.add(policy_that_takes(action))
    other.load_state_dict(pool.state_dict())
    assert actions_of(other) == actions_of(pool)
    for one in (pool, other):
        one.add(policy_that_takes(0))  # in the place of the oldest
    assert actions_of(other) == actions_of(pool)
    with pytest.raises(CheckpointMismatch, match="3 opponents"):
        OpponentPool(make_policy, size=2).load_state_dict(pool.state_dict())


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy])
def test_policies_play_against_their_versions(cls: Any) -> None:
    def make() -> Any:
        return cls.for_env(OpponentEnv(tictactoe()), seed=0)

    policy, pool = make(), OpponentPool(make)
    pool.add(policy)
    with make_env_manager(lambda: OpponentEnv(tictactoe(), pool), env_num=4, seed=0) as envs:
        rows = RolloutCollector(policy, envs).collect(80)
    assert rows["done"].any()
    assert set(rows["reward"].unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_an_opponent_plays_in_a_game_of_its_own() -> None:
    pool = OpponentPool(make_policy)
    pool.add(policy_that_takes(2))
    env = OpponentEnv(Counting(), pool, seat=0)
    env.reset(seed=0)
    assert env.step(0)[0].tolist() == [4.0, 0.0]


def test_an_empty_pool_and_an_invalid_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        OpponentPool(make_policy).draw(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="size must be an integer ≥ 1"):
        OpponentPool(make_policy, size=0)


class LongGame(BattleEnv):
    """Players take turns until a given number of moves was made."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(3)
    n_player = 3

    def __init__(self, n_moves: int = 12) -> None:
        self.n_moves = n_moves

    def reset(self, seed: int | None = None) -> Any:
        self.moves: list[tuple[int, int]] = []
        return [np.zeros(2, np.float32)] * 3

    def to_move(self) -> tuple[int, ...]:
        return (len(self.moves) % 3,)

    def action_mask(self, player: int) -> Any:
        return None

    def step(self, actions: Any) -> Any:
        (player,) = self.to_move()
        self.moves.append((player, int(actions[player])))
        over = len(self.moves) >= self.n_moves
        return [np.zeros(2, np.float32)] * 3, [0.0] * 3, over, False, [{}] * 3


def actions_by_opponent(game: LongGame) -> dict[int, set[int]]:
    """Return the different actions that each opponent took in the present game."""
    return {
        player: {action for mover, action in game.moves if mover == player} for player in (1, 2)
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_opponent_stays_the_same_to_the_end_of_its_game(size: int) -> None:
    pool, games = OpponentPool(make_policy, size=size), [LongGame() for _ in range(3)]
    pool.add(policy_that_takes(0))
    envs = [OpponentEnv(game, pool, seat=0) for game in games]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    for action in (1, 2, 1):
        for env in envs:
            env.step(0)
        pool.add(policy_that_takes(action))
        assert len(pool) <= size
    for game, env in zip(games, envs, strict=True):
        env.step(0)
        assert set(map(len, actions_by_opponent(game).values())) == {1}
        assert actions_by_opponent(game) == {1: {0}, 2: {0}}
        env.reset()
        env.step(0)
    if size == 1:
        assert all(actions_by_opponent(game) == {1: {1}, 2: {1}} for game in games)


def n_kept(pool: OpponentPool) -> int:
    state = pool.state_dict()
    return len(state["versions"]) + len(state["older"])


def test_a_version_is_dropped_after_its_last_game() -> None:
    pool = OpponentPool(make_policy, size=1)
    pool.add(policy_that_takes(0))
    playing, crashed, closed = (OpponentEnv(LongGame(), pool, seat=0) for _ in range(3))
    for env in (playing, crashed, closed):
        env.reset(seed=0)
        pool.add(policy_that_takes(1))
    assert n_kept(pool) == 4, "the present one, and those of three games"
    closed.close()
    del crashed, env
    gc.collect()
    pool.add(policy_that_takes(2))
    assert n_kept(pool) == 2
    playing.reset()
    for _ in range(5):
        pool.add(policy_that_takes(2))
    assert n_kept(pool) == 2


def test_whoever_draws_a_version_without_an_env_keeps_it() -> None:
    pool = OpponentPool(make_policy, size=2)
    pool.add(policy_that_takes(0))
    rng, obs = np.random.default_rng(0), np.zeros(2, np.float32)
    number = pool.draw(rng)
    for action in (1, 2, 1, 2):
        pool.add(policy_that_takes(action))
        assert pool.act(number, obs, None, np.random.default_rng(1)) == 0


def test_games_continue_against_dropped_versions_after_a_resume() -> None:
    def started(seed: int) -> tuple[OpponentPool, LongGame, Any]:
        pool, game = OpponentPool(make_policy, size=2), LongGame(30)
        pool.add(policy_that_takes(0))
        return (
            pool,
            game,
            make_env_manager(lambda: OpponentEnv(game, pool, seat=0), env_num=1, seed=seed),
        )

    pool, _, envs = started(0)
    with envs:
        envs.step(np.array([0]))
        for action in (1, 2, 1):
            pool.add(policy_that_takes(action))
        state = {"pool": pool.state_dict(), "envs": envs.state_dict()}
    pool, game, envs = started(9)
    with envs:
        pool.add(policy_that_takes(2))
        pool.load_state_dict(state["pool"])
        assert envs.load_state_dict(state["envs"])
        assert len(pool) == 2
        for action in (2, 2):
            envs.step(np.array([0]))
            pool.add(policy_that_takes(action))
        envs.step(np.array([0]))
        assert actions_by_opponent(game) == {1: {0}, 2: {0}}
    assert envs.closed


def test_a_pool_that_was_saved_without_numbers_can_be_loaded() -> None:
    pool, other = OpponentPool(make_policy, size=3), OpponentPool(make_policy, size=3)
    for action in (0, 1, 2, 2):
        pool.add(policy_that_takes(action))
    state = pool.state_dict()
    other.load_state_dict({name: state[name] for name in ("n_added", "versions")})
    for one in (pool, other):
        one.add(policy_that_takes(0))
    assert actions_of(other) == actions_of(pool)
    assert other.act(1, np.zeros(2, np.float32), None, np.random.default_rng(0)) in (0, 2)
