import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import EpisodeReplayBuffer
from tests.dmiddleware.classic.replay_buffers.clock import Clock


def episodes(size=4, **cfg):
    cfg = {"replay_buffer_size": size, "seed": 0, "log_to_file": False} | cfg
    return EpisodeReplayBuffer(cfg, clock=Clock())


def episode(number, length):
    return [{"episode": number, "n": n} for n in range(length)]


def test_the_items_are_whole_episodes():
    buffer = episodes()
    buffer.push([episode(i, 2 + i) for i in range(6)], 0)
    assert buffer.count() == 4
    assert buffer.episode_len == [4, 5, 6, 7]
    assert sorted(map(len, buffer.sample(4, 0))) == [4, 5, 6, 7]
    assert buffer.sample(1, 0, sample_range=slice(-1, None)) == [episode(5, 7)]


@pytest.mark.parametrize("bad", [episode(0, 3), [[]], {"n": 1}])
def test_an_episode_is_pushed_in_a_list(bad):
    buffer = episodes()
    with pytest.raises(TypeError, match="episode"):
        buffer.push(bad, 0)
    assert buffer.count() == 0


def test_runs_of_steps_have_the_length_asked_for():
    buffer = episodes()
    buffer.push([episode(0, 2), episode(1, 3), episode(2, 4)], 0)
    runs = {tuple((s["episode"], s["n"]) for s in run) for run in buffer.sample_steps(3, 3, 0)}
    assert runs == {
        ((1, 0), (1, 1), (1, 2)),
        ((2, 0), (2, 1), (2, 2)),
        ((2, 1), (2, 2), (2, 3)),
    }
    assert buffer.sample_steps(4, 3, 0) is None
    assert len(buffer.sample_steps(9, 3, 0, replace=True)) == 9
    assert buffer.sample_steps(1, 5, 0, replace=True) is None
    assert buffer.sample_steps(2, 3, 0, sample_range=slice(0, 2)) is None
    assert buffer.sample_steps(0, 3, 0) == []
    assert episodes().sample_steps(1, 1, 0) is None
    with pytest.raises(ValueError, match="length"):
        buffer.sample_steps(1, 0, 0)


def test_runs_of_stored_episodes_say_where_they_begin():
    buffer = episodes(enable_track_used_data=True)
    buffer.push({"data_id": "a", "unroll_len": 3}, 0)
    assert buffer.episode_len == [3]
    runs = buffer.sample_steps(2, 2, 0)
    assert sorted(run["unroll_split_begin"] for run in runs) == [0, 1]
    assert all(run["data_id"] == "a" and run["unroll_len"] == 2 for run in runs)
    buffer.clear()
    buffer.release(["a"])
    assert buffer.take_deleted() == []
    buffer.release(["a"])
    assert buffer.take_deleted() == ["a"]
    with pytest.raises(TypeError, match="unroll_len"):
        buffer.push({"data_id": "b"}, 0)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 5), max_size=6),
    length=st.integers(1, 4),
)
def test_the_runs_are_those_that_a_loop_finds(size, lengths, length):
    buffer = episodes(size=size)
    pushed = [episode(number, n) for number, n in enumerate(lengths)]
    buffer.push(pushed, 0)
    runs = [
        one[start : start + length]
        for one in pushed[-size:]
        for start in range(len(one) - length + 1)
    ]
    assert buffer.episode_len == [len(one) for one in pushed[-size:]]
    assert buffer.sample_steps(len(runs) + 1, length, 0) is None
    drawn = buffer.sample_steps(len(runs), length, 0)
    key = lambda run: (run[0]["episode"], run[0]["n"])  # noqa: E731
    assert sorted(drawn, key=key) == runs
