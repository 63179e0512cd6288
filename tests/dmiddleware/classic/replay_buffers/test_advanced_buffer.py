import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import AdvancedReplayBuffer, NaiveReplayBuffer
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError
from tests.dmiddleware.classic.replay_buffers.clock import Clock
from tests.dmiddleware.classic.replay_buffers.test_naive_buffer import Scalars


def advanced(clock=None, writer=None, instance_name="buffer", **cfg):
    cfg = {"replay_buffer_size": 8, "seed": 0, "log_to_file": False} | cfg
    return AdvancedReplayBuffer(
        cfg, writer or Scalars(), instance_name=instance_name, clock=clock or Clock()
    )


def items(n, **further):
    return [{"obs": i, **further} for i in range(n)]


def info_of(samples, priority):
    return {
        "replay_unique_id": [one["replay_unique_id"] for one in samples],
        "replay_buffer_idx": [one["replay_buffer_idx"] for one in samples],
        "priority": priority,
    }


def everything(buffer, cur_learner_iter=0):
    """Draw until every item was drawn; return one sample of each by unique id."""
    found = {}
    while len(found) < buffer.count():
        for one in buffer.sample(1, cur_learner_iter):
            found[one["replay_unique_id"]] = one
    return found


def rate(low=0.0, high=math.inf, **cfg):
    return {"thruput_controller": {"push_sample_rate_limit": {"min": low, "max": high}, **cfg}}


def test_the_defaults_are_the_classic_ones():
    default = AdvancedReplayBuffer.default_config()
    assert default.replay_buffer_size == 4096
    assert default.max_use == default.max_staleness == math.inf
    assert (default.alpha, default.beta, default.anneal_step) == (0.6, 0.4, 100_000)
    assert default.enable_track_used_data is default.deepcopy is False
    assert default.thruput_controller == {
        "push_sample_rate_limit": {"min": 0, "max": math.inf},
        "window_seconds": 30,
        "sample_min_limit_ratio": 1,
    }
    assert default.monitor == {
        "sampled_data_attr": {"average_range": 5, "print_freq": 200},
        "periodic_thruput": {"seconds": 60},
    }


def test_samples_say_which_item_they_are_and_how_it_was_used():
    buffer = advanced(instance_name="mine")
    buffer.push(items(10, collect_iter=3), 0)
    samples = buffer.sample(4, 5)
    for one in samples:
        number = one["obs"]
        assert one["replay_unique_id"] == f"mine_{number}"
        assert one["replay_buffer_idx"] == number % 8
        assert one["priority"] == 1.0
        assert one["IS"] == 1.0
        assert one["use"] >= 1
        assert one["staleness"] == 2
    assert set(samples[0]) == {
        "obs", "collect_iter", "replay_unique_id", "replay_buffer_idx", "priority", "IS", "use",
        "staleness",
    }  # fmt: skip


def test_what_was_pushed_is_not_changed():
    buffer = advanced()
    pushed = items(8)
    buffer.push(pushed, 0)
    buffer.sample(4, 0)
    assert pushed == items(8)


def test_samples_of_plain_items_are_json():
    buffer = advanced(enable_track_used_data=True)
    buffer.push([{"data_id": "a", "priority": 1.0, "collect_iter": 2}], 0)
    samples = buffer.sample(1, 3)
    assert json.loads(json.dumps(samples)) == samples


def test_copies_protect_the_items_if_asked_for():
    buffer = advanced(deepcopy=True)
    item = {"obs": [1]}
    buffer.push(item, 0)
    item["obs"][0] = 2
    buffer.sample(1, 0)[0]["obs"][0] = 3
    assert buffer.sample(1, 0)[0]["obs"] == [1]


def test_unique_ids_never_repeat():
    buffer = advanced()
    buffer.push(items(5), 0)
    before = set(everything(buffer))
    buffer.clear()
    assert buffer.push_count == 0
    buffer.push(items(5), 0)
    assert not before & set(everything(buffer))


