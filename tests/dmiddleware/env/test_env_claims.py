"""No env object is stepped as two envs."""

import contextlib
import functools

import gymnasium as gym
import numpy as np
import pytest
from strange_envs import Fragile, Walk

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import (
    AsyncEnvManager,
    BattleEnv,
    OpponentEnv,
    PettingZooAdapter,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.errors import EnvProtocolError

SAME = "steps the same object"


class Counting(Walk):
    """Counts how often it is closed."""

    n_closed = 0

    def close(self):
        self.n_closed += 1


class Holder(gym.Env):
    """An adapter that is not a gymnasium.Wrapper."""

    def __init__(self, env):
        self.inner = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed)

    def step(self, action):
        return self.inner.step(action)


class Matching(BattleEnv):
    """A game of one move."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None):
        return [0, 0]

    def step(self, actions):
        return [1, 1], [0.0, 0.0], True, False, [{}, {}]


def as_it_is(env):
    return lambda: env


def wrapped(env):
    return lambda: gym.wrappers.TimeLimit(gym.wrappers.RecordEpisodeStatistics(env), 5)


def held(env):
    return lambda: Holder(env)


def rock_paper_scissors():
    return pytest.importorskip("pettingzoo").make("parallel", "classic/rps-v2")


def sync(env_fn, n):
    return make_env_manager(env_fn, env_num=n)


def in_vector(env_fn, n):
    return VectorEnvManager(lambda: gym.vector.SyncVectorEnv([env_fn] * n), n)


def in_one_process(env_fn, n):
    return AsyncEnvManager([env_fn] * n, envs_per_process=n)


@pytest.mark.parametrize("make", [sync, in_vector, in_one_process])
@pytest.mark.parametrize("given", [as_it_is, wrapped, held])
def test_one_env_is_not_stepped_as_several(make, given):
    manager = make(given(Walk()), 3)
    with pytest.raises(EnvProtocolError, match=f"env 1 {SAME} .a Walk. as env 0"):
        manager.launch()
    assert manager.closed


def test_each_env_may_be_given_to_a_single_place():
    with SyncEnvManager([as_it_is(Walk()), wrapped(Walk()), held(Walk())]) as manager:
        assert len(manager.step(np.zeros(3, int))) == 3


def test_a_copy_in_another_process_is_another_env():
    with AsyncEnvManager([as_it_is(Walk())] * 2) as manager:
        assert len(manager.step(np.zeros(2, int))) == 2


def test_the_agents_of_a_pettingzoo_env_are_stepped_in_one_place():
    env = rock_paper_scissors()
    with pytest.raises(EnvProtocolError, match=SAME):
        make_env_manager(lambda: env, env_num=2).launch()
    with make_env_manager(lambda: env, env_num=1):
        with pytest.raises(EnvProtocolError, match="of another manager that is open"):
            make_env_manager(lambda: env, env_num=1).launch()
        with pytest.raises(EnvProtocolError, match="of another manager that is open"):
            BattleEnvManager([lambda: PettingZooAdapter(env)]).launch()


def test_a_game_is_played_in_one_place():
    game = Matching()
    with pytest.raises(EnvProtocolError, match=SAME):
        BattleEnvManager([lambda: game] * 2).launch()
    with BattleEnvManager([lambda: game]):
        with pytest.raises(EnvProtocolError, match=f"{SAME} .a Matching. as env 0 of another"):
            make_env_manager(lambda: OpponentEnv(game), env_num=1).launch()
        with pytest.raises(EnvProtocolError, match=SAME):
            _ = BattleEnvManager([lambda: game]).action_space


def one_vector(env):
    vector = gym.vector.SyncVectorEnv([lambda: env])
    return functools.partial(VectorEnvManager, lambda: vector, 1)


def one_sync(env):
    return functools.partial(make_env_manager, wrapped(env), env_num=1)


@pytest.mark.parametrize("first", [one_sync, one_vector])
@pytest.mark.parametrize("second", [one_sync, one_vector])
@pytest.mark.parametrize("use", [lambda manager: manager.launch(), lambda m: m.action_space])
def test_a_second_manager_leaves_an_env_in_use_alone(first, second, use):
    env = Counting()
    with first(env)() as manager:
        with pytest.raises(EnvProtocolError, match="another manager that is open"):
            use(second(env)())
        assert env.n_closed == 0
        assert manager.step(np.ones(1, int)).next_obs[0, :2].tolist() == [1, 1]


@pytest.mark.parametrize("end", ["close", "failure", "loss"])
def test_an_env_that_is_no_longer_in_use_may_be_used_again(end):
    env = Walk()
    manager = make_env_manager(lambda: env, env_num=1)
    if end == "close":
        with manager:
            pass
    elif end == "failure":
        with contextlib.suppress(EnvProtocolError):
            SyncEnvManager([lambda: env, lambda: env]).launch()
    else:
        manager.launch()
        manager = None
    with make_env_manager(lambda: env, env_num=1) as again:
        assert len(again.step(np.zeros(1, int))) == 1


def test_an_env_that_failed_may_be_given_again(tmp_path):
    env = Fragile(at=2, once=tmp_path / "failed")
    with make_env_manager(lambda: env, env_num=1) as manager:
        for _ in range(3):
            manager.step(np.zeros(1, int))
        assert manager.restarts == 1


def test_a_vector_env_is_stepped_in_one_place():
    vector = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with VectorEnvManager(lambda: vector, 2) as manager:
        with pytest.raises(EnvProtocolError, match=SAME):
            VectorEnvManager(lambda: vector, 2).launch()
        assert len(manager.step(np.zeros(2, int))) == 2
