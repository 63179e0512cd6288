import functools
import logging
import signal
import threading

import numpy as np
import psutil
import pytest
from strange_envs import (
    FailsToClose,
    Fragile,
    HangsInClose,
    NoReward,
    NoSpaces,
    OldApi,
    Parent,
    SlowToReset,
    Walk,
    WrongShape,
    python_process,
)

from dmiddleware.env import AsyncEnvManager
from dmiddleware.errors import (
    ConfigError,
    EnvCrashed,
    EnvProtocolError,
    EnvTimeout,
    StructureError,
)
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("leaves_nothing_behind")]


def managed(*env_fns, **kwargs):
    return AsyncEnvManager(env_fns, **{"seed": 5, **kwargs})


def stay(n):
    return np.zeros(n, np.int64)


@pytest.mark.parametrize(
    ("how", "told"),
    mostly_slow(
        [
            ("raise", "raised RuntimeError: the motor burned out"),
            ("kill", "lost its process, which was killed by SIGKILL"),
            ("exit", "lost its process, which exited with code 3"),
            ("hang", "did not answer in time"),
        ],
        keep=2,
    ),
)
def test_an_env_that_fails_is_restarted_and_the_others_continue(how, told, tmp_path, caplog):
    fragile = functools.partial(Fragile, how=how, at=3, once=tmp_path / "failed")
    with managed(Walk, fragile, step_timeout_s=30 if how != "hang" else 3.0) as manager:
        first = manager.ready_obs.copy()
        for _ in range(2):
            manager.step(stay(2))
        pids = manager.pids
        with caplog.at_level(logging.WARNING):
            batch = manager.step(stay(2))
        assert batch.abnormal.tolist() == [False, True]
        assert not batch.is_full
        assert batch.ready_obs[:, 0].tolist() == [3, 0]
        assert batch.next_obs[1].tolist() == batch.ready_obs[1].tolist()
        assert batch.ready_obs[1].tolist() != first[1].tolist()
        assert (batch.reward[1], batch.done[1]) == (0, False)
        assert batch.info.rows() == [{}, {"abnormal": True}]
        assert (manager.restarts, manager.dropped_steps) == (1, 2)
        assert manager.pids[0] == pids[0]
        assert manager.pids[1] != pids[1]
        for _ in range(9):
            batch = manager.step(stay(2))
        assert batch.is_full
        assert batch.info.row(1)["eval_episode_length"] == 9
    assert f"env 1 failed in step: it {told}" in caplog.text
    if how in ("raise", "hang"):
        assert "strange_envs.py" in caplog.text  # where it happened


def test_a_crash_of_the_interpreter_shows_where_it_happened(caplog):
    with managed(functools.partial(Fragile, how="abort", at=1), max_retry=0) as manager:
        with pytest.raises(EnvCrashed, match="was killed by SIGABRT") as caught:
            manager.step(stay(1))
        assert manager.closed
    assert "strange_envs.py" in str(caught.value)
    assert "in fail" in str(caught.value)


def test_an_env_that_keeps_hanging_stops_the_run_and_shows_where_it_hangs():
    hangs = functools.partial(Fragile, how="hang", at=1)
    with managed(hangs, step_timeout_s=1.0, max_retry=1) as manager:
        assert manager.step(stay(1)).abnormal.all()
        with pytest.raises(EnvTimeout, match="failed 2 time") as caught:
            manager.step(stay(1))
        assert manager.closed
    assert "in wait_forever" in str(caught.value)


def test_a_reset_has_a_separate_deadline(tmp_path):
    # The reset within the step takes longer than the step may.
    slow = functools.partial(SlowToReset, limit=1)
    with managed(slow, step_timeout_s=2.0, reset_timeout_s=60) as manager:
        assert manager.step(stay(1)).done.all()
        assert manager.restarts == 0
    hangs = functools.partial(Fragile, how="hang", where="reset", at=1)
    with pytest.raises(EnvTimeout, match="did not answer in time"):
        managed(hangs, step_timeout_s=60, reset_timeout_s=0.5).launch()