def test_only_dictionaries_are_held_and_others_are_counted():
    buffer = advanced()
    assert buffer.push([{"obs": 1}, 2, None], 0)
    assert not buffer.push("text", 0)
    assert buffer.push([], 0)
    assert (buffer.count(), buffer.push_count) == (1, 1)
    assert buffer.counters["refused_items"] == 3


def test_new_items_have_their_own_priority_or_the_highest_so_far():
    buffer = advanced()
    buffer.push([{"priority": 3.0}, {"priority": torch.tensor(0.5)}, {"priority": None}, {}], 0)
    found = everything(buffer)
    assert [found[f"buffer_{i}"]["priority"] for i in range(4)] == [3.0, 0.5, 3.0, 3.0]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_impossible_priorities_are_refused_and_nothing_is_stored(bad):
    buffer = advanced()
    with pytest.raises(ValueError, match="priority"):
        buffer.push([{"priority": 1.0}, {"priority": bad}], 0)
    assert buffer.count() == 0


def test_items_are_drawn_in_proportion_to_their_weight():
    buffer = advanced(alpha=0.5)
    buffer.push([{"priority": p} for p in (1.0, 4.0, 16.0)], 0)
    drawn = [one["replay_buffer_idx"] for _ in range(1000) for one in buffer.sample(1, 0)]
    assert np.bincount(drawn) / 1000 == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.06)


def test_draws_of_a_batch_are_stratified():
    buffer = advanced()
    buffer.push(items(8), 0)
    assert sorted(one["obs"] for one in buffer.sample(8, 0)) == list(range(8))


def test_importance_weights_are_those_of_the_formula():
    buffer = advanced(alpha=0.6, beta=0.4, anneal_step=0)
    priorities = [1.0, 2.0, 0.1, 5.0]
    buffer.push([{"priority": p} for p in priorities], 0)
    probability = np.array(priorities) ** 0.6 / np.sum(np.array(priorities) ** 0.6)
    weight = (4 * probability) ** -0.4
    samples = buffer.sample(4, 0)
    drawn = [one["replay_buffer_idx"] for one in samples]
    expected = weight[drawn] / weight[drawn].max()
    assert [one["IS"] for one in samples] == pytest.approx(expected, rel=1e-6)


def test_beta_grows_to_one_and_can_be_set():
    buffer = advanced(beta=0.4, anneal_step=3)
    buffer.push(items(8), 0)
    seen = []
    for _ in range(5):
        seen.append(buffer.beta)
        buffer.sample(1, 0)
    assert seen == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])
    buffer.beta = 0.7
    assert buffer.beta == 0.7
    buffer.sample(1, 0)
    assert buffer.beta == pytest.approx(0.8)
    with pytest.raises(ValueError, match="beta"):
        buffer.beta = 2.0


def test_without_annealing_beta_stays():
    buffer = advanced(anneal_step=0)
    buffer.push(items(8), 0)
    buffer.sample(1, 0)
    assert buffer.beta == 0.4


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_updates_set_priorities(kind):
    buffer = advanced()
    buffer.push(items(3), 0)
    found = everything(buffer)
    info = info_of(list(found.values()), kind([float(one["obs"]) for one in found.values()]))
    info["replay_buffer_idx"] = kind(info["replay_buffer_idx"])
    buffer.update(info)
    state = buffer.state_dict()["items"]["items"]
    assert [meta["priority"] for _, _, meta in state] == [1e-5, 1 + 1e-5, 2 + 1e-5]
    buffer.push({"obs": "new"}, 0)
    assert buffer.state_dict()["items"]["items"][-1][2]["priority"] == 2 + 1e-5


def test_updates_of_overwritten_items_are_skipped_and_counted():
    buffer = advanced()
    buffer.push(items(8), 0)
    samples = buffer.sample(8, 0)
    buffer.push(items(3), 0)
    buffer.update(info_of(samples, [9.0] * 8))
    metas = {index: meta for index, _, meta in buffer.state_dict()["items"]["items"]}
    assert [metas[i]["priority"] > 2 for i in range(3, 11)] == [True] * 5 + [False] * 3
    assert buffer.counters["skipped_updates"] == 3


