"""Programs call, read and set what envs have, and set the options of their resets."""

import functools
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from tunable_envs import Layer, TakesOut, Tunable, Worlds, layered

from dmiddleware.env import (
    AsyncEnvManager,
    EnvPoolManager,
    OpponentEnv,
    PettingZooAdapter,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.errors import (
    ConfigError,
    EnvCallError,
    EnvCrashed,
    EnvError,
    EnvStateError,
)
from tests.waiting import wait_until

SYNC, ASYNC = "sync", pytest.param("async", marks=pytest.mark.process)
TWO = pytest.param("async, two per process", marks=[pytest.mark.process, pytest.mark.slow])
DISABLED = "vector, disabled"
SAME_STEP = "vector, same step"
IN_PROCESSES = pytest.param("vector, async", marks=pytest.mark.process)
OPTIONS = [SYNC, ASYNC, TWO]
ALL = [*OPTIONS, DISABLED, SAME_STEP, IN_PROCESSES]


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Checks what a test leaves behind, unless Gymnasium starts the processes."""
    if "vector, async" not in request.node.name:
        request.getfixturevalue("leaves_nothing_behind")


def vector_of(env_fns, kind):
    mode = AutoresetMode.DISABLED if "disabled" in kind else AutoresetMode.SAME_STEP
    cls = gym.vector.AsyncVectorEnv if "async" in kind else gym.vector.SyncVectorEnv
    return cls(env_fns, autoreset_mode=mode)


def make(kind, env_fn=layered, env_num=2, **kwargs):
    env_fns = [env_fn] * env_num
    if kind == "sync":
        return SyncEnvManager(env_fns, seed=5, **kwargs)
    if kind.startswith("vector"):
        vector_fn = functools.partial(vector_of, env_fns, kind)
        return VectorEnvManager(vector_fn, env_num, seed=5, **kwargs)
    per_process = 2 if "two" in kind else 1
    return AsyncEnvManager(env_fns, seed=5, envs_per_process=per_process, **kwargs)


def still(manager):
    """Step all envs without a failure."""
    return manager.step(np.zeros(manager.env_num, np.int64))


@pytest.mark.parametrize("kind", ALL)
def test_methods_and_attributes_are_those_of_wrappers_and_of_the_env_inside(kind):
    with make(kind) as manager:
        assert manager.call("add", 1, other=2) == [3.0, 3.0]
        assert manager.call("scaled", 7) == [7, 7]
        manager.set_attr("level", [0.5, 1.5])
        assert manager.get_attr("level") == [0.5, 1.5]
        manager.set_attr("scale", 3)
        assert manager.call("scaled", 7) == [21, 21]
        assert manager.call("add", 1) == [1.5, 2.5]
        assert manager.call("level") == [0.5, 1.5]
        assert manager.get_attr("calls") == [[(1, 2), (1, 0)]] * 2
        np.testing.assert_array_equal(still(manager).reward, [0.5, 1.5])
        assert manager.restarts == 0


@pytest.mark.parametrize("kind", ALL)
def test_a_name_that_no_env_has_is_refused(kind):
    in_vector = kind.startswith("vector")  # it does not say which names its envs have
    with make(kind) as manager:
        for use in (
            lambda: manager.set_attr("lvel", 3),
            lambda: manager.get_attr("lvel"),
            lambda: manager.call("lvel"),
        ):
            with pytest.raises(EnvCallError, match="'lvel'" if in_vector else "'lvel'.*level"):
                use()
        assert manager.get_attr("level") == [0.0, 0.0]
        assert still(manager).valid.all()
        assert manager.restarts == 0


@pytest.mark.parametrize("kind", [SYNC, ASYNC, TWO, DISABLED])
def test_an_error_of_an_env_is_raised_and_the_envs_can_still_be_used(kind):
    with make(kind) as manager:
        with pytest.raises(EnvCallError, match=r"(?s)RuntimeError: it is broken") as caught:
            manager.call("fail")
        text = str(caught.value)
        assert kind.startswith("async") == ('raise RuntimeError("it is broken")' in text)
        with pytest.raises(EnvCallError, match="-1 is too low"):
            manager.set_attr("guarded", [1, -1])
        if kind != DISABLED:  # Gymnasium ignores the argument
            with pytest.raises(EnvCallError, match="TypeError"):
                manager.call("level", 3)
        assert still(manager).valid.all()
        assert manager.restarts == 0
        # It is not among what a restart sets again.
        manager.step(np.array([1, 1]))
        assert manager.get_attr("guarded") == [0, 0]


@pytest.mark.parametrize("kind", ALL)
def test_values_must_be_as_many_as_the_envs(kind):
    with make(kind) as manager:
        with pytest.raises(ConfigError, match=r"3 values for 2 envs"):
            manager.set_attr("level", [1.0, 2.0, 3.0])
        manager.set_attr("level", np.arange(3.0))
        np.testing.assert_array_equal(manager.get_attr("level"), [np.arange(3.0)] * 2)
        manager.set_attr("level", [[1, 2]] * 2)
        assert manager.get_attr("level") == [[1, 2]] * 2


@pytest.mark.parametrize("kind", [SYNC, DISABLED, ASYNC])
@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_the_work_of_the_manager_cannot_be_called(kind, name):
    with make(kind) as manager, pytest.raises(ConfigError, match=f"own {name}"):
        manager.call(name)


def test_closed_envs_cannot_be_called_or_read():
    manager = make("sync")
    with pytest.raises(EnvStateError, match="launch"):
        manager.call("add", 1)
    with pytest.raises(EnvStateError, match="launch"):
        manager.get_attr("level")


@pytest.mark.parametrize("kind", ALL)
def test_what_was_set_before_launch_holds_from_the_first_reset_on(kind):
    manager = make(kind)
    manager.set_attr("level", [0.5, 1.5])
    for _ in range(2):
        with manager:
            np.testing.assert_array_equal(manager.ready_obs[:, 0], [0.5, 1.5])
            assert manager.get_attr("level") == [0.5, 1.5]


@pytest.mark.parametrize("kind", ALL)
def test_a_wrong_name_that_was_set_before_launch_is_found_at_launch(kind):
    manager = make(kind)
    manager.set_attr("lvel", 3)
    with pytest.raises(EnvError, match="'lvel'"):
        manager.launch()
    assert manager.closed


def starts(manager, n_steps=3):
    """Return where the episodes begin that follow after steps."""
    for _ in range(n_steps):
        still(manager)
    return manager.ready_obs[:, 1].tolist()


@pytest.mark.parametrize("kind", [*OPTIONS, DISABLED])
def test_every_later_reset_gets_the_options(kind):
    with make(kind) as manager:
        assert manager.reset_options == [None, None]
        assert manager.ready_obs[:, 1].tolist() == [-1.0, -1.0]
        manager.set_reset_options({"start": 4.0})
        assert manager.reset_options == [{"start": 4.0}] * 2
        assert manager.ready_obs[:, 1].tolist() == [-1.0, -1.0]
        assert starts(manager) == [4.0, 4.0]
        assert starts(manager) == [4.0, 4.0]
        manager.set_reset_options({"start": 5.0})
        manager.reset([1])
        assert manager.ready_obs[:, 1].tolist() == [4.0, 5.0]
        manager.reset()
        assert manager.ready_obs[:, 1].tolist() == [5.0, 5.0]
        manager.set_reset_options(None)
        assert starts(manager) == [-1.0, -1.0]
    manager.set_reset_options({"start": 6.0})
    with manager:
        assert manager.ready_obs[:, 1].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_an_env_does_to_its_options_does_not_reach_the_next_reset(kind):
    with make(kind, TakesOut) as manager:
        manager.set_reset_options({"start": 4.0})
        assert starts(manager) == [4.0, 4.0]
        assert starts(manager) == [4.0, 4.0]


@pytest.mark.parametrize("kind", OPTIONS)
def test_each_env_can_have_reset_options_of_its_own(kind):
    with make(kind) as manager:
        manager.set_reset_options([{"start": 1.0}, None])
        assert starts(manager) == [1.0, -1.0]
        for wrong in (3, "start", [{"start": 1.0}, 3], [{}]):
            with pytest.raises(ConfigError):
                manager.set_reset_options(wrong)
        assert manager.reset_options == [{"start": 1.0}, None]


@pytest.mark.parametrize("kind", [SAME_STEP, IN_PROCESSES])
def test_a_vector_env_that_resets_its_envs_itself_takes_no_reset_options(kind):
    manager = make(kind)
    with pytest.raises(ConfigError, match=r"AutoresetMode\.DISABLED"):
        manager.set_reset_options({"start": 1.0})
    with manager, pytest.raises(ConfigError, match=r"AutoresetMode\.DISABLED"):
        manager.set_reset_options({"start": 1.0})


def test_a_vector_env_takes_one_dictionary_of_reset_options():
    with pytest.raises(ConfigError, match="one dictionary"):
        make(DISABLED).set_reset_options([{"start": 1.0}, None])


def test_an_attribute_of_a_simulator_is_shared_by_its_envs():
    with VectorEnvManager(Worlds, 2) as manager:
        assert manager.get_attr("gravity") == [9.8, 9.8]
        manager.set_attr("gravity", 1.5)
        np.testing.assert_array_equal(still(manager).ready_obs, np.full((2, 2), 1.5))
        with pytest.raises(ConfigError, match="share"):
            manager.set_attr("gravity", [1.0, 2.0])
        with pytest.raises(EnvCallError, match=r"'gravty'.*gravity"):
            manager.set_attr("gravty", 1.0)
        with pytest.raises(ConfigError, match="call"):
            manager.call("gravity")
        manager.step(np.array([1, 0]))
        assert manager.restarts == 1
        assert manager.get_attr("gravity") == [1.5, 1.5]


def test_gymnasiums_own_vectorized_env_can_be_changed():
    with make_env_manager("CartPole-v1", env_num=3, mode="vector", seed=0) as manager:
        manager.set_attr("gravity", 0.0)
        assert manager.get_attr("gravity") == [0.0] * 3
        assert still(manager).valid.all()


def test_envpool_refuses_and_says_what_to_do():
    pytest.importorskip("envpool")
    manager = EnvPoolManager("CartPole-v1", 2)
    for use in (
        lambda: manager.call("x"),
        lambda: manager.get_attr("x"),
        lambda: manager.set_attr("x", 1),
        lambda: manager.set_reset_options({"x": 1}),
    ):
        with pytest.raises(ConfigError, match="env_kwargs"):
            use()
    manager.set_reset_options(None)


@pytest.mark.process
def test_what_cannot_be_sent_to_a_process_is_refused():
    with make("async") as manager:
        with pytest.raises(ConfigError, match=r"set_attr\('level'\).*mode='sync'"):
            manager.set_attr("level", threading.Lock())
        with pytest.raises(ConfigError, match=r"reset options.*mode='sync'"):
            manager.set_reset_options({"start": threading.Lock()})
        with pytest.raises(EnvCallError, match=r"lock.*cannot be sent.*mode='sync'"):
            manager.call("lock")
        assert manager.reset_options == [None, None]
        assert manager.get_attr("level") == [0.0, 0.0]
        assert still(manager).valid.all()


@pytest.mark.process
def test_functions_can_be_sent_to_a_process():
    with make("async") as manager:
        manager.set_attr("level", lambda: 3)
        assert [level() for level in manager.get_attr("level")] == [3, 3]


# Failures


@pytest.mark.parametrize("kind", [*OPTIONS, DISABLED, SAME_STEP])
def test_envs_that_fail_get_what_was_set_before_their_reset(kind):
    with make(kind) as manager:
        manager.set_attr("level", [0.5, 1.5])
        manager.set_attr("scale", 2)
        if kind != SAME_STEP:
            manager.set_reset_options({"start": 4.0})
        manager.call("add", 1)
        step = manager.step(np.array([0, 1]))
        assert step.abnormal[1]
        assert manager.restarts == 1
        assert manager.get_attr("level") == [0.5, 1.5]
        assert manager.get_attr("scale") == [2, 2]
        np.testing.assert_array_equal(manager.ready_obs[:, 0], [0.5, 1.5])
        assert manager.ready_obs[1, 1] == (-1.0 if kind == SAME_STEP else 4.0)
        # A call is not repeated.
        assert manager.get_attr("calls")[1] == []


@pytest.mark.process
@pytest.mark.parametrize("how", ["kill", pytest.param("hang", marks=pytest.mark.slow)])
def test_processes_that_die_or_hang_get_what_was_set(how):
    with make("async, two", env_num=3, reset_timeout_s=4.0) as manager:
        manager.set_attr("level", [1, 2, 3])
        manager.set_reset_options({"start": 4.0})
        pids = manager.pids
        os.kill(pids[0], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        # The set finds them; the new envs get the new value and those set before.
        manager.set_attr("scale", [5, 6, 7])
        assert manager.pids[0] != pids[0]
        assert manager.pids[1] == pids[1]
        assert manager.restarts == 1
        assert manager.get_attr("scale") == [5, 6, 7]
        assert manager.get_attr("level") == [1, 2, 3]
        assert manager.ready_obs[:, 1].tolist() == [4.0, 4.0, -1.0]
        step = still(manager)
        assert step.abnormal.tolist() == [True, True, False]
        assert still(manager).valid.all()


@pytest.mark.process
def test_a_call_in_which_a_process_dies_is_made_in_its_new_envs(tmp_path):
    with make("async, two") as manager:
        manager.set_attr("level", 2.0)
        assert manager.call("kill_once", tmp_path / "killed") == [2.0, 2.0]
        assert manager.restarts == 1
    with make("async", max_retry=1, reset_timeout_s=2.0) as manager:
        with pytest.raises(EnvCrashed, match=r"in a row.*call\('kill_once'\)"):
            manager.call("kill_once", NeverThere())
        assert manager.closed


class NeverThere:
    """A file that never exists."""

    def exists(self):
        return False

    def touch(self): ...


@pytest.mark.process
def test_a_reset_finds_dead_processes_and_gives_them_what_was_set():
    with make("async") as manager:
        manager.set_attr("level", [1, 2])
        manager.set_reset_options({"start": 4.0})
        os.kill(manager.pids[1], signal.SIGKILL)
        manager.reset()
        np.testing.assert_array_equal(manager.ready_obs, [[1, 4], [2, 4]])


def fails(function, *args):
    with pytest.raises(EnvError):
        function(*args)


@pytest.mark.process
def test_another_thread_cannot_reach_envs_that_are_busy(tmp_path):
    flag = tmp_path / "hangs"
    with make("async", env_num=1, max_retry=0) as manager:
        hangs = threading.Thread(target=fails, args=(manager.call, "hang", flag))
        hangs.start()
        wait_until(flag.exists, "a call that hangs")
        with pytest.raises(EnvStateError, match="another thread"):
            manager.set_attr("level", 1)
        with pytest.raises(EnvStateError, match="another thread"):
            manager.set_reset_options({})
        assert not manager.closed
        os.kill(manager.pids[0], signal.SIGKILL)
        hangs.join()


# States


@pytest.mark.parametrize("kind", [SYNC, ASYNC, DISABLED])
def test_a_restored_manager_has_what_was_set(kind):
    with make(kind) as manager:
        manager.set_attr("level", [0.5, 1.5])
        manager.set_reset_options({"start": 4.0, "spread": 1.0})
        manager.set_attr("scale", (2, 3))
        still(manager)
        state = manager.state_dict()
        expected = [starts(manager) for _ in range(3)]
    with make(kind) as manager:
        assert manager.load_state_dict(state)
        assert manager.get_attr("level") == [0.5, 1.5]
        assert [starts(manager) for _ in range(3)] == expected
        manager.step(np.ones(2, np.int64))
        assert manager.get_attr("scale") == [2, 3]
        assert manager.reset_options[0] == {"start": 4.0, "spread": 1.0}


class Unsavable(Tunable):
    def __init__(self):
        super().__init__()
        self.file = threading.Lock()


@pytest.mark.parametrize("kind", [SYNC, ASYNC, DISABLED])
def test_envs_whose_state_cannot_be_saved_begin_with_what_was_set(kind):
    with make(kind, Unsavable) as manager:
        manager.set_attr("level", [0.5, 1.5])
        manager.set_reset_options({"start": 4.0})
        state = manager.state_dict()
    with make(kind, Unsavable) as manager:
        assert not manager.load_state_dict(state)
        np.testing.assert_array_equal(manager.ready_obs, [[0.5, 4.0], [1.5, 4.0]])


def test_an_attribute_that_the_env_changed_itself_continues_where_it_was():
    with make("sync") as manager:
        manager.set_attr("level", 1.0)
        manager.envs[0].unwrapped.level = 7.0
        state = manager.state_dict()
    with make("sync") as manager:
        manager.load_state_dict(state)
        assert manager.get_attr("level") == [7.0, 1.0]


# Envs of others


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_the_pole_of_cartpole_can_be_changed(mode):
    with make_env_manager("CartPole-v1", env_num=2, mode=mode, seed=0) as manager:
        manager.set_attr("length", [0.25, 1.0])
        manager.set_attr("gravity", 12.0)
        manager.set_reset_options({"low": 0.01, "high": 0.02})
        manager.reset()
        assert manager.get_attr("length") == [0.25, 1.0]
        assert manager.get_attr("gravity") == [12.0, 12.0]
        assert ((manager.ready_obs >= 0.01) & (manager.ready_obs <= 0.02)).all()
        angles = manager.step(np.ones(2, np.int64)).next_obs[:, 3]
        assert angles[0] < angles[1] < 0  # a short pole turns faster


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_a_pettingzoo_env_is_reached_through_its_adapter(mode):
    pytest.importorskip("mpe2")
    name = "mpe2.simple_spread_v3:parallel_env"
    with make_env_manager(name, env_num=2, mode=mode, seed=0) as manager:
        manager.set_attr("max_cycles", 3)
        assert manager.get_attr("max_cycles") == [3, 3]
        assert manager.call("state")[0].shape == manager.observation_space["state"].shape
        with pytest.raises(EnvCallError, match="max_cyles"):
            manager.set_attr("max_cyles", 3)
        actions = np.zeros((2, *manager.action_space.shape), np.int64)
        ends = [bool(manager.step(actions).done.all()) for _ in range(6)]
        assert ends == [False, False, True, False, False, True]


class Counting:
    """A game of one move each, whose players take turns, that notes its options."""

    n_player = 2
    observation_space = gym.spaces.Box(-1, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.level, self.start = 1, 0
        self.turn = 0

    def reset(self, seed=None, options=None):
        self.turn, self.start = 0, (options or {}).get("start", 0)
        return [np.array([self.start], np.float32)] * 2

    def step(self, actions):
        self.turn += 1
        obs = [np.array([self.level], np.float32)] * 2
        return obs, [1.0, 0.0], self.turn == 2, False, [{}, {}]

    def to_move(self):
        return (self.turn % 2,)

    def action_mask(self, player):
        return None

    def close(self): ...


def test_a_game_is_reached_through_the_seat_of_a_player():
    with SyncEnvManager([lambda: Layer(OpponentEnv(Counting(), seat=0))], seed=0) as manager:
        manager.set_attr("level", 3)
        manager.set_reset_options({"start": 9})
        step = manager.step(np.zeros(1, np.int64))
        assert step.next_obs.tolist() == [[3.0]]
        assert step.ready_obs.tolist() == [[9.0]]
        assert manager.get_attr("level") == [3]


def test_a_pettingzoo_game_is_reached_through_both_adapters():
    pettingzoo = pytest.importorskip("pettingzoo")

    games = []

    def make_game():
        game = pettingzoo.make("aec", "classic/tictactoe-v3")
        games.append(game)
        return OpponentEnv(PettingZooAdapter(game, flatten=True), seat=0)

    with SyncEnvManager([make_game], seed=0) as manager:
        before = manager.get_attr("board")[0]
        assert type(before).__name__ == "Board"
        manager.set_attr("screen_height", 123)
        assert manager.get_attr("screen_height") == [123]
        # Not on one of PettingZoo's wrappers, which would hide it from the game.
        assert games[0].unwrapped.screen_height == 123


def test_a_minigrid_env_is_reached_through_its_wrappers():
    pytest.importorskip("minigrid")
    name = "dmiddleware.env:make_grid_env"
    kwargs = {"game": "MiniGrid-Empty-5x5-v0"}
    with make_env_manager(name, env_num=2, env_kwargs=kwargs, seed=0) as manager:
        manager.set_attr("max_steps", 4)
        manager.set_attr("agent_start_pos", (2, 2))
