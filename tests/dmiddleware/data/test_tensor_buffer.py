import copy
import re
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import (
    PrioritySampler,
    TensorBuffer,
    UniformSampler,
    as_tree,
    index_rows,
    leaves,
    load_checkpoint,
    save_checkpoint,
    to_dict,
)
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError
from dmiddleware.schedule import Schedule

from .collecting import Collector, as_batch


def rows(first, n, lead=None):
    lead = (n,) if lead is None else lead
    number = torch.arange(first, first + n).reshape(lead)
    return as_tree(
        {
            "obs": {"image": number[..., None].to(torch.uint8), "speed": number.float()},
            "done": torch.zeros(lead, dtype=torch.bool),
            "number": number,
        }
    )


def test_sampled_rows_are_rows_that_were_pushed():
    buffer = TensorBuffer(10, seed=0)
    buffer.push(rows(0, 6))
    assert buffer.push(rows(6, 8, lead=(2, 4))) == range(6, 14)
    assert len(buffer) == buffer.count() == 10
    batch = buffer.sample(10)
    assert set(batch.number.tolist()) <= set(range(4, 14))
    assert torch.equal(batch.number, batch["index"])
    assert torch.equal(batch.obs.speed, batch.number.float())
    assert batch.obs.image.dtype == torch.uint8


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from(["push", "push", "clear"]), st.integers(0, 30))),
)
def test_it_holds_what_a_naive_model_holds(size, actions):
    buffer, model, total = TensorBuffer(size), [], 0
    for name, n in actions:
        if name == "push":
            assert list(buffer.push(rows(total, n)))[-n:] == [*range(total, total + n)][-size:]
            model = [i for i in [*model, *range(total, total + n)] if i >= total + n - size]
            total += n
        elif name == "clear":
            buffer.clear()
            model = []
        assert len(buffer) == len(model)
        assert buffer.get(model).number.tolist() == model if model else True
        if model:
            assert set(buffer.sample(len(model)).number.tolist()) <= set(model)


def test_rows_that_are_no_longer_held_cannot_be_read():
    buffer = TensorBuffer(4)
    buffer.push(rows(0, 6))
    with pytest.raises(IndexError, match="indices are 0 … 5"):
        buffer.get([6])
    with pytest.raises(IndexError, match="row 1 is no longer held"):
        buffer.get([2, 1])


def test_changing_a_sample_does_not_change_the_buffer():
    buffer = TensorBuffer(4, seed=0)
    buffer.push(rows(0, 4))
    batch = buffer.sample(4)
    batch.number.fill_(-1)
    batch.obs.speed.fill_(-1)
    assert buffer.get(range(4)).number.tolist() == [0, 1, 2, 3]
    kept = buffer.sample(4)
    before = kept.number.clone()
    buffer.push(rows(4, 4))
    assert torch.equal(kept.number, before)


def test_pushed_data_is_copied():
    buffer, batch = TensorBuffer(4), rows(0, 4)
    buffer.push(batch)
    batch.number.fill_(-1)
    assert buffer.get(range(4)).number.tolist() == [0, 1, 2, 3]


def test_leaves_are_converted_to_arrays():
    buffer = TensorBuffer(8)
    weight = torch.ones(2, 3, requires_grad=True)
    buffer.push({"x": weight * 2, "y": np.arange(2), "z": (torch.zeros(2), torch.ones(2))})
    pair = {"0": weight[:, 0], "1": weight[:, 1]}
    buffer.push(as_tree({"x": weight * 3, "y": torch.arange(2), "z": pair}))
    assert buffer.get([0, 3]).x.tolist() == [[2.0] * 3, [3.0] * 3]
    assert buffer.get([0, 1]).z["1"].tolist() == [1.0, 1.0]
    flat = TensorBuffer(8)
    for _ in range(2):
        flat.push(as_tree({"x": weight * 2, "strided": torch.arange(6).reshape(3, 2).t()}))
    assert flat.get([2]).strided.tolist() == [[0, 2, 4]]


def damaged(**changes):
    batch = rows(6, 2)
    for path, value in changes.items():
        if value is None:
            del batch[path]
        else:
            batch[path] = value
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (damaged(number=torch.zeros(2, 3)), r"'number' .* is float32\[2, 3\].* int64\[2\]"),
        (damaged(number=torch.zeros(2)), r"'number' .* is float32\[2\].* should be int64\[2\]"),
        (damaged(number=torch.arange(3)), r"'number' .* is int64\[3\].* should be int64\[2\]"),
        (damaged(number=None), "number missing"),
        (damaged(extra=torch.zeros(2)), "extra unexpected"),
        (damaged(obs=torch.zeros(2)), r"obs\.image, obs\.speed missing and obs unexpected"),
        (damaged(done=torch.zeros(2, 1, 1)), r"`done` must be .* shape \[2, 1, 1\]"),
        (torch.zeros(2), r"got tensor\(.*dmiddleware\.data\.as_tree"),
        (as_tree({}), "this one is empty"),
    ],
)
def test_a_batch_with_a_different_structure_is_rejected_with_the_leaf(batch, message):
    buffer = TensorBuffer(10)
    buffer.push(rows(0, 6))
    with pytest.raises(StructureError, match=message):
        buffer.push(batch)
    assert len(buffer) == 6


