import copy
import logging
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import BufferedData, DequeBuffer
from dmiddleware.classic.buffer_middleware import PriorityExperienceReplay, use_time_check
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import CheckpointDamaged, CheckpointMismatch, NotEnoughData


def filled(size=10, n=8, seed=0):
    buffer = DequeBuffer(size, seed=seed)
    for i in range(n):
        buffer.push(f"item {i}", {"episode": i // 3, "n": i})
    return buffer


def test_items_are_returned_as_they_were_pushed():
    buffer = DequeBuffer(3)
    assert [buffer.push(c, {"c": c}) for c in "abcd"] == [0, 1, 2, 3]
    assert len(buffer) == buffer.count() == 3
    assert buffer.get(3) == BufferedData("d", 3, {"c": "d"})
    assert [item.data for item in buffer] == ["b", "c", "d"]
    assert 0 not in buffer
    assert 1 in buffer
    with pytest.raises(IndexError, match="does not hold item 0"):
        buffer.get(0)


def test_sampling_without_replacement_returns_different_items():
    buffer = filled()
    assert sorted(item.index for item in buffer.sample(8)) == list(range(8))
    counts = Counter(item.index for _ in range(400) for item in buffer.sample(4))
    assert all(140 < counts[i] < 260 for i in range(8))


def test_sampling_with_replacement_can_return_more_than_the_buffer_holds():
    assert len(filled().sample(50, replace=True)) == 50


def test_items_are_fetched_in_the_order_of_the_indices():
    buffer = filled()
    assert [item.index for item in buffer.sample(indices=[5, 2, 5])] == [5, 2, 5]
    with pytest.raises(NotEnoughData, match="asked for 2 items, but only 1"):
        buffer.sample(indices=[1, 99])
    assert [i.index for i in buffer.sample(indices=[1, 99], ignore_insufficient=True)] == [1]
    assert buffer.sample(
        indices=[7, 2], sample_range=slice(-2, None), ignore_insufficient=True
    ) == [buffer.get(7)]


def test_sample_range_limits_draws_by_age():
    buffer = filled(size=6, n=8)
    newest = {item.index for item in buffer.sample(100, replace=True, sample_range=slice(-2, None))}
    assert newest == {6, 7}
    every_other = buffer.sample(3, sample_range=slice(None, None, 2))
    assert {item.index for item in every_other} == {2, 4, 6}


def test_a_group_has_all_items_with_the_same_value_of_a_key():
    buffer = filled()
    groups = buffer.sample(3, groupby="episode")
    assert sorted([item.index for item in group] for group in groups) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]
    buffer.push("alone")  # belongs to no group
    assert len(buffer.sample(3, groupby="episode")) == 3
    with pytest.raises(NotEnoughData, match="asked for 4 groups, but only 3"):
        buffer.sample(4, groupby="episode")
    assert len(buffer.sample(4, groupby="episode", replace=True)) == 4
    part = buffer.sample(1, groupby="episode", sample_range=slice(1, 3))
    assert [item.index for item in part[0]] == [1, 2]


def test_sequences_of_groups_are_consecutive():
    buffer = filled()
    seen = set()
    for _ in range(60):
        for group in buffer.sample(2, groupby="episode", unroll_len=2):
            indices = [item.index for item in group]
            seen.add(tuple(indices))
    assert seen == {(0, 1), (1, 2), (3, 4), (4, 5), (6, 7)}
    with pytest.raises(NotEnoughData, match="asked for 3 groups, but only 2"):
        buffer.sample(3, groupby="episode", unroll_len=3)


def test_an_updated_item_moves_to_its_new_group_at_its_age():
    buffer = filled()
    buffer.sample(1, groupby="episode")
    assert buffer.update(1, data="new", meta={"episode": 2})
    groups = buffer.sample(3, groupby="episode")
    assert [1, 6, 7] in [[item.index for item in group] for group in groups]
    assert buffer.get(1) == BufferedData("new", 1, {"episode": 2, "n": 1})
    assert buffer.update(1, meta={"n": 5})
    assert buffer.get(1).data == "new"
    assert not buffer.update(99, data="x")


def test_changing_a_sample_does_not_change_the_metadata_in_the_buffer():
    buffer = filled()
    buffer.sample(8)[0].meta["n"] = -1
    assert [item.meta["n"] for item in buffer] == list(range(8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a size or the indices"),
        ({"size": 2, "indices": [1]}, "size is 2, but there are 1 indices"),
        ({"indices": [1], "groupby": "episode"}, "only one of them"),
        ({"size": 1, "unroll_len": 2}, "needs groupby"),
        ({"size": 1, "unroll_len": 0, "groupby": "episode"}, "at least 1"),
        ({"size": -1}, "at least 0"),
    ],
)
def test_options_that_contradict_one_another_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        filled().sample(**options)


def test_values_that_cannot_be_grouped_are_rejected():
    buffer = DequeBuffer(2)
    buffer.push("a", {"episode": [1]})
    for _ in range(2):
        with pytest.raises(TypeError, match=r"meta\['episode'\].* item 0 .* cannot be hashed"):
            buffer.sample(1, groupby="episode")


@pytest.mark.parametrize("odd", [[1], (1, [2])])
def test_an_item_that_cannot_be_grouped_is_rejected_and_the_others_stay(odd):
    buffer = DequeBuffer(3)
    for number in range(3):
        buffer.push(number, {"episode": number})
    buffer.sample(1, groupby="episode")
    with pytest.raises(TypeError, match=r"item 3 .* cannot be hashed"):
        buffer.push(3, {"episode": odd})
    with pytest.raises(TypeError, match=r"item 1 .* cannot be hashed"):
        buffer.update(1, "new", {"episode": odd})
    assert [item.data for item in buffer] == [0, 1, 2]
    assert len(buffer.sample(3, groupby="episode")) == 3
    assert buffer.push(3, {"episode": 1}) == 3
    groups = buffer.sample(2, groupby="episode")
    assert sorted([item.data for item in group] for group in groups) == [[1, 3], [2]]


def test_too_few_items_can_be_a_warning(caplog):
    buffer = filled()
    with pytest.raises(NotEnoughData, match="asked for 9 items, but only 8"):
        buffer.sample(9)
    with caplog.at_level(logging.WARNING):
        assert len(buffer.sample(9, ignore_insufficient=True)) == 8
    assert "asked for 9 items, but only 8" in caplog.text
    assert DequeBuffer(2).sample(3, replace=True, ignore_insufficient=True) == []
    with pytest.raises(NotEnoughData):
        DequeBuffer(2).sample(3, replace=True)


class Model:
    """A literal model of a DequeBuffer."""

    def __init__(self, size):
        self.size, self.total, self.items = size, 0, {}

    def push(self, data, meta):
        self.items[self.total] = (data, meta)
        self.items.pop(self.total - self.size, None)
        self.total += 1

    def groups(self):
        values = {meta["g"] for _, meta in self.items.values() if "g" in meta}
        return sorted(
            [i for i, (_, meta) in self.items.items() if meta.get("g") == v] for v in values
        )


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "push", "update", "delete", "clear", "reload"]),
            st.integers(0, 20),
            st.integers(0, 3),
        ),
        max_size=30,
    ),
)
def test_it_holds_what_a_naive_model_holds(size, actions):
    buffer, model = DequeBuffer(size, seed=0), Model(size)
    for name, number, group in actions:
        meta = {"g": group} if group else {}
        if name == "push":
            assert buffer.push(number, meta) == model.total
            model.push(number, meta)
        elif name == "update":
            held = number in model.items
            assert buffer.update(number, number + 100, meta) == held
            if held:
                model.items[number] = (number + 100, {**model.items[number][1], **meta})
        elif name == "delete":
            wanted = [number, number + 1, number]
            gone = [i for i in set(wanted) if i in model.items]
            assert buffer.delete(wanted) == len(gone)
            for i in gone:
                del model.items[i]
        elif name == "clear":
            buffer.clear()
            model.items.clear()
        else:
            other = DequeBuffer(size, seed=1)
            other.load_state_dict(buffer.state_dict())
            buffer = other
        assert [(i.index, i.data, i.meta) for i in buffer] == [
            (i, *item) for i, item in model.items.items()
        ]
        assert len(buffer) == len(model.items)
        groups = buffer.sample(len(model.groups()), groupby="g")
        assert sorted([item.index for item in group] for group in groups) == model.groups()
        if model.items:
            k = number % len(model.items)
            part = buffer.sample(len(model.items) - k, sample_range=slice(k, None))
            assert {item.index for item in part} == set(list(model.items)[k:])


