"""What envs may return as terminated and truncated, and what is refused."""

import functools

import numpy as np
import pytest
import torch
from strange_envs import Flagged, Walk

from dmiddleware.env import AsyncEnvManager, SyncEnvManager
from dmiddleware.errors import EnvProtocolError

TRUTHY = [
    True,
    1,
    2,
    1.0,
    np.True_,
    np.int64(3),
    np.array(True),
    np.array(7),
    torch.tensor(True),
    torch.tensor(2),
]
NOT_SCALAR = [np.array([True]), np.array([False]), np.array([True, False]), [True], [], "yes", None]


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("value", TRUTHY, ids=repr)
def test_any_true_flag_ends_the_episode(name, value):
    with SyncEnvManager([functools.partial(Flagged, name, value)] * 2) as manager:
        for _ in range(3):
            batch = manager.step(np.zeros(2, int))
        assert getattr(batch, name).tolist() == [True, True]
        assert batch.done.tolist() == [True, True]
        assert getattr(batch, name).dtype == np.bool_
        assert not manager.step(np.zeros(2, int)).done.any()


@pytest.mark.parametrize("value", [0, 0.0, np.False_, np.array(False), torch.tensor(False)])
def test_a_false_flag_does_not_end_the_episode(value):
    with SyncEnvManager([functools.partial(Flagged, "terminated", value, at=1)]) as manager:
        for _ in range(3):
            assert not manager.step(np.zeros(1, int)).done.any()


# After the first step, only flags that are true are looked at.
@pytest.mark.parametrize(
    ("value", "at"),
    [(value, at) for value in NOT_SCALAR for at in (1, 3) if at == 1 or np.any(value)],
    ids=repr,
)
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags_that_are_not_scalar_are_rejected(name, value, at):
    with (
        SyncEnvManager([Walk, functools.partial(Flagged, name, value, at=at)]) as manager,
        pytest.raises(EnvProtocolError, match=f"env 1 returned {name}.*bool"),
    ):
        for _ in range(3):
            manager.step(np.zeros(2, int))


@pytest.mark.process
@pytest.mark.parametrize("value", [2, np.array(True), torch.tensor(True)], ids=repr)
def test_any_true_flag_ends_the_episode_in_another_process(value):
    with AsyncEnvManager([functools.partial(Flagged, "terminated", value)]) as manager:
        done = [manager.step(np.zeros(1, int)).done.tolist() for _ in range(3)]
    assert done == [[False], [False], [True]]


@pytest.mark.process
def test_flags_that_are_not_scalar_are_rejected_in_another_process():
    with (
        AsyncEnvManager([functools.partial(Flagged, "truncated", np.array([True]))]) as manager,
        pytest.raises(EnvProtocolError, match=r"env 0 returned truncated.*bool"),
    ):
        for _ in range(3):
            manager.step(np.zeros(1, int))
