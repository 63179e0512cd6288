import logging
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import (
    BUFFER_REGISTRY,
    AdvancedReplayBuffer,
    ElasticReplayBuffer,
    EpisodeReplayBuffer,
    IBuffer,
    NaiveReplayBuffer,
    SequenceReplayBuffer,
    create_buffer,
    get_buffer_cls,
)
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import CheckpointMismatch, ConfigError, RegistryError
from tests.dmiddleware.classic.replay_buffers.clock import Clock


class Scalars:
    """A SummaryWriter that keeps what it gets."""

    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, value, step):
        self.written[tag] = (value, step)

    def close(self):
        raise AssertionError("the writer belongs to the caller")


def naive(size=5, clock=None, **cfg):
    cfg = {"replay_buffer_size": size, "seed": 0, "log_to_file": False} | cfg
    return NaiveReplayBuffer(cfg, Scalars(), clock=clock or Clock())


def test_the_defaults_are_the_classic_ones():
    default = NaiveReplayBuffer.default_config()
    assert default.replay_buffer_size == 10000
    assert default.deepcopy is False
    assert default.enable_track_used_data is False
    assert default.periodic_thruput_seconds == 60
    assert default.cfg_type == "NaiveReplayBufferDict"


def test_a_list_is_many_items_and_anything_else_is_one():
    buffer = naive()
    assert buffer.push([1, 2], 0)
    assert buffer.push((3, 4), 0)
    assert buffer.push({"obs": 5}, 0)
    assert buffer.count() == 4
    assert buffer.push_count == 4
    assert buffer.sample(1, 0, sample_range=slice(2, 3)) == [(3, 4)]


def test_a_full_buffer_drops_its_oldest_items():
    buffer = naive()
    buffer.push(list(range(13)), 0)
    assert (buffer.count(), buffer.push_count, buffer.replay_buffer_size) == (5, 13, 5)
    assert sorted(buffer.sample(5, 0)) == [8, 9, 10, 11, 12]


def test_the_range_of_a_sample_is_by_age_also_after_wrapping_round():
    buffer = naive()
    buffer.push(list(range(13)), 0)
    assert sorted(buffer.sample(2, 0, sample_range=slice(-2, None))) == [11, 12]
    assert sorted(buffer.sample(2, 0, sample_range=slice(0, 2))) == [8, 9]
    assert buffer.sample(3, 0, sample_range=slice(-2, None)) is None


def test_a_sample_of_nothing_is_an_empty_list():
    assert naive().sample(0, 0) == []


def test_too_little_data_gives_none_and_one_warning_a_minute(caplog):
    clock = Clock()
    buffer = naive(clock=clock)
    buffer.push([1, 2], 0)
    with caplog.at_level(logging.WARNING):
        assert buffer.sample(3, 0) is None
        clock.now += 59
        assert buffer.sample(3, 0) is None
        assert len(caplog.records) == 1
        clock.now += 1
        assert buffer.sample(3, 0) is None
    assert len(caplog.records) == 2
    assert "3 items" in caplog.text


def test_with_replacement_a_sample_may_exceed_the_buffer():
    buffer = naive()
    assert buffer.sample(2, 0, replace=True) is None
    buffer.push([1, 2], 0)
    assert len(buffer.sample(20, 0, replace=True)) == 20


def test_clearing_restarts_the_count_of_pushes():
    buffer = naive()
    buffer.push([1, 2], 0)
    buffer.clear()
    assert (buffer.count(), buffer.push_count) == (0, 0)


def test_items_are_shared_unless_copies_are_asked_for():
    item = {"obs": [1]}
    shared = naive()
    shared.push(item, 0)
    assert shared.sample(1, 0)[0] is item
    copied = naive(deepcopy=True)
    copied.push(item, 0)
    item["obs"][0] = 2
    assert copied.sample(1, 0) == [{"obs": [1]}]
    copied.sample(1, 0)[0]["obs"][0] = 3
    assert copied.sample(1, 0) == [{"obs": [1]}]


