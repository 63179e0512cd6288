import functools
import logging

import numpy as np
import pytest
from gymnasium import spaces
from strange_envs import (
    FailsToClose,
    Fragile,
    Graphic,
    NoReward,
    NoSpaces,
    OldApi,
    OldReset,
    Walk,
    WrongShape,
)

from dmiddleware.env import SyncEnvManager
from dmiddleware.errors import ConfigError, EnvCrashed, EnvProtocolError, StructureError

STAY = np.zeros(3, np.int64)


def managed(*env_fns, **kwargs):
    return SyncEnvManager(env_fns, **{"seed": 5, **kwargs})


def test_the_crash_of_one_env_does_not_affect_the_others(tmp_path, caplog):
    fragile = functools.partial(Fragile, at=3, once=tmp_path / "failed")
    with managed(Walk, fragile, Walk) as manager, managed(Walk, Walk, Walk) as sound:
        for _ in range(2):
            manager.step(STAY), sound.step(STAY)
        with caplog.at_level(logging.WARNING):
            batch, expected = manager.step(STAY), sound.step(STAY)
        assert batch.abnormal.tolist() == [False, True, False]
        assert not batch.is_full
        np.testing.assert_array_equal(batch.ready_obs[[0, 2]], expected.ready_obs[[0, 2]])
        assert batch.ready_obs[1, 0] == 0
        np.testing.assert_array_equal(batch.next_obs[1], batch.ready_obs[1])
        assert (batch.reward[1], batch.done[1]) == (0, False)
        assert [row.info for row in batch] == [{}, {"abnormal": True}, {}]
        assert (manager.restarts, manager.dropped_steps) == (1, 2)
        for _ in range(6):
            batch, expected = manager.step(STAY), sound.step(STAY)
        assert batch.is_full
        assert batch.done.tolist() == [True, False, True]
        np.testing.assert_array_equal(batch.ready_obs[[0, 2]], expected.ready_obs[[0, 2]])
        for _ in range(3):
            batch = manager.step(STAY)
        assert batch.info.row(1)["eval_episode_length"] == 9
    assert "env 1 failed in step: it raised RuntimeError: the motor burned out" in caplog.text
    assert "in fail" in caplog.text  # the traceback


def test_a_restarted_env_gets_another_but_reproducible_seed(tmp_path):
    def restarted(name):
        with managed(functools.partial(Fragile, at=1, once=tmp_path / name)) as manager:
            first = manager.ready_obs.copy()
            return first, manager.step(np.zeros(1, int)).ready_obs

    first, second = restarted("a")
    assert not np.array_equal(first, second)
    for one, other in zip((first, second), restarted("b"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_env_that_keeps_failing_stops_the_run_with_its_traceback():
    with managed(Walk, functools.partial(Fragile, at=2), max_retry=2) as manager:
        n_abnormal = 0
        with pytest.raises(EnvCrashed, match="failed 3 time") as caught:
            for _ in range(10):
                n_abnormal += int(manager.step(np.zeros(2, int)).abnormal.sum())
        assert n_abnormal == 2
        assert manager.closed
        assert manager.restarts == 2
    text = str(caught.value)
    assert "env 1" in text
    assert "max_retry is 2" in text
    assert 'raise RuntimeError("the motor burned out")' in text


def test_without_retries_the_first_failure_is_final():
    with managed(Fragile, max_retry=0) as manager, pytest.raises(EnvCrashed, match="failed 1 time"):
        for _ in range(3):
            manager.step(np.zeros(1, int))


def test_a_finished_episode_resets_the_count_of_failures(tmp_path):
    # Every other episode fails: more failures than max_retry, but never two in a row.
    class Flaky(Walk):
        n_made = 0

        def __init__(self):
            super().__init__(limit=2)
            type(self).n_made += 1
            self.n_resets = 0

        def reset(self, **kwargs):
            self.n_resets += 1
            return super().reset(**kwargs)

        def step(self, action):
            if self.n_resets == 2:
                raise RuntimeError("tired")
            return super().step(action)

    with managed(Flaky, max_retry=1) as manager:
        for _ in range(15):
            manager.step(np.zeros(1, int))
        assert manager.restarts == 5
    assert Flaky.n_made == 6


def test_a_failing_reset_keeps_the_episode_that_has_just_ended(tmp_path):
    fragile = functools.partial(Fragile, where="reset", at=2, limit=2, once=tmp_path / "failed")
    with managed(fragile) as manager:
        manager.step(np.zeros(1, int))
        batch = manager.step(np.zeros(1, int))
        assert batch.done.all()
        assert not batch.abnormal.any()
        assert batch.next_obs[0, 0] == 2
        assert batch.ready_obs[0, 0] == 0
        assert batch.info.row(0)["eval_episode_length"] == 2
        assert (manager.restarts, manager.dropped_steps) == (1, 0)


def test_an_env_that_fails_while_restarting_is_tried_again(tmp_path):
    made = []

    def factory():
        made.append(1)
        if len(made) == 2:
            raise OSError("no port is free")
        return Fragile(at=1, once=tmp_path / "failed")

    with managed(factory, max_retry=2) as manager:
        batch = manager.step(np.zeros(1, int))
        assert batch.abnormal.all()
        assert manager.restarts == 2
    assert len(made) == 3


def test_a_failing_env_stepped_alone_reports_its_own_row(tmp_path):
    fragile = functools.partial(Fragile, at=1, once=tmp_path / "failed")
    with managed(Walk, Walk, fragile) as manager:
        batch = manager.step({2: 0, 0: 1})
        assert batch.env_id.tolist() == [2, 0]
        assert batch.abnormal.tolist() == [True, False]
        assert manager.ready_obs[:, 1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("where", ["make", "reset"])
def test_a_failure_at_launch_is_not_retried(where):
    class Closing(Walk):
        n_closed = 0

        def close(self):
            type(self).n_closed += 1

    manager = managed(Closing, functools.partial(Fragile, where=where, at=1))
    with pytest.raises(EnvCrashed, match=r"env 1 could not be .*the motor burned out"):
        manager.launch()
    assert manager.closed
    assert manager.restarts == 0
    assert Closing.n_closed == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (OldApi, r"env 1 returned \(array.* from step\(\); it must return \(obs, reward, term"),
        (
            WrongShape,
            r"env 1 returned an observation.*its shape is \(2,\), but the space has \(3,\)",
        ),
        (NoReward, r"env 1 returned the reward None; it must be one number"),
    ],
)
def test_an_env_that_breaks_the_protocol_in_a_step_is_named(env, message):
    with managed(Walk, env) as manager:
        with pytest.raises(EnvProtocolError, match=message):
            manager.step(np.zeros(2, int))
        assert manager.closed
        assert manager.restarts == 0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (OldReset, r"env 0 returned array.* from reset\(\); it must return \(obs, info\)"),
        (NoSpaces, "env 0 .NoSpaces. has observation_space = None"),
        (Graphic, "have no fixed shape"),
        (object, "env 0 is a object without a method reset"),
    ],
)
def test_an_env_that_breaks_the_protocol_at_launch_is_named(env, message):
    manager = managed(env)
    with pytest.raises(EnvProtocolError, match=message):
        manager.launch()
    assert manager.closed


