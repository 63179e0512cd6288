"""Buffers, files and shared arrays of ``ding.data``."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware import classic
from dmiddleware.ding import data
from dmiddleware.ding.data import DequeBuffer
from dmiddleware.ding.utils.data import (
    create_dataset,
    default_collate,
    default_decollate,
    hdf5_save,
    offline_data_save_type,
    timestep_collate,
    ttorch_collate,
)
from dmiddleware.errors import ConfigError, NotEnoughData


def test_pushing_returns_an_index_that_has_the_item() -> None:
    buffer = DequeBuffer(size=2)
    pushed = buffer.push("a", {"group": 1})
    assert (pushed.index, pushed.data, pushed.meta) == (0, "a", {"group": 1})
    buffer.push("b")
    buffer.push("c")
    assert [item.data for item in buffer.storage] == ["b", "c"]
    assert buffer.indices == {1: 0, 2: 1} and buffer.indices.has(2)
    assert not buffer.update("no such index", "d")
    assert buffer.update(1, "d") and buffer.storage[0].data == "d"


def test_metadata_that_are_asked_for_are_listed() -> None:
    buffer = DequeBuffer(size=4)
    buffer.meta_index = {"label": []}
    buffer.push("a", {"label": 1})
    buffer.push("b")
    assert buffer.meta_index == {"label": [1, None]}


def test_an_item_that_is_drawn_twice_is_a_copy_the_second_time() -> None:
    buffer = DequeBuffer(size=1)
    index = buffer.push({"key": "old"})
    for first, second in (buffer.sample(2, replace=True), buffer.sample(indices=[index, index])):
        first.data["key"] = "new"
        assert second.data["key"] == "old"
        buffer.update(index, {"key": "old"})


def test_too_few_items_are_an_error_or_none() -> None:
    buffer = DequeBuffer(size=3)
    buffer.push("a")
    with pytest.raises(NotEnoughData, match="There are less than 2"):
        buffer.sample(2)
    assert buffer.sample(2, ignore_insufficient=True) == []


def test_buffer_middleware_may_pass_arguments_by_position() -> None:
    def with_10(action: str, chain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if action != "sample":
            return chain(*args, **kwargs)
        items = chain(kwargs.pop("size"), kwargs.pop("replace", False), **kwargs)
        return [item.data + 10 for item in items]

    buffer = DequeBuffer(size=2).use(with_10)
    buffer.push(1)
    assert buffer.sample(1) == [11]


def test_pieces_of_a_group_begin_at_multiples_or_are_its_end() -> None:
    buffer = DequeBuffer(size=20, sliced=True)
    for i in range(7):
        buffer.push(i, {"env": 0})
    starts = {buffer.sample(1, groupby="env", unroll_len=3)[0][0].data for _ in range(60)}
    assert starts == {0, 3, 4}


def test_priorities_and_staleness_have_their_metadata() -> None:
    buffer = DequeBuffer(size=4)
    buffer.use(data.PriorityExperienceReplay(buffer, IS_weight=True))
    index = buffer.push("a", {"priority": 2.0})
    (item,) = buffer.sample(1)
    assert {"priority", "priority_idx", "priority_IS"} <= item.meta.keys()
    assert buffer._middleware[0].buffer_idx == {index: 0}
    buffer = DequeBuffer(size=4)
    buffer.use(data.staleness_check(buffer, max_staleness=1))
    with pytest.raises(AssertionError, match="train_iter_data_collected"):
        buffer.push("a")
    buffer.push("a", {"train_iter_data_collected": 0})
    assert len(buffer.sample(1, train_iter_sample_data=1)) == 1


def test_a_buffer_middleware_works_on_each_view_of_its_buffer() -> None:
    buffer = classic.DequeBuffer(4)
    view = buffer.view()
    view.use(classic.sample_range_view(buffer, -1))
    for i in range(4):
        buffer.push(i)
    assert view.sample(1)[0].data == 3
    with pytest.raises(ValueError, match="another buffer"):
        classic.DequeBuffer(4).use(classic.sample_range_view(buffer, -1))


def test_a_buffer_of_any_objects_is_saved(tmp_path: Path) -> None:
    buffer = DequeBuffer(size=2)
    buffer.push(threading.current_thread, {"label": 1})
    buffer.save_data(tmp_path / "data.hkl")
    loaded = DequeBuffer(size=2)
    loaded.load_data(tmp_path / "data.hkl")
    assert loaded.storage[0].data is threading.current_thread


def test_arrays_are_shared_between_processes() -> None:
    shared = data.ShmBuffer(np.float32, (2, 3), ctype=torch.Tensor)
    process = multiprocessing.get_context("fork").Process(
        target=shared.fill, args=(np.ones((2, 3), np.float32),)
    )
    process.start()
    process.join()
    assert shared.get().tolist() == [[1.0] * 3] * 2
    container = data.ShmBufferContainer({"a": np.int64}, {"a": (2,)}, copy_on_get=False)
    view = container.get()["a"]
    container.fill({"a": np.array([3, 4])})
    assert view.tolist() == [3, 4]


def test_models_and_objects_are_written_to_files_that_are_removed_later(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    written = threading.Event()
    loader = data.FileModelLoader(model, str(tmp_path / "models"), ttl=1000)
    storage = loader.save(lambda storage: written.set())
    assert written.wait(20)
    state = loader.load(storage)
    assert torch.equal(state["weight"], model.weight)
    assert [path for _, path in loader._files] == [storage.path]
    loader.shutdown()
    loader.shutdown()
    files = data.FileStorageLoader(str(tmp_path / "objects"), ttl=0)
    held = data.FileStorage(str(tmp_path / "object.pkl"))
    held.save([1, 2])
    read: list[Any] = []
    done = threading.Event()
    files.load(held, lambda loaded: (read.append(loaded), done.set()))
    assert done.wait(20) and read == [[1, 2]]
    files.shutdown()


def config(kind: str, path: Path | None = None, env_id: str = "") -> Any:
    from easydict import EasyDict

    collect = {"data_type": kind, "data_path": None if path is None else str(path)}
    return EasyDict({"policy": {"collect": collect}, "env": {"env_id": env_id}})


def rows() -> list[dict[str, Any]]:
    return [
        {
            "obs": torch.tensor([float(i), 1.0]),
            "next_obs": torch.tensor([i + 1.0, 1.0]),
            "action": torch.tensor([i / 2]),
            "reward": torch.tensor([1.0]),
            "done": i == 2,
        }
        for i in range(3)
    ]


def test_recorded_rows_are_read_from_what_was_saved(tmp_path: Path) -> None:
    offline_data_save_type(rows(), str(tmp_path / "expert.pkl"), "naive")
    naive = create_dataset(config("naive", tmp_path / "expert.pkl"))
    assert len(naive) == 3 and naive[2]["obs"].tolist() == [2.0, 1.0]
    assert naive.rows["obs"].shape == (3, 2)
    hdf5_save(rows(), str(tmp_path / "expert.pkl"))
    hdf5 = create_dataset(config("hdf5", tmp_path / "expert_demos.hdf5"))
    assert len(hdf5) == 3 and hdf5[1]["next_obs"].tolist() == [2.0, 1.0]
    assert hdf5.statistics.mean.tolist() == [1.0, 1.0]
    assert hdf5.statistics.action_bounds.ravel().tolist() == pytest.approx([-0.05, 1.05])
    with pytest.raises(ValueError, match="csv"):
        offline_data_save_type(rows(), str(tmp_path / "expert.csv"), "csv")


def test_data_of_d4rl_that_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="medium-replay"):
        create_dataset(config("d4rl", env_id="hopper-medium-replay-v0"))


def test_rows_are_stacked_and_taken_apart() -> None:
    batch = [
        {"obs": torch.ones(2) * i, "reward": torch.tensor([float(i)]), "done": i == 1, "n": i}
        for i in range(2)
    ]
    stacked = default_collate(batch)
    assert stacked["obs"].shape == (2, 2) and stacked["reward"].shape == (2,)
    assert stacked["done"].dtype == torch.bool and stacked["n"].dtype == torch.int64
    assert default_collate(batch, cat_1dim=False)["reward"].shape == (2, 1)
    assert [row["n"].item() for row in default_decollate(stacked)] == [0, 1]
    assert default_collate([{"collate_ignore_x": 1}, {"collate_ignore_x": None}]) == {
        "collate_ignore_x": [1, None]
    }
    assert default_collate([[np.zeros(1), "a"], [np.ones(1), "b"]])[1] == ("a", "b")
    assert default_collate([0.5, 1.0]).dtype == torch.float32
    for function in (default_collate, default_decollate):
        with pytest.raises(TypeError):
            function([object()] if function is default_collate else object())
    steps = [{"obs": [torch.ones(3)] * 4, "prev_state": [None] * 4} for _ in range(2)]
    sequence = timestep_collate(steps)
    assert sequence["obs"].shape == (4, 2, 3) and len(sequence["prev_state"]) == 4


def test_trees_are_stacked() -> None:
    import treetensor.torch as ttorch

    trees = [ttorch.as_tensor({"a": torch.ones(1), "b": {"c": torch.ones(3)}})] * 2
    assert ttorch_collate(trees).a.shape == (2,)
    assert default_collate(trees)["b"]["c"].shape == (2, 3)
    assert default_collate(ttorch_collate(trees))["a"].tolist() == [1.0, 1.0]


def test_what_was_pickled_stays_readable(tmp_path: Path) -> None:
    storage = data.FileStorage(str(tmp_path / "x.pkl"))
    storage.save({"a": 1})
    assert pickle.loads(Path(storage.path).read_bytes()) == storage.load() == {"a": 1}
    model = data.FileModelStorage(str(tmp_path / "m.pth.tar"))
    model.save({"w": torch.ones(1)})
    assert model.load()["w"].item() == 1.0
