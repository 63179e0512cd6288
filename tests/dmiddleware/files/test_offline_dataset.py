import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dmiddleware.data import OfflineDataset, TensorBuffer, as_tree, save_dataset, to_numpy
from dmiddleware.errors import ConfigError, DatasetError, NotEnoughData, StructureError
from dmiddleware.rl import with_returns_to_go
from tests.dmiddleware.data.collecting import Collector, as_batch


def rows(first, n):
    number = torch.arange(first, first + n)
    return as_tree(
        {
            "obs": {"image": number.to(torch.uint8)[:, None, None], "half": number.half()},
            "number": number,
            "done": number % 3 == 0,
        }
    )


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "expert.safetensors"
    assert save_dataset(path, [rows(0, 7), rows(7, 4)], metadata={"env": "CartPole-v1"}) == 11
    with OfflineDataset(path) as opened:
        yield opened


def test_rows_come_back_as_they_were(dataset):
    assert len(dataset) == 11
    assert dataset.metadata == {"env": "CartPole-v1"}
    assert dataset.leaves["obs.image"] == ("uint8", (1, 1))
    assert dataset.nbytes == 11 * (1 + 2 + 8 + 1)
    batch = dataset.rows([10, 0, 3])
    for path in ("number", "done"):
        assert torch.equal(batch[path], rows(0, 11)[path][[10, 0, 3]])
    assert batch.obs.half.tolist() == [10, 0, 3]
    assert batch.obs.image.shape == (3, 1, 1)
    assert dataset.rows(slice(2, None, 4)).number.tolist() == [2, 6, 10]
    batch.number.fill_(0)  # a copy
    assert dataset.rows([5]).number.tolist() == [5]
    dataset.verify()


def test_any_safetensors_reader_can_read_the_file(dataset):
    assert load_file(dataset.path)["number"].tolist() == list(range(11))


def batches_of(pushes):
    return [as_batch([row for step in push for row in step], (len(push), 3)) for push in pushes]


def test_the_rows_of_an_env_stay_together_within_a_batch(tmp_path):
    collector = Collector(3, seed=0)
    pushes = [collector.rows(4), collector.rows(2)]
    batches = [
        as_tree({name: batch[name] for name in ("obs", "done")}) for batch in batches_of(pushes)
    ]
    save_dataset(tmp_path / "d", batches)
    with OfflineDataset(tmp_path / "d") as dataset:
        found = dataset.rows(slice(None)).obs.both.tolist()
    expected = [step[env]["obs"] for push in pushes for env in range(3) for step in push]
    assert found == [list(pair) for pair in expected]


def test_the_rows_of_an_episode_stay_together_over_all_batches(tmp_path):
    collector = Collector(3, seed=0)
    pushes = [collector.rows(n) for n in (4, 2, 1, 9)]
    save_dataset(tmp_path / "d", batches_of(pushes))
    with OfflineDataset(tmp_path / "d") as dataset:
        rows = dataset.rows(slice(None))
        dataset.verify()
    episodes = {}
    for push in pushes:
        for env in range(3):
            for step in push:
                episodes.setdefault(step[env]["episode_id"], []).append(step[env])
    expected = [row for episode in episodes.values() for row in episode]
    assert rows.obs.both.tolist() == [list(row["obs"]) for row in expected]
    returns = []
    for episode in episodes.values():
        rewards = [row["reward"] for row in episode]
        returns += [sum(rewards[step:]) for step in range(len(rewards))]
    found = with_returns_to_go(rows)["return_to_go"]
    torch.testing.assert_close(found, torch.tensor(returns))