class ResetsWrongly(Walk):
    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        self.n_resets = getattr(self, "n_resets", 0) + 1
        return (obs, info) if self.n_resets == 1 else obs


@pytest.mark.parametrize("explicit", [True, False])
def test_a_later_reset_that_breaks_the_protocol_is_not_retried(explicit):
    with managed(functools.partial(ResetsWrongly, limit=1)) as manager:
        with pytest.raises(EnvProtocolError, match=r"from reset\(\)"):
            if explicit:
                manager.reset()
            else:
                manager.step(np.zeros(1, int))
        assert manager.closed
        assert manager.restarts == 0


@pytest.mark.parametrize("reward", [np.zeros(1), "much", None, [0.0]])
def test_a_reward_is_one_number(reward):
    class Odd(NoReward):
        reward_value = reward

    manager = managed(Odd, Odd)
    with manager, pytest.raises(EnvProtocolError, match="env 0 returned the reward"):
        manager.step(np.zeros(2, int))


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.array(1.0)])
def test_a_reward_may_be_any_kind_of_number(reward):
    class Odd(NoReward):
        reward_value = reward

    with managed(Odd, Walk) as manager:
        assert manager.step(np.zeros(2, int)).reward.tolist() == [1.0, 0.25]


def test_envs_must_share_their_spaces():
    class Wide(Walk):
        action_space = spaces.Discrete(7)

    with pytest.raises(EnvProtocolError, match=r"the action space of one is Discrete\(7\)"):
        managed(Walk, Wide).launch()


def test_an_action_outside_the_space_is_reported_as_such():
    class Strict(Walk):
        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(action)

    with managed(Walk, Strict, max_retry=3) as manager:
        with pytest.raises(StructureError, match=r"env 1 was given the action .*7.*Discrete\(3\)"):
            manager.step(np.array([0, 7]))
        assert manager.closed
        assert manager.restarts == 0


def test_an_env_that_raises_in_close_does_not_keep_others_open(caplog):
    class Closing(Walk):
        n_closed = 0

        def close(self):
            type(self).n_closed += 1

    with managed(FailsToClose, Closing), caplog.at_level(logging.WARNING):
        pass
    assert Closing.n_closed == 1
    assert "the door is jammed" in caplog.text


def test_flags_of_numpy_are_understood():
    class Numpy(Walk):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, np.float64(reward), np.bool_(terminated), np.bool_(truncated), info

    with managed(functools.partial(Numpy, limit=2)) as manager:
        assert not manager.step(np.zeros(1, int)).done.any()
        assert manager.step(np.zeros(1, int)).truncated.all()


def test_an_empty_list_of_envs_is_rejected():
    with pytest.raises(ConfigError, match="env_fns must be a list of functions"):
        SyncEnvManager([])


def test_keyboard_interrupt_passes_through():
    class Interrupted(Walk):
        def step(self, action):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), managed(Interrupted) as manager:
        manager.step(np.zeros(1, int))
    assert manager.closed
