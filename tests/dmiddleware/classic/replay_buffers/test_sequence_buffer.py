import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import SequenceReplayBuffer
from tests.dmiddleware.classic.replay_buffers.clock import Clock


def sequences(size=10, **cfg):
    cfg = {"replay_buffer_size": size, "seed": 0, "log_to_file": False} | cfg
    return SequenceReplayBuffer(cfg, clock=Clock())


def steps(first, n, **further):
    return [{"n": i, **further} for i in range(first, first + n)]


def starts(buffer, length, **options):
    """Draw often, check the runs, and return the first steps that appear."""
    found = set()
    for _ in range(40):
        for run in buffer.sample(4, length, 0, replace=True, **options):
            numbers = [step["n"] for step in run]
            assert numbers == list(range(numbers[0], numbers[0] + length))
            found.add(numbers[0])
    return found


def test_runs_are_consecutive_also_after_wrapping_round():
    buffer = sequences()
    buffer.push(steps(0, 23), 0)
    assert starts(buffer, 4) == {13, 14, 15, 16, 17, 18, 19}


@pytest.mark.parametrize("done", [True, np.array([True]), torch.tensor(True)])
def test_runs_do_not_cross_the_end_of_an_episode(done):
    buffer = sequences()
    buffer.push([*steps(0, 3), {"n": 3, "done": done}, *steps(4, 6)], 0)
    assert starts(buffer, 4) == {0, 4, 5, 6}


@pytest.mark.parametrize("key", ["episode_id", "env_id"])
def test_runs_do_not_cross_into_another_episode_or_env(key):
    buffer = sequences()
    buffer.push(steps(0, 5, **{key: torch.tensor([1])}), 0)
    buffer.push(steps(5, 5, **{key: 2}), 0)
    assert starts(buffer, 3) == {0, 1, 2, 5, 6, 7}


def test_runs_lie_within_the_range_of_the_sample():
    buffer = sequences()
    buffer.push(steps(0, 10), 0)
    assert starts(buffer, 3, sample_range=slice(-5, None)) == {5, 6, 7}
    assert buffer.sample(1, 2, 0, sample_range=slice(None, None, 2)) is None
    assert starts(buffer, 3, sample_range=slice(None, None, -1)) == set(range(8))


def test_too_few_runs_give_none():
    buffer = sequences()
    assert buffer.sample(1, 1, 0) is None
    buffer.push(steps(0, 5), 0)
    assert buffer.sample(0, 3, 0) == []
    assert buffer.sample(1, 6, 0, replace=True) is None
    assert buffer.sample(4, 3, 0) is None
    assert len({run[0]["n"] for run in buffer.sample(3, 3, 0)}) == 3
    with pytest.raises(ValueError, match="sequence"):
        buffer.sample(1, 0, 0)


@pytest.mark.parametrize("n_after_the_end", [0, 3])
def test_a_restored_buffer_knows_its_episodes(n_after_the_end):
    buffer = sequences()
    first, later = steps(0, 5 + n_after_the_end, env_id=1), steps(5 + n_after_the_end, 5, env_id=1)
    first[4]["done"] = True
    buffer.push(first, 0)
    restored = sequences()
    restored.load_state_dict(buffer.state_dict())
    for one in (buffer, restored):
        one.push(later[: 5 - n_after_the_end], 0)
    assert restored.sample(2, 3, 0) == buffer.sample(2, 3, 0)
    assert starts(restored, 5) == {0, 5}


def test_items_of_a_file_keep_their_boundaries(tmp_path):
    buffer = sequences()
    buffer.push([*steps(0, 2), {"n": 2, "done": True}, *steps(3, 3)], 0)
    buffer.save_data(tmp_path / "items")
    buffer.load_data(tmp_path / "items")
    assert starts(buffer, 3) == {0, 3}


def test_runs_never_begin_before_the_last_clear():
    buffer = sequences()
    buffer.push(steps(0, 3), 0)
    buffer.clear()
    buffer.push(steps(3, 3), 0)
    assert starts(buffer, 3) == {3}


def test_items_without_boundaries_are_one_run():
    buffer = sequences()
    buffer.push(list("abc"), 0)
    assert buffer.sample(1, 3, 0) == [["a", "b", "c"]]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 8),
    pushed=st.lists(st.tuples(st.booleans(), st.integers(0, 1)), max_size=20),
    length=st.integers(1, 4),
)
def test_the_runs_are_those_that_a_loop_finds(size, pushed, length):
    buffer = sequences(size=size)
    items = [{"n": n, "done": done, "env_id": env} for n, (done, env) in enumerate(pushed)]
    buffer.push(items, 0)
    held = items[-size:]
    runs = [held[i : i + length] for i in range(len(held) - length + 1)]
    whole = [
        run
        for run in runs
        if not any(step["done"] for step in run[:-1]) and len({s["env_id"] for s in run}) == 1
    ]
    assert buffer.sample(len(whole) + 1, length, 0) is None
    drawn = buffer.sample(len(whole), length, 0)
    assert sorted(run[0]["n"] for run in drawn) == [run[0]["n"] for run in whole]
    assert all(run in whole for run in drawn)