@pytest.mark.slow
def test_the_deadline_of_a_reset_holds_for_the_reset_within_a_step():
    hangs = functools.partial(Fragile, how="hang", where="reset", at=2, limit=1)
    with (
        managed(hangs, step_timeout_s=60, reset_timeout_s=10, max_retry=0) as manager,
        pytest.raises(EnvTimeout, match="in reset, it did not answer in time"),
    ):
        manager.step(stay(1))


@pytest.mark.parametrize("how", ["raise", "exit"])
@pytest.mark.parametrize("where", ["make", "reset"])
def test_a_failure_at_launch_is_raised_immediately(how, where):
    manager = managed(Walk, functools.partial(Fragile, how=how, where=where, at=1))
    with pytest.raises(EnvCrashed, match=r"env 1 failed in (start|reset), which is not retried"):
        manager.launch()
    assert manager.closed


def test_a_factory_that_cannot_be_imported_in_the_process_is_raised_immediately():
    class Unknown:
        def __reduce__(self):
            return (__import__, ("no_such_module_anywhere",))

    manager = managed(functools.partial(Walk, Unknown()))
    with pytest.raises(EnvCrashed, match="No module named 'no_such_module_anywhere'"):
        manager.launch()


def test_a_factory_that_cannot_be_pickled_is_rejected():
    manager = managed(functools.partial(Walk, (one for one in ())))
    with pytest.raises(ConfigError, match="cannot be sent to a process"):
        manager.launch()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (OldApi, r"env 1 returned \(array.* from step\(\)"),
        (WrongShape, r"env 1 returned an observation.*its shape is \(2,\)"),
        (NoReward, "env 1 returned the reward None"),
    ],
)
def test_an_env_that_breaks_the_protocol_is_not_retried(env, message):
    with managed(Walk, env, envs_per_process=2) as manager:
        with pytest.raises(EnvProtocolError, match=message):
            manager.step(stay(2))
        assert manager.closed
        assert manager.restarts == 0


def test_an_env_without_spaces_is_rejected():
    with pytest.raises(EnvProtocolError, match=r"env 0 .NoSpaces. has observation_space = None"):
        managed(NoSpaces).launch()


def test_an_action_outside_the_space_is_reported_as_such():
    class Strict(Walk):
        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(action)

    with managed(Walk, Strict, envs_per_process=2) as manager:
        with pytest.raises(StructureError, match=r"env 1 was given the action .*7.*Discrete\(3\)"):
            manager.step(np.array([0, 7]))
        assert manager.closed


def test_envs_that_share_a_process_fail_together(tmp_path):
    fragile = functools.partial(Fragile, how="exit", at=2, once=tmp_path / "failed")
    with managed(Walk, fragile, Walk, envs_per_process=2) as manager:
        manager.step(stay(3))
        # Env 0 is not asked to step, but its episode is lost with env 1's.
        batch = manager.step({1: 0, 2: 0})
        assert batch.env_id.tolist() == [1, 2, 0]
        assert batch.abnormal.tolist() == [True, False, True]
        assert manager.ready_obs[:, 0].tolist() == [0, 0, 2]
        assert manager.dropped_steps == 2
        assert manager.step(stay(3)).is_full


def test_each_failure_in_a_process_gives_its_envs_other_seeds(tmp_path):
    fragile = [functools.partial(Fragile, at=2, once=tmp_path / str(index)) for index in range(2)]
    with managed(*fragile, envs_per_process=2) as manager:
        firsts = manager.ready_obs[:, 2].tolist()
        for failing in range(2):
            (tmp_path / str(1 - failing)).touch()
            (tmp_path / str(failing)).unlink(missing_ok=True)
            manager.step(stay(2))
            assert manager.step(stay(2)).abnormal.all()
            firsts += manager.ready_obs[:, 2].tolist()
        assert manager.restarts == 2
    assert len(set(firsts)) == 6