@pytest.mark.parametrize("unique_id", ["other_0", "buffer_x", "buffer_5", "buffer", "buffer_1"])
def test_updates_of_unknown_items_are_skipped(unique_id):
    buffer = advanced()
    buffer.push(items(2), 0)
    info = {"replay_unique_id": [unique_id], "replay_buffer_idx": [0], "priority": [2.0]}
    buffer.update(info)
    assert buffer.counters["skipped_updates"] == 1


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_impossible_updates_change_nothing(bad):
    buffer = advanced()
    buffer.push(items(2), 0)
    before = copy.deepcopy(buffer.state_dict()["items"]["items"])
    samples = [{"replay_unique_id": f"buffer_{i}", "replay_buffer_idx": i} for i in range(2)]
    with pytest.raises(ValueError, match="priorit"):
        buffer.update(info_of(samples, [5.0, bad]))
    with pytest.raises(ValueError, match="2 ids"):
        buffer.update(info_of(samples, [5.0]))
    with pytest.raises(ValueError, match="replay_unique_id"):
        buffer.update({"priority": [5.0]})
    buffer.update({})
    assert buffer.state_dict()["items"]["items"] == before


def test_stale_items_go_before_a_sample():
    buffer = advanced(max_staleness=3)
    buffer.push([{"collect_iter": i} for i in (0, 1, 2)], 0)
    buffer.push([{"collect_iter": [5, 1]}, {"obs": 1}, {"collect_iter": torch.tensor(2)}], 0)
    assert {one["staleness"] for one in buffer.sample(6, 2)} == {2, 1, 0, -1}
    drawn = buffer.sample(3, 4)
    assert buffer.count() == 3
    assert sorted(one["staleness"] for one in drawn) == [-1, 2, 2]
    assert buffer.sample(4, 4) is None


def test_items_go_after_their_last_use():
    buffer = advanced(max_use=2)
    buffer.push(items(4), 0)
    assert {one["use"] for one in buffer.sample(4, 0)} == {1}
    assert buffer.count() == 4
    assert {one["use"] for one in buffer.sample(4, 0)} == {2}
    assert buffer.count() == 0
    assert buffer.sample(1, 0) is None


def test_a_sample_may_be_limited_by_age():
    buffer = advanced()
    buffer.push(items(11), 0)
    drawn = {one["obs"] for _ in range(20) for one in buffer.sample(2, 0, slice(-3, None))}
    assert drawn == {8, 9, 10}
    assert buffer.sample(1, 0, slice(0, 0)) is None


def test_too_few_items_give_none():
    buffer = advanced(**rate(sample_min_limit_ratio=2))
    buffer.push(items(7), 0)
    assert buffer.sample(0, 0) == []
    assert buffer.sample(4, 0) is None
    assert len(buffer.sample(3, 0)) == 3


def test_a_small_ratio_lets_samples_exceed_the_buffer():
    buffer = advanced(**rate(sample_min_limit_ratio=0.5))
    assert buffer.sample(1, 0) is None
    buffer.push(items(3), 0)
    assert len(buffer.sample(6, 0)) == 6
    assert buffer.sample(7, 0) is None


def test_a_reader_that_is_too_fast_waits_for_pushes():
    buffer = advanced(**rate(low=0.5))
    buffer.push(items(4), 0)
    assert buffer.sample(4, 0) is not None
    assert buffer.sample(4, 0) is not None
    assert buffer.sample(1, 0) is None
    assert buffer.counters["refused_samples"] == 1
    buffer.push(items(4), 0)
    assert buffer.sample(4, 0) is not None


def test_a_writer_that_is_too_fast_is_refused_and_told():
    buffer = advanced(**rate(high=2))
    assert buffer.push(items(6), 0)
    assert buffer.push(items(2), 0)
    buffer.sample(5, 0)
    assert buffer.push(items(2), 0)
    assert not buffer.push(items(1), 0)
    assert buffer.counters["refused_pushes"] == 1
    assert buffer.push_count == 10
    buffer.sample(5, 0)
    assert buffer.push(items(1), 0)