def test_a_buffer_filled_from_a_dataset_follows_episodes(tmp_path):
    collector = Collector(3, seed=0)
    push = collector.rows(20)
    batch = as_batch([row for step in push for row in step], (20, 3))
    save_dataset(tmp_path / "d", batch)
    direct, filled = (
        TensorBuffer(60, n_step=3, discount=0.9),
        TensorBuffer(60, n_step=3, discount=0.9),
    )
    direct.push(batch)
    with OfflineDataset(tmp_path / "d") as dataset:
        filled.push(dataset.rows(slice(None)))

    def windows(buffer):
        found = to_numpy(buffer.sample(60))
        keys = map(tuple, found["obs"]["both"].tolist())
        return dict(zip(keys, found["reward"].tolist(), strict=True))

    for _ in range(5):
        a, b = windows(direct), windows(filled)
        shared = a.keys() & b.keys()
        assert shared
        assert all(a[key] == b[key] for key in shared)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12),
    batch_size=st.integers(1, 14),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_each_epoch_contains_each_row_once(n, batch_size, shuffle, seed, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "epochs.safetensors"
    save_dataset(path, rows(0, n))
    with OfflineDataset(path) as dataset:
        batches = dataset.batches(batch_size, epochs=2, shuffle=shuffle, seed=seed)
        numbers = [batch.number.tolist() for batch in batches]
    per_epoch = -(-n // batch_size)
    assert len(numbers) == 2 * len(batches) == 2 * per_epoch
    assert batches.epoch == 2
    for epoch in (numbers[:per_epoch], numbers[per_epoch:]):
        flat = [number for batch in epoch for number in batch]
        assert sorted(flat) == list(range(n))
        assert shuffle or flat == sorted(flat)


def test_the_order_depends_on_the_seed_and_the_epoch(dataset):
    def numbers(seed):
        return [b.number.tolist() for b in dataset.batches(11, epochs=3, seed=seed)]

    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)
    assert len({tuple(order) for order in numbers(1)}) == 3


@pytest.mark.parametrize("n_before", [0, 1, 3, 4, 9])
def test_a_resumed_iteration_continues_where_it_stopped(dataset, n_before):
    one = dataset.batches(3, epochs=None, seed=5)
    for _ in range(n_before):
        next(one)
    two = dataset.batches(3, epochs=None, seed=99)
    two.load_state_dict(one.state_dict())
    for _ in range(10):
        assert torch.equal(next(one).number, next(two).number)
        assert one.epoch == two.epoch


def test_an_incomplete_last_batch_can_be_left_out(dataset):
    batches = list(dataset.batches(4, drop_last=True))
    assert [len(batch.number) for batch in batches] == [4, 4]
    with pytest.raises(NotEnoughData, match="11 rows, so no minibatch of 12 is full"):
        dataset.batches(12, drop_last=True)
    with pytest.raises(ValueError, match="batch_size must be"):
        dataset.batches(0)
    assert list(dataset.batches(4, epochs=0)) == []


def test_mistakes_are_rejected(dataset, tmp_path):
    with pytest.raises(IndexError, match=r"0 … 10, got 3 … 11"):
        dataset.rows([3, 11])
    with pytest.raises(IndexError, match=r"must be int64 \[n\], got bool\[11\]"):
        dataset.rows(np.arange(11) > 3)
    with pytest.raises(StructureError, match=r"done, obs.* missing"):
        save_dataset(tmp_path / "d", [rows(0, 2), {"number": torch.zeros(2)}])
    with pytest.raises(StructureError, match="at least one row"):
        save_dataset(tmp_path / "d", rows(0, 0))
    with pytest.raises(StructureError, match="at least one row"):
        save_dataset(tmp_path / "d", [])
    dataset.close()
    dataset.close()
    with pytest.raises(ValueError, match="is closed; open it again"):
        dataset.rows([0])


def test_files_that_are_not_complete_datasets_are_rejected(dataset, tmp_path):
    with pytest.raises(DatasetError, match="does not exist"):
        OfflineDataset(tmp_path / "missing")
    content = dataset.path.read_bytes()
    cut = tmp_path / "cut"
    for length in (0, 7, 50, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(DatasetError, match="not a complete dataset"):
            OfflineDataset(cut)
    save_file({"number": torch.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(DatasetError, match="not a dataset of format version 1"):
        OfflineDataset(tmp_path / "foreign")
    changed = bytearray(content)
    changed[-1] ^= 1
    cut.write_bytes(changed)
    with OfflineDataset(cut) as damaged, pytest.raises(DatasetError, match="checksum"):
        damaged.verify()


def test_rows_are_read_only_when_needed(tmp_path):
    path = tmp_path / "large"
    save_dataset(path, {"x": torch.zeros(1000, 1000)})
    with OfflineDataset(path) as dataset:
        # The columns are mapped from the file, so a change of the file changes the next read.
        with path.open("r+b") as file:
            file.seek(-4, 2)
            file.write(np.float32(5).tobytes())
        assert dataset.rows([999]).x[0, -1] == 5


def test_an_unknown_option_is_refused_with_those_that_there_are(dataset):
    path = dataset.path
    for options in ({"mode": "r"}, {"file": "x"}):
        with pytest.raises(
            ConfigError, match=f"OfflineDataset: unknown keyword {next(iter(options))}"
        ):
            OfflineDataset(path, **options)