def test_a_flat_batch_with_a_different_structure_is_rejected_too():
    buffer = TensorBuffer(10)
    buffer.push(as_tree({"x": torch.zeros(3), "y": torch.zeros(3, 2)}))
    for other, message in [
        ({"x": torch.zeros(3), "y": torch.zeros(3, 1)}, r"'y' .* is float32\[3, 1\]"),
        ({"x": torch.zeros(3), "z": torch.zeros(3)}, "y missing and z unexpected"),
        ({"x": torch.zeros(3), "y": {"a": torch.zeros(3)}}, "y missing"),
        ({"x": torch.zeros(3, dtype=torch.bfloat16), "y": torch.zeros(3, 2)}, "bfloat16"),
    ]:
        with pytest.raises(StructureError, match=message):
            buffer.push(as_tree(other))


def test_the_first_batch_is_checked_as_well():
    with pytest.raises(StructureError, match=r"leaf 'x' has shape \[2\].* 2 dimension"):
        TensorBuffer(4).push({"x": torch.zeros(2), "done": torch.zeros(2, 3)})
    with pytest.raises(StructureError, match=r"'x' of the batch is float32\[3\]"):
        TensorBuffer(4).push({"x": torch.zeros(3), "done": torch.zeros(2)})
    with pytest.raises(StructureError, match="has a column index"):
        TensorBuffer(4).push({"index": torch.zeros(3)})
    with pytest.raises(StructureError, match="has a column weight"):
        TensorBuffer(4, sampler=PrioritySampler()).push({"weight": torch.zeros(3)})
    TensorBuffer(4).push({"weight": torch.zeros(3)})


def test_the_error_of_a_sample_that_is_too_large_says_how_many_rows_are_missing():
    buffer = TensorBuffer(10)
    with pytest.raises(NotEnoughData, match="asked for 1 rows, but the buffer holds 0"):
        buffer.sample(1)
    buffer.push(rows(0, 6))
    with pytest.raises(NotEnoughData, match="asked for 8 rows, but the buffer holds 6; push 2"):
        buffer.sample(8)
    starts = TensorBuffer(10, unroll_len=3, stride=3)
    starts.push(as_batch([step[0] for step in Collector(1, 7).rows(6)], (6,)))
    with pytest.raises(NotEnoughData, match=r"holds 6, of which \d can be drawn"):
        starts.sample(6)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        buffer.sample(0)