def test_a_loaded_buffer_draws_what_the_original_draws(tmp_path):
    buffer, other = filled(size=6), DequeBuffer(6, seed=5)
    buffer.update(3, meta={"episode": 7})
    buffer.delete([4])
    buffer.sample(2, groupby="episode")
    save_checkpoint(tmp_path / "b.safetensors", buffer.state_dict())
    other.load_state_dict(load_checkpoint(tmp_path / "b.safetensors"))
    for n in range(12):
        assert buffer.push(n, {"episode": n // 2}) == other.push(n, {"episode": n // 2})
        assert buffer.sample(4) == other.sample(4)
        assert buffer.sample(2, groupby="episode") == other.sample(2, groupby="episode")
    with pytest.raises(CheckpointMismatch, match="size=6, but this one has size=7"):
        DequeBuffer(7).load_state_dict(buffer.state_dict())


def test_data_is_saved_without_pickle_if_possible(tmp_path):
    path = tmp_path / "data.safetensors"
    buffer = DequeBuffer(4)
    buffer.push({"obs": torch.ones(2), "n": 3}, {"episode": 1})
    buffer.save_data(path)
    other = DequeBuffer(4)
    other.push("forgotten")
    other.load_data(path)
    assert len(other) == 1
    item = other.sample(1)[0]
    assert torch.equal(item.data["obs"], torch.ones(2))
    assert item.meta == {"episode": 1}


class Opaque:
    def __eq__(self, other):
        return isinstance(other, Opaque)

    __hash__ = None


def test_pickle_is_used_only_if_both_sides_allow_it(tmp_path):
    path = tmp_path / "data.safetensors"
    buffer = DequeBuffer(4)
    buffer.push(Opaque())
    with pytest.raises(TypeError, match=r"state\['items'\]\[0\]\[0\] is of type .*Opaque"):
        buffer.save_data(path)
    assert not path.exists()
    buffer.save_data(path, allow_pickle=True)
    with pytest.raises(ValueError, match="pass allow_pickle=True if you trust"):
        buffer.load_data(path)
    other = DequeBuffer(4)
    other.load_data(path, allow_pickle=True)
    assert other.sample(1)[0].data == Opaque()
    path.write_bytes(b"damaged")
    with pytest.raises(CheckpointDamaged):
        other.load_data(path, allow_pickle=True)


def test_exported_data_can_be_imported():
    buffer, other = filled(), DequeBuffer(3)
    other.import_data((item.data, item.meta) for item in buffer.export_data())
    assert [item.data for item in other] == ["item 5", "item 6", "item 7"]


def test_threads_may_share_a_buffer():
    buffer = DequeBuffer(400, seed=0)
    failures = []

    def work(number):
        try:
            for k in range(100):
                index = buffer.push((number, k), {"number": number})
                assert buffer.get(index).data == (number, k)
                buffer.sample(1)
                if k % 10 == 0:
                    buffer.delete(index)
                    buffer.sample(1, groupby="number", ignore_insufficient=True)
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    # Of 400 items each thread has deleted ten.
    assert len({item.index for item in buffer}) == len(buffer) == 360


def test_items_can_be_selected_by_numpy_integers():
    buffer = filled()
    assert np.int64(3) in buffer
    assert buffer.delete(np.int64(3)) == 1
    assert buffer.delete(np.array([1, 2])) == 2
    assert len(buffer) == 5


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda b: b.update([0], meta={"priority": [1.0]}), "one by one"),
        (lambda b: b.update(0.5), "index must be an integer"),
        (lambda b: b.push(1, meta=3), "meta must be"),
        (lambda b: b.sample("1"), "size must be an integer"),
        (lambda b: b.sample(1.0), "size must be an integer"),
        (lambda b: b.use(PriorityExperienceReplay), "not a class"),
    ],
)
def test_arguments_of_a_wrong_type_are_rejected(use, message):
    buffer = DequeBuffer(3)
    buffer.push("a")
    with pytest.raises(TypeError, match=message):
        use(buffer)
    assert [item.data for item in buffer] == ["a"]