def test_counts_of_the_rate_decay_to_a_hundredth_in_a_window():
    clock = Clock()
    buffer = advanced(clock, **rate(high=2, window_seconds=10))
    buffer.push(items(8), 0)
    buffer.sample(8, 0)
    clock.now += 10
    assert buffer.state_dict()["rate"] == pytest.approx({"n_pushed": 0.08, "n_sampled": 0.08})
    assert not buffer.push(items(1), 0)
    clock.now += 30
    assert buffer.push(items(1), 0)  # nobody has sampled for a long time


@pytest.mark.parametrize("low, high", [(2, 1), (1, 1)])
def test_a_rate_that_nothing_can_keep_is_refused(low, high):
    with pytest.raises(ConfigError, match="max"):
        advanced(**rate(low=low, high=high))


def test_attributes_of_samples_are_logged(tmp_path):
    writer = Scalars()
    buffer = advanced(
        writer=writer, monitor={"sampled_data_attr": {"average_range": 2, "print_freq": 3}}
    )
    buffer.push([{"collect_iter": 1, "priority": 2.0}] * 2, 40)
    buffer.sample(2, 1)
    buffer.sample(2, 2)
    assert writer.written == {}
    buffer.sample(2, 4)
    by_name = {
        "use_avg": 2.5, "use_max": 2.5, "staleness_avg": 2.0, "staleness_max": 2.0,
        "priority_avg": 2.0, "priority_max": 2.0, "priority_min": 2.0,
    }  # fmt: skip
    expected = {f"buffer_iter/{name}": (value, 4) for name, value in by_name.items()}
    expected |= {f"buffer_step/{name}": (value, 40) for name, value in by_name.items()}
    assert writer.written == expected


def test_the_buffer_logs_what_came_and_went():
    clock, writer = Clock(), Scalars()
    buffer = advanced(clock, writer, monitor={"periodic_thruput": {"seconds": 5}}, max_use=1)
    buffer.push(items(10), 0)
    buffer.sample(8, 0)
    clock.now += 5
    buffer.push(items(1), 0)
    assert {name: value for name, (value, _) in writer.written.items()} == {
        "buffer_sec/pushed_in": 10,
        "buffer_sec/sampled_out": 8,
        "buffer_sec/removed": 10,
        "buffer_sec/current_have": 0,
    }


def test_a_restored_buffer_continues_exactly(tmp_path):
    clock = Clock()
    cfg = {"max_use": 4, "max_staleness": 6, **rate(low=0.1, high=9)}
    buffer, restored = advanced(clock, **cfg), advanced(clock, **cfg)
    buffer.push([{"obs": i, "collect_iter": i} for i in range(12)], 3)
    buffer.update(info_of(buffer.sample(4, 12), [3.0, 2.0, 0.1, 9.0]))
    buffer.push([1], 3)
    buffer.beta = 0.9
    save_checkpoint(tmp_path / "state", buffer.state_dict())
    restored.load_state_dict(load_checkpoint(tmp_path / "state"))
    for key in ("push_count", "counters", "rate", "n_samples", "envstep"):
        assert restored.state_dict()[key] == buffer.state_dict()[key]
    assert restored.counters["refused_items"] == 1
    assert restored.beta == buffer.beta
    for n in range(10):
        push = {"obs": n, "collect_iter": 12 + n}
        assert restored.push(push, n) == buffer.push(push, n)
        drawn = buffer.sample(3, 12 + n)
        assert restored.sample(3, 12 + n) == drawn
        for one in (buffer, restored):
            one.update(info_of(drawn or [], [float(n)] * len(drawn or [])))


def test_items_keep_their_priority_in_a_file(tmp_path):
    buffer = advanced()
    buffer.push([{"obs": 1, "priority": 4.0}, {"obs": 2}], 0)
    buffer.save_data(tmp_path / "items")
    loaded = advanced(instance_name="other")
    loaded.load_data(tmp_path / "items")
    assert loaded.push_count == 2
    assert everything(loaded)["other_0"]["priority"] == 4.0


