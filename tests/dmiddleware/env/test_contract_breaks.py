"""An env that breaks Gymnasium's interface is named once, and not restarted like one that crashed.

The same breaks are tried in every manager, with and without Gymnasium's wrappers.
"""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from strange_envs import Fragile, Odd, Walk

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import (
    AsyncEnvManager,
    BattleEnv,
    OpponentEnv,
    ParallelEnvAdapter,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.errors import ConfigError, EnvCrashed, EnvProtocolError, RegistryError


def in_wrappers(env_fn):
    wrappers = gym.wrappers
    return lambda: wrappers.TimeLimit(wrappers.RecordEpisodeStatistics(env_fn()), 50)


def sync(env_fn):
    return SyncEnvManager([Walk, env_fn], seed=0)


def alone(env_fn):
    return SyncEnvManager([env_fn], seed=0)


def wrapped(env_fn):
    return SyncEnvManager([Walk, in_wrappers(env_fn)], seed=0)


def in_process(env_fn):
    return AsyncEnvManager([env_fn], seed=0)


def vector(env_fn):
    return VectorEnvManager(lambda: gym.vector.SyncVectorEnv([env_fn]), 1, seed=0)


def vector_reset_by_mask(env_fn):
    mode = gym.vector.AutoresetMode.DISABLED
    return VectorEnvManager(
        lambda: gym.vector.SyncVectorEnv([env_fn], autoreset_mode=mode), 1, seed=0
    )


def play(manager):
    with manager:
        for _ in range(2 * Odd.limit):
            manager.step(manager.sample_actions())


STEPS = {
    "four values": lambda obs, reward, terminated, truncated, info: (obs, reward, truncated, info),
    "six values": lambda *result: (*result, 0),
    "nothing": lambda *result: None,
    "no info": lambda obs, reward, terminated, truncated, info: (obs, reward, 0, 0, None),
    "a list of infos": lambda obs, reward, terminated, truncated, info: (obs, reward, 0, 0, [{}]),
    "no reward": lambda obs, reward, *rest: (obs, None, *rest),
    "two rewards": lambda obs, reward, *rest: (obs, [1.0, 2.0], *rest),
    "a short observation": lambda obs, *rest: (obs[:2], *rest),
    "a batch": lambda obs, *rest: (obs[None], *rest),
    "a dictionary": lambda obs, *rest: ({"obs": obs}, *rest),
    "no observation": lambda obs, *rest: (None, *rest),
    "two flags": lambda obs, reward, terminated, *rest: (obs, reward, np.ones(2, bool), *rest),
}
RESETS = {
    "only an observation": lambda obs, info: obs,
    "nothing": lambda obs, info: None,
    "three values": lambda obs, info: (obs, info, 0),
    "a short observation": lambda obs, info: (obs[:2], info),
}
MANAGERS = [sync, wrapped, vector, vector_reset_by_mask]


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_breaks_the_interface_is_not_retried(make, what):
    manager = make(functools.partial(Odd, step=STEPS[what]))
    with pytest.raises(EnvProtocolError, match="env"):
        play(manager)
    assert manager.closed
    assert manager.restarts == 0


@pytest.mark.parametrize("make", MANAGERS)
@pytest.mark.parametrize("what", RESETS)
def test_a_reset_that_breaks_the_interface_is_not_retried(make, what):
    manager = make(functools.partial(Odd, reset=RESETS[what]))
    with pytest.raises(EnvProtocolError, match="env"):
        play(manager)
    assert manager.closed
    assert manager.restarts == 0


@pytest.mark.parametrize(
    ("env_fn", "message"),
    [
        (functools.partial(Odd, step=STEPS["no info"]), "the info None"),
        (in_wrappers(functools.partial(Odd, step=STEPS["four values"])), "expected 5, got 4"),
        (functools.partial(Odd, reset=RESETS["nothing"]), "None from reset"),
    ],
)
def test_a_break_in_another_process_is_not_retried(env_fn, message):
    manager = in_process(env_fn)
    with pytest.raises(EnvProtocolError, match=message):
        play(manager)
    assert manager.restarts == 0


@pytest.mark.parametrize("make", [sync, wrapped])
def test_the_message_names_env_and_operation(make):
    with pytest.raises(EnvProtocolError, match=r"env 1 .*step\(") as caught:
        play(make(functools.partial(Odd, step=STEPS["four values"])))
    assert "returned" in str(caught.value) or "In step" in str(caught.value)


@pytest.mark.parametrize("make", [*MANAGERS, in_process])
def test_a_reset_without_the_keyword_seed_says_so(make):
    class Unseeded(Walk):
        def reset(self):
            return super().reset()

    with pytest.raises(EnvProtocolError, match="takes the keywords seed and options"):
        play(make(Unseeded))


@pytest.mark.parametrize("make", [sync, wrapped, vector])
def test_an_error_in_the_code_of_the_env_is_still_a_crash(make):
    class Careless(Walk):
        def step(self, action):
            obs, reward = super().step(action)
            return obs, reward

    manager = make(Careless)
    with pytest.raises(EnvCrashed, match="too many values to unpack"):
        play(manager)
    assert manager.restarts > 0


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("make", [sync, wrapped])
def test_a_crash_inside_wrappers_is_still_retried(make, where, tmp_path):
    manager = make(functools.partial(Fragile, where=where, at=2, once=tmp_path / "failed"))
    with manager:
        for _ in range(20):
            manager.step(manager.sample_actions())
        assert manager.restarts == 1


PAIR = spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Discrete(3))


