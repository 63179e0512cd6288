"""States whose rarely changing parts are in files that several checkpoints share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.data import (
    BlockFolder,
    PrioritySampler,
    TensorBuffer,
    as_tree,
    load_checkpoint,
    pack_checkpoint,
    save_checkpoint,
    unpack_checkpoint,
)
from dmiddleware.errors import CheckpointDamaged, CheckpointMismatch, CheckpointWriteError
from dmiddleware.files.serialization import StateBlock
from dmiddleware.files.state_blocks import blocks_of
from tests.dmiddleware.data.blocks import digest, shrink_blocks
from tests.dmiddleware.data.collecting import Collector, as_batch
from tests.dmiddleware.data.ring.test_frame_stacks import StackingEnvs
from tests.variants import mostly_slow

SIZE = 50


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest buffers have several blocks, as buffers of many rows have."""
    shrink_blocks(monkeypatch)


def files(folder: Path) -> set[Path]:
    return set(folder.glob("*/*.safetensors"))


def of_collector() -> Callable[[], Any]:
    collector = Collector(3, seed=1, odd_next_obs=True)

    def batch() -> Any:
        rows = as_batch([row for step in collector.rows(4) for row in step], (4, 3))
        state = torch.arange(24.0).reshape(4, 3, 2) + rows.episode_id[..., None]
        return as_tree({**rows, "state": state})

    return batch


def of_stacks() -> Callable[[], Any]:
    envs = StackingEnvs(3, seed=1, odd=True)
    return lambda: envs.batch(4)


BUFFERS: dict[str, tuple[dict[str, Any], Callable[[], Callable[[], Any]]]] = {
    "plain": ({}, of_collector),
    "prioritized": ({"sampler": PrioritySampler, "n_step": 3, "discount": 0.9}, of_collector),
    "successors stored once": ({"store_next_obs": False}, of_collector),
    "sequences": (
        {"unroll_len": 4, "burn_in": 1, "stride": 2, "start_columns": ("state",)}, of_collector,
    ),
    "frames stored once": (
        {"store_next_obs": False, "frame_stacks": ("obs.image",), "follow_episodes": True},
        of_stacks,
    ),
}  # fmt: skip


def build(name: str, seed: int, **further: Any) -> TensorBuffer:
    options = dict(BUFFERS[name][0])
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    return TensorBuffer(SIZE, seed=seed, **options, **further)