def test_items_of_another_buffer_can_be_loaded(tmp_path):
    source = NaiveReplayBuffer({"log_to_file": False})
    source.push([{"obs": 1, "priority": 4.0, "collect_iter": 3}, {"obs": 2}], 0)
    source.save_data(tmp_path / "items")
    buffer = advanced()
    buffer.load_data(tmp_path / "items")
    found = everything(buffer, cur_learner_iter=5)
    assert [found[f"buffer_{n}"]["priority"] for n in range(2)] == [4.0, 4.0]
    assert [found[f"buffer_{n}"]["staleness"] for n in range(2)] == [2, -1]
    source.push("text", 0)
    source.save_data(tmp_path / "items")
    with pytest.raises(TypeError, match="dictionaries"):
        buffer.load_data(tmp_path / "items")


PRIORITY = st.one_of(st.none(), st.floats(0.01, 100))
ACTIONS = st.one_of(
    st.tuples(st.just("push"), st.lists(PRIORITY, max_size=4)),
    st.tuples(st.just("sample"), st.integers(1, 5)),
    st.tuples(st.just("update"), st.tuples(st.integers(0, 30), st.floats(0, 50))),
    st.tuples(st.just("learn"), st.integers(0, 3)),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("reload"), st.none()),
)
CFG = {"replay_buffer_size": 5, "max_use": 4, "max_staleness": 5, "anneal_step": 6}


class Model:
    """A buffer and a dictionary of items that must agree with it."""

    def __init__(self):
        self.buffer = advanced(**CFG)
        self.held, self.n_pushed, self.highest, self.beta, self.at = {}, 0, 1.0, 0.4, 0

    def push(self, priorities):
        for priority in priorities:
            own = {} if priority is None else {"priority": priority}
            self.buffer.push({"n": self.n_pushed, "collect_iter": self.at, **own}, 0)
            priority = self.highest if priority is None else priority
            self.held[self.n_pushed] = [priority, 0, self.at]
            self.held.pop(self.n_pushed - 5, None)
            self.highest, self.n_pushed = max(self.highest, priority), self.n_pushed + 1

    def update(self, value):
        n, priority = value
        sample = {"replay_unique_id": f"buffer_{n}", "replay_buffer_idx": n % 5}
        self.buffer.update(info_of([sample], [priority]))
        if n in self.held:
            self.held[n][0] = priority + 1e-5
            self.highest = max(self.highest, priority + 1e-5)

    def learn(self, iterations):
        self.at += iterations

    def clear(self, _):
        self.buffer.clear()
        self.held = {}

    def reload(self, _):
        state, self.buffer = self.buffer.state_dict(), advanced(**CFG)
        self.buffer.load_state_dict(state)

    def sample(self, size):
        self.held = {n: one for n, one in self.held.items() if self.at - one[2] < 5}
        samples = self.buffer.sample(size, self.at)
        assert (samples is None) == (len(self.held) < size)
        if samples is None:
            return
        mass = {n: one[0] ** 0.6 for n, one in self.held.items()}
        scale = len(self.held) / sum(mass.values())
        weight = {n: (scale * m) ** -self.beta for n, m in mass.items()}
        self.beta = min(self.beta + 0.1, 1.0)
        largest = max(weight[one["n"]] for one in samples)
        for one in samples:
            self.held[one["n"]][1] += 1
        for one in samples:
            priority, use, collected = self.held[one["n"]]
            assert one["replay_unique_id"] == f"buffer_{one['n']}"
            assert one["priority"] == priority
            assert one["IS"] == pytest.approx(weight[one["n"]] / largest, rel=1e-5)
            assert (one["use"], one["staleness"]) == (use, self.at - collected)
        self.held = {n: one for n, one in self.held.items() if one[1] < 4}


@settings(max_examples=80, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_the_buffer_behaves_like_a_dictionary_of_items_with_priorities(actions):
    model = Model()
    for action, value in actions:
        getattr(model, action)(value)
        assert model.buffer.count() == len(model.held)
        assert model.buffer.beta == pytest.approx(model.beta)