@pytest.mark.parametrize("make", [alone, in_process])
@pytest.mark.parametrize(
    ("space", "change", "message"),
    [
        (PAIR, lambda obs: {"a": obs["a"]}, r"keys are \['a', 'b'\], but it is \['a'\]"),
        (PAIR, lambda obs: obs["a"], r"keys are \['a', 'b'\], but it is ndarray"),
        (PAIR, lambda obs: {"a": obs["a"], "c": 1}, "KeyError: 'b'|'c'"),
        (spaces.Tuple((PAIR["a"], PAIR["b"])), lambda obs: obs[:1], "shorter"),
        (PAIR["b"], lambda obs: 1.0, "float64"),
        (PAIR["b"], lambda obs: np.array([1]), r"its shape is \(1,\)"),
        (spaces.Box(0, 255, (3,), np.uint8), lambda obs: np.full(3, 300), "300, too large"),
        (spaces.Box(0, 255, (3,), np.uint8), lambda obs: np.full(3, -1), "-1, too large"),
        (spaces.Box(0, 255, (3,), np.uint8), lambda obs: obs / 255, "float64"),
        (spaces.MultiBinary(300), lambda obs: np.full(300, 256), "256, too large"),
    ],
)
def test_an_observation_outside_of_its_space_is_named(make, space, change, message):
    def changed(obs, *rest):
        return change(obs), *rest

    with pytest.raises(EnvProtocolError, match=message):
        play(make(functools.partial(Odd, space, changed)))


@pytest.mark.parametrize("make", [alone, in_process])
def test_an_observation_with_an_additional_key_is_refused(make):
    class Talkative(Walk):
        observation_space = PAIR

        def _obs(self):
            return {**PAIR.sample(), "note": 1}

    with pytest.raises(EnvProtocolError, match=r"\['a', 'b'\], but it is \['a', 'b', 'note'\]"):
        play(make(Talkative))


@pytest.mark.parametrize("make", [alone, in_process])
@pytest.mark.parametrize(
    ("space", "change"),
    [
        (None, lambda obs: obs.astype(np.float64)),
        (None, lambda obs: obs.tolist()),
        (None, lambda obs: np.array([1, 2, 3])),
        (spaces.Box(0, 255, (3,), np.uint8), lambda obs: obs.astype(np.int64)),
        (spaces.Discrete(3, start=-1), lambda obs: int(obs)),
        (spaces.Discrete(3, start=-1), lambda obs: np.array(obs, np.int8)),
    ],
)
def test_a_harmless_difference_is_converted(make, space, change):
    with make(functools.partial(Odd, space, lambda obs, *rest: (change(obs), *rest))) as manager:
        space = manager.observation_space
        for _ in range(Odd.limit):
            step = manager.step(manager.sample_actions())
            assert step.next_obs.dtype == space.dtype


def test_floats_of_a_vector_env_do_not_become_integers():
    class Rough(gym.vector.VectorEnv):
        metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        num_envs = 2
        single_observation_space = spaces.Box(0, 255, (3,), np.uint8)
        single_action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros((2, 3), np.uint8), {}

        def step(self, actions):
            return np.full((2, 3), 0.5), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}

    with VectorEnvManager(Rough, 2) as manager, pytest.raises(EnvProtocolError, match="float64"):
        manager.step(np.zeros(2, int))


@pytest.mark.parametrize("value", [None, ["1", "2"], [None, None]])
def test_rewards_of_a_vector_env_are_numbers(value):
    class Rewardless(gym.wrappers.vector.RecordEpisodeStatistics):
        def step(self, actions):
            obs, _, *rest = self.env.step(actions)
            return obs, value, *rest

    with make_env_manager(
        "CartPole-v1", env_num=2, mode="vector", wrappers=[Rewardless]
    ) as manager:
        with pytest.raises(EnvProtocolError, match="rewards or flags"):
            manager.step(np.zeros(2, int))
        assert manager.restarts == 0


def turn_based():
    return pytest.importorskip("pettingzoo").make("aec", "classic/tictactoe-v3")


def rock_paper_scissors():
    return pytest.importorskip("pettingzoo").make("parallel", "classic/rps-v2")