def test_an_episode_lost_in_the_reset_of_another_env_shows_in_the_next_step(tmp_path):
    fragile = functools.partial(Fragile, how="exit", where="reset", at=2, once=tmp_path / "failed")
    with managed(Walk, fragile, Walk, envs_per_process=2) as manager:
        manager.step(stay(3))
        manager.reset([1])
        assert manager.ready_obs[:, 0].tolist() == [0, 0, 1]
        assert manager.restarts == 1
        batch = manager.step(stay(3))
        assert batch.abnormal.tolist() == [True, False, False]
        assert batch.ready_obs[:, 0].tolist() == [1, 1, 2]
        assert manager.step(stay(3)).is_full


def test_large_and_unpicklable_infos_are_returned():
    class Chatty(Walk):
        def step(self, action):
            obs, *rest, _ = super().step(action)
            size = 3_000_000 if self.t == 1 else 0
            return obs, *rest, {"log": b"x" * size} if size else {"lock": threading.Lock()}

    with managed(Chatty, max_retry=0) as manager:
        assert len(manager.step(stay(1)).info.row(0)["log"]) == 3_000_000
        with pytest.raises(EnvCrashed, match="cannot pickle"):
            manager.step(stay(1))


def test_close_kills_hanging_envs_and_the_processes_that_envs_started(tmp_path, caplog):
    pid_file = tmp_path / "pid"
    manager = managed(
        HangsInClose, functools.partial(Parent, pid_file), FailsToClose, close_timeout_s=4.0
    )
    with caplog.at_level(logging.WARNING):
        with manager:
            grandchild = psutil.Process(int(pid_file.read_text()))
            assert grandchild.is_running()
        assert "envs [0] did not close them in time" in caplog.text
        assert "envs [1]" not in caplog.text
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def heeds_ctrl_c():
    # A process started in the background of a shell ignores it, and so do these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c", "new_processes")
def test_ctrl_c_in_a_step_stops_the_processes():
    interrupting = functools.partial(Fragile, how="interrupt", at=2)
    manager = managed(Walk, interrupting, close_timeout_s=0.3)
    manager.launch()
    pids = manager.pids
    manager.step(stay(2))
    with pytest.raises(KeyboardInterrupt):
        manager.step(stay(2))
    assert manager.closed
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_processes_exit_when_the_manager_is_killed():
    code = (
        "import numpy as np; from strange_envs import *;"
        "from dmiddleware.env import AsyncEnvManager;"
        "m = AsyncEnvManager([Walk, lambda: Fragile(how='tell and hang', at=1)]); m.launch();"
        "print(*m.pids, flush=True); m.step(np.zeros(2, int))"
    )
    with python_process(code) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        processes = [psutil.Process(pid) for pid in pids]
        assert program.stdout.readline() == "hanging\n"
        program.send_signal(signal.SIGKILL)
    assert len(processes) == 2
    gone, _ = psutil.wait_procs(processes, timeout=20)
    alive = [one for one in processes if one not in gone and one.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_a_program_needs_no_main_guard():
    code = (
        "import gymnasium as gym; from dmiddleware.env import AsyncEnvManager\n"
        "from strange_envs import Walk\n"
        "class Mine(Walk): pass\n"
        "with AsyncEnvManager([Mine, lambda: Mine(limit=1)]) as m:\n"
        "    print(m.step(m.sample_actions()).done.tolist(), flush=True)\n"
    )
    with python_process(code) as program:
        assert program.stdout.read().strip() == "[False, True]"
    assert program.returncode == 0


@pytest.mark.parametrize(
    "option", ["step_timeout_s", "reset_timeout_s", "close_timeout_s", "envs_per_process"]
)
def test_options_are_positive(option):
    with pytest.raises(ConfigError, match=f"{option} must be an? .*, got 0"):
        managed(Walk, **{option: 0})