def test_updates_are_ignored_and_start_and_close_may_be_repeated():
    with naive() as buffer:
        buffer.start()
        buffer.start()
        buffer.push([1, 2], 0)
        buffer.update({"priority": [1.0]})
        assert buffer.count() == 2
        buffer.close()
    assert buffer.count() == 0


def test_items_survive_a_file(tmp_path):
    file = tmp_path / "items.safetensors"
    buffer = naive()
    buffer.push([{"obs": torch.arange(3), "name": "a"}, {"obs": np.ones(2)}], 0)
    buffer.save_data(file)
    loaded = naive()
    loaded.push([1, 2, 3], 0)
    loaded.load_data(file)
    assert (loaded.count(), loaded.push_count) == (2, 2)
    assert loaded.sample(1, 0, sample_range=slice(0, 1))[0]["name"] == "a"


def test_other_objects_need_permission_to_be_pickled(tmp_path):
    buffer = naive()
    buffer.push(range(3), 0)
    with pytest.raises(TypeError):
        buffer.save_data(tmp_path / "items")
    buffer.save_data(tmp_path / "items", allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        buffer.load_data(tmp_path / "items")
    buffer.load_data(tmp_path / "items", allow_pickle=True)
    assert buffer.sample(1, 0) == [range(3)]


def test_a_restored_buffer_draws_the_same_samples(tmp_path):
    buffer = naive()
    buffer.push(list(range(7)), 0)
    buffer.sample(2, 0)
    save_checkpoint(tmp_path / "state", buffer.state_dict())
    restored = naive()
    restored.load_state_dict(load_checkpoint(tmp_path / "state"))
    assert restored.push_count == 7
    for _ in range(5):
        assert restored.sample(3, 0) == buffer.sample(3, 0)


def test_a_restored_buffer_can_copy_the_items_of_the_state():
    buffer = naive()
    buffer.push({"obs": [1]}, 0)
    state = buffer.state_dict()
    shared, copied = naive(), naive()
    shared.load_state_dict(state)
    copied.load_state_dict(state, deepcopy=True)
    state["items"]["items"][0][1]["obs"][0] = 2
    assert shared.sample(1, 0) == [{"obs": [2]}]
    assert copied.sample(1, 0) == [{"obs": [1]}]


def test_a_state_of_another_buffer_is_refused():
    with pytest.raises(CheckpointMismatch, match="push_count"):
        naive().load_state_dict({"items": {}})
    with pytest.raises(CheckpointMismatch, match="size"):
        naive(size=4).load_state_dict(naive().state_dict())


def test_the_buffer_logs_what_came_and_went(tmp_path):
    clock, scalars = Clock(), Scalars()
    buffer = NaiveReplayBuffer(
        {"replay_buffer_size": 5}, scalars, str(tmp_path), "mine", clock=clock
    )
    buffer.push(list(range(7)), 0)
    buffer.sample(3, 0)
    assert scalars.written == {}
    clock.now += 60
    buffer.sample(1, 0)
    assert scalars.written == {
        "mine_sec/pushed_in": (7, 60),
        "mine_sec/sampled_out": (3, 60),
        "mine_sec/removed": (2, 60),
        "mine_sec/current_have": (5, 60),
    }
    clock.now += 60
    buffer.push(1, 0)
    assert scalars.written["mine_sec/sampled_out"] == (1, 120)
    assert scalars.written["mine_sec/removed"] == (0, 120)
    buffer.close()
    text = (tmp_path / "log" / "mine" / "mine_logger.txt").read_text()
    assert text.count("pushed_in") == 2


def test_restored_items_are_not_logged_as_removed():
    source, clock, scalars = naive(), Clock(), Scalars()
    source.push([1, 2, 3], 0)
    buffer = NaiveReplayBuffer(
        {"replay_buffer_size": 5, "log_to_file": False}, scalars, clock=clock
    )
    buffer.load_state_dict(source.state_dict())
    clock.now += 60
    buffer.push(4, 0)
    assert scalars.written["buffer_sec/removed"] == (0, 60)
    assert scalars.written["buffer_sec/current_have"] == (3, 60)


def test_the_buffer_writes_nothing_without_need(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = NaiveReplayBuffer()
    buffer.push([1], 0)
    buffer.sample(1, 0)
    buffer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_created_writer_is_closed_with_the_buffer(tmp_path):
    clock = Clock()
    buffer = NaiveReplayBuffer({}, None, str(tmp_path), clock=clock)
    clock.now += 60
    buffer.push([1], 0)
    buffer.close()
    assert list((tmp_path / "log" / "buffer").glob("events*"))


@pytest.mark.parametrize(
    ("cfg", "word"),
    [
        ({"replay_buffer_size": 0}, "replay_buffer_size"),
        ({"max_use": 1}, "max_use"),
        ({"deepcopy": 1}, "deepcopy"),
    ],
)
def test_unusable_configs_are_refused(cfg, word):
    with pytest.raises(ConfigError, match=word):
        NaiveReplayBuffer(cfg)


def test_unusable_arguments_are_refused():
    with pytest.raises(ConfigError, match="clock"):
        NaiveReplayBuffer({}, clock=3)
    with pytest.raises(ConfigError, match="SummaryWriter"):
        NaiveReplayBuffer({}, "a folder")


def test_an_elastic_buffer_draws_from_its_newest_items():
    cfg = {"replay_buffer_size": 10, "set_buffer_size": lambda envstep: 2 + envstep}
    buffer = ElasticReplayBuffer(cfg | {"log_to_file": False})
    buffer.push(list(range(15)), 0)
    assert sorted(buffer.sample(2, 0)) == [13, 14]
    assert buffer.sample(3, 0) is None
    buffer.update(2)
    assert sorted(buffer.sample(4, 0)) == [11, 12, 13, 14]
    assert sorted(buffer.sample(2, 0, sample_range=slice(None, 2))) == [11, 12]
    assert sorted(buffer.sample(4, 0, sample_range=slice(None, None, -1))) == [11, 12, 13, 14]
    restored = ElasticReplayBuffer(cfg | {"log_to_file": False})
    restored.load_state_dict(buffer.state_dict())
    assert sorted(restored.sample(4, 0)) == [11, 12, 13, 14]
    buffer.update(100)
    assert len(buffer.sample(10, 0)) == 10
    assert len(buffer.sample(10, 0, sample_range=slice(None, None, -1))) == 10


def test_an_elastic_buffer_needs_a_schedule():
    with pytest.raises(ConfigError, match="set_buffer_size"):
        ElasticReplayBuffer({})
    with pytest.raises(ValueError, match="at least 1"):
        ElasticReplayBuffer({"set_buffer_size": lambda envstep: 0})


def test_buffers_are_created_by_name(tmp_path):
    buffer = create_buffer({"type": "naive", "replay_buffer_size": 3}, None, str(tmp_path), "mine")
    assert isinstance(buffer, NaiveReplayBuffer)
    assert "mine" in repr(buffer)
    assert isinstance(create_buffer({}), AdvancedReplayBuffer)
    names = {
        "naive": NaiveReplayBuffer,
        "elastic": ElasticReplayBuffer,
        "sequence": SequenceReplayBuffer,
        "episode": EpisodeReplayBuffer,
        "advanced": AdvancedReplayBuffer,
    }
    assert set(names) <= set(BUFFER_REGISTRY)
    assert {name: get_buffer_cls({"type": name}) for name in names} == names
    with pytest.raises(RegistryError, match="naive"):
        create_buffer({"type": "naiv"})


def test_modules_of_own_buffers_are_imported_first():
    with pytest.raises(ModuleNotFoundError, match="not_a_module"):
        get_buffer_cls({"type": "mine", "import_names": ["not_a_module"]})


class NewestBuffer(IBuffer):
    """Draws the newest items, as an own buffer of a program might."""

    def sample(self, size, cur_learner_iter):
        return self._draw(size, lambda: [item.data for item in self._items][-size:])


def test_an_own_buffer_needs_only_its_sampling():
    clock, scalars = Clock(), Scalars()
    buffer = NewestBuffer({"log_to_file": False}, scalars, clock=clock)
    buffer.push([1, 2, 3], 0)
    clock.now += 60
    assert buffer.sample(2, 0) == [2, 3]
    assert scalars.written["buffer_sec/pushed_in"] == (3, 60)


ACTIONS = st.one_of(
    st.tuples(st.just("push"), st.lists(st.integers(), max_size=4)),
    st.tuples(st.just("sample"), st.integers(0, 6)),
    st.tuples(st.just("newest"), st.integers(1, 4)),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("reload"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(ACTIONS, max_size=30))
def test_the_buffer_behaves_like_a_list(size, actions):
    buffer, model, pushed = naive(size=size), [], 0
    for action, value in actions:
        if action == "push":
            buffer.push(value, 0)
            model, pushed = [*model, *value][-size:], pushed + len(value)
        elif action == "clear":
            buffer.clear()
            model, pushed = [], 0
        elif action == "reload":
            state, buffer = buffer.state_dict(), naive(size=size)
            buffer.load_state_dict(state)
        else:
            part = slice(-value, None) if action == "newest" else None
            drawn = buffer.sample(value, 0, sample_range=part)
            if len(model) < value:
                assert drawn is None
            elif action == "newest":
                assert sorted(drawn) == sorted(model[part])
            else:
                assert len(drawn) == value
                assert set(drawn) <= set(model)
        assert (buffer.count(), buffer.push_count) == (len(model), pushed)


def hammer(buffer, n_threads, n_operations):
    """Run operations in threads; return the errors and the greatest count seen."""
    errors, counts = [], [0]

    def work(seed):
        generator = np.random.default_rng(seed)
        try:
            for n in range(n_operations):
                kind = generator.integers(4)
                if kind < 2:
                    buffer.push([{"n": n}] * int(generator.integers(1, 4)), n)
                elif kind == 2:
                    drawn = buffer.sample(4, n)
                    assert drawn is None or len(drawn) == 4
                    if drawn and "replay_unique_id" in drawn[0]:
                        info = {key: [one[key] for one in drawn] for key in drawn[0]}
                        buffer.update(info)
                else:
                    counts[0] = max(counts[0], buffer.count())
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return errors, counts[0]


@pytest.mark.parametrize("cls", [NaiveReplayBuffer, AdvancedReplayBuffer])
def test_threads_never_exceed_the_size(cls, tmp_path):
    buffer = cls({"replay_buffer_size": 50, "log_to_file": False}, exp_name=str(tmp_path))
    errors, greatest = hammer(buffer, n_threads=8, n_operations=300)
    assert errors == []
    assert greatest == buffer.count() == 50
    buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [NaiveReplayBuffer, AdvancedReplayBuffer])
def test_many_threads_never_exceed_the_size(cls, tmp_path):
    buffer = cls({"replay_buffer_size": 50, "log_to_file": False}, exp_name=str(tmp_path))
    errors, greatest = hammer(buffer, n_threads=8, n_operations=10_000)
    assert errors == []
    assert greatest == buffer.count() == 50
    buffer.close()


@pytest.mark.parametrize("make", [NaiveReplayBuffer, AdvancedReplayBuffer])
def test_files_and_states_are_also_passed_by_the_classic_keywords(make, tmp_path):
    def buffer():
        return make({"seed": 0, "log_to_file": False}, exp_name=str(tmp_path))

    first, second, third = buffer(), buffer(), buffer()
    first.push([{"a": n} for n in range(4)], 4)
    first.save_data(file_name=str(tmp_path / "items"))
    second.load_data(file_name=str(tmp_path / "items"))
    third.load_state_dict(_state_dict=first.state_dict())
    assert second.count() == third.count() == 4
    with pytest.raises(TypeError, match="both"):
        first.save_data(file="x", file_name="y")