class OldEnv:
    """Looks like an env of the Gym package, which is not installed."""

    def reset(self):
        return 0

    def step(self, action):
        return 0, 0.0, False, {}

    def close(self):
        pass


OldEnv.__module__ = "gym.envs.classic_control"


class Game(BattleEnv):
    def reset(self, seed=None):
        return [0, 0]

    def step(self, actions):
        return [0, 0], [0.0, 0.0], True, False, [{}, {}]


@pytest.mark.parametrize(
    ("env_fn", "message"),
    [
        (turn_based, "PettingZooAdapter.*OpponentEnv.*BattleEnvManager"),
        (Game, "OpponentEnv"),
        (OldEnv, "shimmy's GymV26CompatibilityV0"),
        (lambda: gym.make_vec("CartPole-v1", num_envs=2), "mode='vector'"),
        (lambda: Walk, r"the class Walk, .*Walk\(\)"),
        (lambda: None, "return statement"),
        (lambda: "CartPole-v1", "the string 'CartPole-v1'"),
    ],
)
def test_something_else_than_an_env_is_recognized(env_fn, message):
    for make in (sync, functools.partial(make_env_manager, env_num=2)):
        with pytest.raises(EnvProtocolError, match=message):
            make(env_fn).launch()
        with pytest.raises(EnvProtocolError, match=message):
            _ = make_env_manager(env_fn, env_num=1).action_space


def test_a_parallel_env_in_a_manager_of_its_own_needs_the_adapter():
    with pytest.raises(EnvProtocolError, match="ParallelEnvAdapter"):
        sync(rock_paper_scissors).launch()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (turn_based, "PettingZooAdapter"),
        (rock_paper_scissors, "ParallelEnvAdapter"),
        (Walk, r"lambda: Walk\(\)"),
        (lambda: gym.make("CartPole-v1"), "lambda: CartPoleEnv"),
        (lambda: gym.make_vec("CartPole-v1", num_envs=2), "mode='vector'"),
        (Game, "OpponentEnv"),
        (OldEnv, "shimmy"),
        (lambda: gym, "the module gymnasium"),
        (lambda: None, "got None$"),
        (lambda: 3, "got 3$"),
    ],
)
def test_an_object_in_place_of_an_id_or_a_function_is_recognized(make, message):
    with pytest.raises(ConfigError, match=message):
        make_env_manager(make(), env_num=2)


@pytest.mark.parametrize("env_id", ["", ":", ":CartPole-v1", "no_module:A-v0", "Cart Pole", "A-v"])
def test_an_unknown_id_is_named(env_id):
    with pytest.raises(RegistryError, match="no env is registered as"):
        make_env_manager(env_id, env_num=2)


@pytest.mark.parametrize("env_fn", [Walk, turn_based, lambda: None, lambda: Walk])
def test_mode_vector_names_what_it_was_given(env_fn):
    with pytest.raises(EnvProtocolError, match="mode 'vector' needs"):
        make_env_manager(env_fn, env_num=1, mode="vector").launch()


@pytest.mark.parametrize("game", [turn_based, Walk])
def test_an_opponent_needs_a_game(game):
    with pytest.raises(ConfigError, match="PettingZooAdapter"):
        OpponentEnv(game())


@pytest.mark.parametrize("wrong", [lambda seed: [0], lambda seed: None, lambda seed: 3])
def test_a_game_that_breaks_its_interface_is_not_restarted(wrong):
    class WrongReset(Game):
        n_resets = 0

        def reset(self, seed=None):
            self.n_resets += 1
            return [0, 0] if self.n_resets == 1 else wrong(seed)

    with BattleEnvManager([WrongReset]) as manager:
        with pytest.raises(EnvProtocolError):
            for _ in range(3):
                manager.step({0: [0, 0]})
        assert manager.closed


def test_the_space_of_an_env_may_not_fail():
    class Unfinished(gym.Env):
        action_space = spaces.Discrete(2)

        @property
        def observation_space(self):
            raise NotImplementedError("to do")

        def reset(self, **kwargs):
            return 0, {}

        def step(self, action):
            return 0, 0.0, False, False, {}

    with pytest.raises(EnvProtocolError, match=r"env 0 .Unfinished. has no observation_space"):
        make_env_manager(Unfinished, env_num=1).launch()


def test_an_adapter_that_gets_another_result_names_the_env():
    class FourValues(type(rock_paper_scissors())):
        def step(self, actions):
            return super().step(actions)[:4]

    def make():
        env = rock_paper_scissors()
        env.__class__ = FourValues
        return ParallelEnvAdapter(env)

    manager = SyncEnvManager([make])
    with manager, pytest.raises(EnvProtocolError, match="expected 5, got 4"):
        manager.step(manager.sample_actions())
    assert manager.restarts == 0