class Saves:
    """Saves the state of a buffer; keeps the last two files, and the blocks that these need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blocks = [BlockFolder(folder / name) for name in ("a", "b")]
        self._n = 0

    def __call__(self, buffer: TensorBuffer) -> Path:
        path = self.folder / f"{self._n}.safetensors"
        with buffer.live_state() as state:
            save_checkpoint(path, state, blocks=self._blocks[self._n % 2])
        (self.folder / f"{self._n - 2}.safetensors").unlink(missing_ok=True)
        kept = list(self.folder.glob("*.safetensors"))
        for blocks in self._blocks:
            blocks.keep_only(kept)
        used = {name for path in kept for name in blocks_of(path)}
        assert {str(path.relative_to(self.folder)) for path in files(self.folder)} == used
        self._n += 1
        return path


@pytest.mark.parametrize(
    ("is_mapped", "name"),
    mostly_slow(
        itertools.product([False, True], BUFFERS), keep=[*range(len(BUFFERS)), 2 * len(BUFFERS) - 1]
    ),
)
def test_a_buffer_is_restored_from_blocks_at_any_fill(
    name: str, is_mapped: bool, tmp_path: Path
) -> None:
    save, batch = Saves(tmp_path), BUFFERS[name][1]()
    further = {"storage": tmp_path / "columns"} if is_mapped else {}
    with build(name, 0, **further) as buffer, build(name, 9) as restored:
        for _ in range(13):  # the ring is full after five
            buffer.push(batch())
            if len(buffer) > 20 and isinstance(buffer.sampler, PrioritySampler):
                index = buffer.sample(4)["index"]
                buffer.update_priority(index, index % 7 + 0.1)
            restored.load_state_dict(load_checkpoint(save(buffer), mapped_above=0))
            assert digest(restored.state_dict()) == digest(buffer.state_dict())
        for _ in range(6):
            pushed = batch()
            assert buffer.push(pushed) == restored.push(pushed)
            assert digest(restored.state_dict()) == digest(buffer.state_dict())
            assert digest(restored.sample(6)) == digest(buffer.sample(6))


def rows(*values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values)}


def test_only_blocks_with_new_rows_are_written(tmp_path: Path) -> None:
    buffer, blocks = TensorBuffer(80), BlockFolder(tmp_path / "blocks")
    buffer.push({"x": torch.arange(200.0)})  # ten rows a block; the ring has wrapped

    def save() -> set[Path]:
        before = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
        with buffer.live_state() as state:
            save_checkpoint(tmp_path / "buffer.safetensors", state, blocks=blocks)
        after = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
        assert before.items() <= after.items()
        return after.keys() - before.keys()

    assert len(save()) == 8
    assert not save()
    buffer.push({"x": torch.arange(200.0, 215.0)})
    assert len(save()) == 3  # the oldest block, of five rows, and two new ones
    blocks = BlockFolder(tmp_path / "blocks")  # as after a restart
    assert not save()


def test_the_rows_of_a_loaded_state_are_not_mistaken_for_those_before(tmp_path: Path) -> None:
    buffer, other, save = TensorBuffer(8), TensorBuffer(8), Saves(tmp_path)
    buffer.push(rows(1, 2, 3))
    save(buffer)
    other.push(rows(4, 5, 6))
    buffer.load_state_dict(other.state_dict())
    save(buffer)
    loaded = TensorBuffer(8)
    loaded.load_state_dict(load_checkpoint(save(buffer)))
    assert loaded.get([0, 1, 2])["x"].tolist() == [4, 5, 6]


@pytest.mark.parametrize("damage", ["cut", "changed", "swapped", "gone", "folder"])
def test_a_damaged_block_is_refused_and_written_again(damage: str, tmp_path: Path) -> None:
    buffer, path = TensorBuffer(8), tmp_path / "buffer.safetensors"
    buffer.push(rows(*map(float, range(8))))

    def save() -> None:
        with buffer.live_state() as state:
            save_checkpoint(path, state, blocks=BlockFolder(tmp_path / "blocks"))

    save()
    whole = digest(load_checkpoint(path))
    first, second = sorted(files(tmp_path))[:2]
    content = first.read_bytes()
    if damage == "cut":
        first.write_bytes(content[:-1])
    elif damage == "changed":
        first.write_bytes(content.replace(b"F32", b"I32"))
    elif damage == "swapped":
        first.write_bytes(second.read_bytes())
    else:
        first.unlink()
    if damage == "folder":
        (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match=first.name if damage != "folder" else "blocks"):
        load_checkpoint(path)
    save()
    assert digest(load_checkpoint(path)) == whole


def test_blocks_are_on_the_disk_before_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    blocks, path = BlockFolder(tmp_path / "blocks"), tmp_path / "one.safetensors"
    save_checkpoint(path, [StateBlock(partial(rows, x)) for x in (1.0, 2.0)], blocks=blocks)
    expected = [*(tmp_path / name for name in blocks_of(path)), tmp_path / "blocks"]
    assert flushed[:3] == expected and flushed[-1] == tmp_path and len(flushed) == 5


def test_names_of_blocks_lead_to_no_other_folder(tmp_path: Path) -> None:
    block = StateBlock(lambda: {"x": torch.zeros(3)})
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "one.safetensors"
    save_checkpoint(path, [block], blocks=BlockFolder(tmp_path / "deep" / "abc"))
    path.write_bytes(path.read_bytes().replace(b"abc/", b"../a"))
    with pytest.raises(CheckpointDamaged):
        load_checkpoint(path)
    assert not blocks_of(path)
    with pytest.raises(ValueError, match="must be in"):
        save_checkpoint(path, [block], blocks=BlockFolder(tmp_path / "abc"))


def test_a_changed_list_of_blocks_is_damage(tmp_path: Path) -> None:
    blocks, path = BlockFolder(tmp_path / "a"), tmp_path / "one.safetensors"
    block, other = (StateBlock(partial(rows, value)) for value in (1.0, 2.0))
    save_checkpoint(path, [block, block], blocks=blocks)
    name, same = blocks_of(path)
    assert name == same
    path.write_bytes(path.read_bytes().replace(name[2:].encode(), blocks.put(other).encode(), 1))
    with pytest.raises(CheckpointDamaged, match="checksum"):
        load_checkpoint(path)


def test_without_a_folder_everything_is_in_one_file(tmp_path: Path) -> None:
    state = {"x": StateBlock(lambda: {"y": np.arange(3)}, key="x")}
    save_checkpoint(tmp_path / "one.safetensors", state)
    assert not blocks_of(tmp_path / "one.safetensors")
    for loaded in (
        load_checkpoint(tmp_path / "one.safetensors"),
        unpack_checkpoint(pack_checkpoint(state)),
    ):
        assert loaded["x"]["y"].tolist() == [0, 1, 2]
    save_checkpoint(tmp_path / "two.safetensors", state, blocks=BlockFolder(tmp_path / "blocks"))
    with pytest.raises(CheckpointDamaged, match="other files"):
        unpack_checkpoint((tmp_path / "two.safetensors").read_bytes())


def test_a_block_that_cannot_be_written_is_a_write_error(tmp_path: Path) -> None:
    (tmp_path / "blocks").touch()  # no folder can take its place
    state = [StateBlock(lambda: {"x": torch.zeros(3)})]
    with pytest.raises(CheckpointWriteError):
        save_checkpoint(
            tmp_path / "one.safetensors", state, blocks=BlockFolder(tmp_path / "blocks")
        )
    assert not (tmp_path / "one.safetensors").exists()


def test_the_rows_of_an_earlier_version_are_refused() -> None:
    buffer = TensorBuffer(8)
    state = buffer.state_dict()
    del state["rows"]["blocks"]
    with pytest.raises(CheckpointMismatch, match="earlier version"):
        buffer.load_state_dict(state)