@pytest.mark.parametrize("odd", [np.arange(6) > 3, torch.arange(6) > 3, [4.0, 5.0]])
def test_only_integers_select_rows(odd):
    buffer = TensorBuffer(6, sampler=PrioritySampler())
    buffer.push(rows(0, 6))
    for use in (
        buffer.get,
        lambda index: buffer.update_priority(index, np.ones(len(index))),
    ):
        with pytest.raises(IndexError, match="must be int64"):
            use(odd)
    assert buffer.index.tolist() == list(range(6))
    assert len(buffer.get([]).number) == 0
    assert buffer.get(torch.tensor([4, 5], dtype=torch.uint8)).number.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be an integer ≥ 1"),
        ({"size": 3, "n_step": 0}, "n_step must be an integer ≥ 1"),
        ({"size": 3, "unroll_len": -1}, "unroll_len must be an integer ≥ 1"),
        ({"size": 3, "discount": 1.5}, "discount must be a number from 0 to 1"),
        ({"size": "3"}, "size must be an integer"),
        ({"size": 3.5}, "size must be an integer"),
        ({"size": 3, "n_step": True}, "n_step must be an integer"),
        ({"size": 3, "discount": "0.9"}, "discount must be a number"),
        ({"size": 3, "seed": 0.5}, "seed must be an integer"),
        ({"size": 3, "sampler": PrioritySampler}, "PrioritySampler()"),
        ({"size": 3, "sampler": "priority"}, "sampler: it must be"),
        ({"size": 3, "unroll_pad": 1}, "unroll_pad must be"),
        ({"size": 3, "store_next_obs": None}, "store_next_obs must be"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        TensorBuffer(**options)


OPTIONS = {
    "uniform": {},
    "without replacement": {"sampler": lambda: UniformSampler(replace=False)},
    "prioritized": {
        "sampler": lambda: PrioritySampler(beta=Schedule.linear(0.4, 1.0, decay=10, by="update"))
    },
    "n-step": {"n_step": 3, "discount": 0.9},
    "once": {"n_step": 2, "discount": 0.9, "store_next_obs": False},
    "sequences": {"unroll_len": 3, "unroll_pad": False},
    "sequences with burn-in": {"unroll_len": 4, "burn_in": 2, "stride": 2},
    "everything": {
        "sampler": PrioritySampler,
        "n_step": 2,
        "discount": 0.9,
        "unroll_len": 2,
        "store_next_obs": False,
    },
}


def build(name, seed):
    options = dict(OPTIONS[name])
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    return TensorBuffer(50, seed=seed, **options)


def equal(a, b):
    a, b = dict(leaves(a)), dict(leaves(b))
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("n_pushes", [0, 3, 12])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_loaded_buffer_continues_as_the_original(name, n_pushes, copied, tmp_path):
    collector = Collector(3, seed=1, odd_next_obs=True)

    def batch():
        return as_batch([row for step in collector.rows(8) for row in step], (8, 3))

    def live(buffers, n):
        """Apply the same actions to all buffers and compare the results."""
        for _ in range(n):
            pushed = batch()
            indices = [buffer.push(pushed) for buffer in buffers]
            for a, b in pairwise(indices):
                assert a == b
            samples = [buffer.sample(4) for buffer in buffers]
            for a, b in pairwise(samples):
                assert equal(a, b)
            for buffer, sample in zip(buffers, samples, strict=True):
                if "weight" in to_dict(sample):
                    buffer.update_priority(sample["index"], sample["index"] % 7 + 0.1)

    original, restored = build(name, 0), build(name, 99)
    restored.push(batch())  # replaced by the loaded state
    live([original], n_pushes)
    path = tmp_path / "buffer.safetensors"
    if copied:
        save_checkpoint(path, original.state_dict())
    else:
        with original.live_state() as state:
            save_checkpoint(path, state)
    restored.load_state_dict(load_checkpoint(path, mapped_above=None if copied else 0))
    assert len(restored) == len(original)
    live([original, restored], 8)


@pytest.mark.parametrize("n_rows", [600, 1000, 1500])
def test_rows_are_written_without_a_copy_in_memory(n_rows, tmp_path):
    buffer = TensorBuffer(1000, seed=0)
    buffer.push({"x": torch.arange(n_rows * 2000.0).reshape(n_rows, 2000)})
    tracemalloc.start()
    try:
        with buffer.live_state() as state:
            save_checkpoint(tmp_path / "buffer.safetensors", state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * buffer.nbytes


def test_the_buffer_is_locked_while_its_rows_are_shared():
    buffer = TensorBuffer(10)
    buffer.push({"x": torch.zeros(3)})
    pusher = threading.Thread(target=buffer.push, args=({"x": torch.ones(1)},), daemon=True)
    with buffer.live_state() as state:
        pusher.start()
        pusher.join(0.05)
        (block,) = state["rows"]["blocks"]
        assert len(block["columns"].content()["x"]) == len(buffer) == 3
    pusher.join(10)
    assert len(buffer) == 4


@pytest.mark.parametrize("name", OPTIONS)
def test_a_deep_copy_is_independent_and_draws_the_same(name):
    collector = Collector(3, seed=1)
    batches = [
        as_batch([row for step in collector.rows(8) for row in step], (8, 3)) for _ in range(3)
    ]
    original = build(name, 0)
    empty = copy.deepcopy(original)
    original.push(batches[0])
    copied = copy.deepcopy(original)
    for pushed in batches[1:]:
        for buffer in (original, copied):
            buffer.push(pushed)
        samples = [buffer.sample(4) for buffer in (original, copied)]
        assert equal(*samples)
        if "weight" in samples[0]:
            for buffer in (original, copied):
                buffer.update_priority(samples[0]["index"], [0.1, 2.0, 3.0, 0.5])
    copied.clear()
    assert (len(original), len(empty)) == (50, 0)


def test_a_buffer_in_files_cannot_be_copied(tmp_path):
    with (
        TensorBuffer(10, storage=tmp_path / "rows") as buffer,
        pytest.raises(TypeError, match="state_dict"),
    ):
        copy.deepcopy(buffer)


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_drawn_ahead_are_those_drawn_one_by_one(name):
    ahead, single = build(name, 0), build(name, 0)
    for buffer in (ahead, single):
        collector = Collector(3, seed=1)
        for _ in range(6):
            buffer.push(as_batch([row for step in collector.rows(4) for row in step], (4, 3)))
    batches = ahead.sample_ahead(4, at_most=5)
    assert len(batches) == (1 if isinstance(ahead.sampler, PrioritySampler) else 5)
    for batch in batches:
        assert equal(batch, single.sample(4))
    assert equal(ahead.sample(4), single.sample(4))
    with pytest.raises(NotEnoughData):
        ahead.sample_ahead(51, at_most=5)


class Unchanged:
    def attach(self, buffer):
        pass

    def __call__(self, batch, buffer):
        return batch


def test_few_batches_are_drawn_ahead_if_they_are_large_or_a_transform_may_change_them():
    buffer = TensorBuffer(100, seed=0)
    buffer.push({"x": torch.zeros(100, 1024)})
    assert len(buffer.sample_ahead(32, at_most=100)) == 4
    assert len(buffer.sample_ahead(100, at_most=100)) == 1
    small = TensorBuffer(10, sampler=PrioritySampler(alpha=0.0), seed=0)
    small.push(rows(0, 10))
    drawn = small.sample_ahead(4, at_most=3)
    assert [batch["weight"].tolist() for batch in drawn] == [[1.0] * 4] * 3
    transformed = TensorBuffer(10, transform=Unchanged(), seed=0)
    transformed.push(rows(0, 10))
    assert len(transformed.sample_ahead(4, at_most=3)) == 1


def test_a_state_with_different_options_or_leaves_is_rejected():
    buffer = TensorBuffer(10)
    buffer.push(rows(0, 4))
    state = buffer.state_dict()
    with pytest.raises(CheckpointMismatch, match="size=10, but this one has 11"):
        TensorBuffer(11).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="linked=False, but this one has True"):
        TensorBuffer(10, n_step=2).load_state_dict(state)
    other = TensorBuffer(10)
    other.push({"x": torch.zeros(2)})
    with pytest.raises(CheckpointMismatch, match="other leaves"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="with a UniformSampler"):
        TensorBuffer(10, sampler=PrioritySampler()).load_state_dict(state)


def test_a_closed_buffer_cannot_be_used():
    with TensorBuffer(10) as buffer:
        buffer.push(rows(0, 4))
    buffer.close()
    for action in (lambda: buffer.push(rows(0, 1)), lambda: buffer.sample(1), buffer.state_dict):
        with pytest.raises(ValueError, match="this TensorBuffer is closed"):
            action()


def test_the_same_seed_draws_the_same_rows():
    one, two = TensorBuffer(50, seed=3), TensorBuffer(50, seed=3)
    for buffer in (one, two):
        buffer.push(rows(0, 50))
    assert torch.equal(one.sample(20).number, two.sample(20).number)
    assert not torch.equal(one.sample(20).number, one.sample(20).number)


def test_threads_may_share_a_buffer():
    buffer = TensorBuffer(64, sampler=PrioritySampler(), seed=0)
    buffer.push(rows(0, 64))
    failures = []

    def work(first):
        try:
            for k in range(60):
                buffer.push(rows(first + 16 * k, 16))
                batch = buffer.sample(16)
                assert torch.equal(batch.obs.speed, batch.number.float())
                buffer.update_priority(batch["index"], torch.rand(16))
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert len(buffer) == 64


def test_a_list_of_transitions_is_pushed_as_one_batch():
    batch = as_batch([step[0] for step in Collector(1, 0).rows(5)], (5,))
    together, one_by_one = TensorBuffer(10), TensorBuffer(10)
    together.push(batch)
    one_by_one.push([to_dict(index_rows(batch, i)) for i in range(5)])
    assert equal(together.get(range(5)), one_by_one.get(range(5)))
    with pytest.raises(StructureError, match="item 0 has shape"):
        one_by_one.push([batch, batch])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"info": None}, "'info' is None"),
        ({"info": {"env": "CartPole-v1"}}, "'info.env' is 'CartPole-v1'"),
        ({"info": [{}, {}]}, "leave it out"),
        ({"reward": torch.zeros(2, 1)}, "squeeze"),
        ({"done": torch.zeros(2, 1, dtype=torch.bool)}, "squeeze"),
    ],
)
def test_columns_that_cannot_be_stored_are_rejected_with_the_remedy(column, message):
    buffer = TensorBuffer(10)
    columns = {
        "obs": torch.zeros(2, 3),
        "reward": torch.zeros(2),
        "done": torch.zeros(2, dtype=torch.bool),
    }
    with pytest.raises(StructureError, match=message):
        buffer.push({**columns, **column})
    assert len(buffer) == 0
    buffer.push(columns)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": "3"}, ConfigError),
        ({"n": 3.5}, ConfigError),
        ({"n": 0}, ValueError),
        ({"n": 1, "groupby": "episode"}, TypeError),
    ],
)
def test_invalid_samples_are_rejected(arguments, error):
    buffer = TensorBuffer(10)
    buffer.push(rows(0, 6))
    with pytest.raises(error, match=r"n must be|groupby"):
        buffer.sample(**arguments)


def test_a_state_of_something_else_is_rejected():
    with pytest.raises(CheckpointMismatch, match="it has no"):
        TensorBuffer(3).load_state_dict({"model": {}})