def test_a_deep_copy_is_independent_and_draws_the_same():
    buffer = DequeBuffer(8, seed=0)
    buffer.use(PriorityExperienceReplay(buffer))
    for number in range(10):
        buffer.push([number], meta={"priority": 1.0 + number})
    copied = copy.deepcopy(buffer)
    assert copied.sample(5) == buffer.sample(5)
    copied.get(9).data.append("changed")
    copied.delete(8)
    assert buffer.get(9).data == [9] and 8 in buffer
    copied.update(7, meta={"priority": 0.0})
    assert buffer.get(7).meta["priority"] == 8.0


def test_an_item_has_a_position_by_age():
    buffer = DequeBuffer(4, seed=0)
    for n in range(6):
        buffer.push(n, {"n": n})
    assert [buffer[position].data for position in range(len(buffer))] == [2, 3, 4, 5]
    assert buffer[-1].data == 5
    buffer.delete([3])
    assert [buffer[position].data for position in range(len(buffer))] == [2, 4, 5]
    assert buffer[1].index == 4 and buffer[1].meta == {"n": 4}
    for position in (3, -4, 99):
        with pytest.raises(IndexError, match="3 items"):
            buffer[position]


def test_an_item_is_found_by_its_index():
    buffer = DequeBuffer(4)
    index = buffer.push("a", {"kind": 1})
    assert buffer.get_by_index(index) == buffer.get(index)
    buffer.delete(index)
    with pytest.raises(IndexError, match="does not hold"):
        buffer.get_by_index(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_reads_a_buffer(num_workers):
    buffer = DequeBuffer(20, seed=0)
    for n in range(10):
        buffer.push({"obs": torch.full((3,), float(n)), "action": n}, {"n": n})
    assert isinstance(buffer, torch.utils.data.Dataset)
    loader = torch.utils.data.DataLoader(buffer, batch_size=5, num_workers=num_workers)
    batches = list(loader)
    assert [batch["action"].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batches[0]["obs"].shape == (5, 3)
    items = torch.utils.data.DataLoader(
        buffer, batch_size=4, shuffle=True, collate_fn=lambda batch: batch
    )
    drawn = [item for batch in items for item in batch]
    assert sorted(item.meta["n"] for item in drawn) == list(range(10))


def test_a_view_shares_the_items_and_not_the_middleware():
    calls = []

    def spy(name):
        def middleware(action, chain, *args, **kwargs):
            calls.append((name, action))
            return chain(*args, **kwargs)

        return middleware

    buffer = DequeBuffer(4, seed=0)
    buffer.use(spy("first"))
    buffer.push("a")
    view = buffer.view()
    view.use(spy("view"))
    buffer.use(spy("buffer"))
    calls.clear()
    view.push("b")
    assert calls == [("first", "push"), ("view", "push")]
    calls.clear()
    for n in range(5):
        buffer.push(n)
    assert ("view", "push") not in calls and calls.count(("buffer", "push")) == 5
    assert [item.data for item in view] == [item.data for item in buffer] == [1, 2, 3, 4]
    view.update(view[0].index, data="changed")
    assert buffer[0].data == "changed"
    buffer.delete(buffer[1].index)
    assert [item.data for item in view] == ["changed", 3, 4]
    view.clear()
    assert buffer.count() == 0
    buffer.push("again")
    assert [item.data for item in view] == ["again"]


def test_a_view_deletes_what_it_has_used():
    buffer = DequeBuffer(8, seed=0)
    for n in range(4):
        buffer.push(n)
    view = buffer.view()
    view.use(use_time_check(view, max_use=1))
    view.sample(2)
    assert buffer.count() == view.count() == 2
    buffer.sample(2)
    assert buffer.count() == 2


def test_files_are_also_passed_by_the_classic_keyword(tmp_path):
    first, second = DequeBuffer(4), DequeBuffer(4)
    first.push({"a": 1})
    first.save_data(file_name=tmp_path / "items")
    second.load_data(file_name=tmp_path / "items")
    assert [item.data for item in second] == [{"a": 1}]
