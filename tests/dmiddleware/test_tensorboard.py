"""The TensorBoard writer."""

from __future__ import annotations

import resource
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from dmiddleware import tensorboard
from dmiddleware.tensorboard import TensorboardWriter

DEADLINE_S = 60.0


@pytest.mark.parametrize("method", ["add_scalar", "add_scalars"])
def test_a_full_disk_is_a_warning_in_the_thread_that_logs_and_never_a_hang(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    value: Any = 1.0 if method == "add_scalar" else {"a": 1.0, "b": 2.0}
    closed = threading.Event()

    def log() -> None:
        writer = TensorboardWriter(tmp_path)
        for step in range(1000):
            getattr(writer, method)("loss", value, step)
        writer.close()
        closed.set()

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        thread = threading.Thread(target=log, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert closed.is_set()
    assert caplog.text.count("cannot write TensorBoard events") == 1


def scalars(folder: Path) -> list[float]:
    """Read a file as TensorBoard does: up to a record whose checksums are wrong."""
    (path,) = folder.glob("events*")
    content, found = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        data, end = content[12 : 12 + size], 16 + size
        assert struct.unpack("<I", content[8:12])[0] == masked_crc32c(content[:8])
        assert struct.unpack("<I", content[end - 4 : end])[0] == masked_crc32c(data)
        found += [value.simple_value for value in Event.FromString(data).summary.value]
        content = content[end:]
    return found


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.int64(2), np.array([2.0]), torch.tensor(2), torch.tensor([2.0]),
     torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True)],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_written(tmp_path: Path, value: Any) -> None:
    with TensorboardWriter(tmp_path) as writer:
        writer.add_scalar("loss", value, 0)
        writer.add_scalars("losses", {"actor": value, "critic": value}, 0)
    assert scalars(tmp_path) == [2.0]
    for name in ("actor", "critic"):
        assert scalars(tmp_path / "losses" / name) == [2.0]


def test_an_interrupt_leaves_no_incomplete_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_calls = 0

    def interrupted(data: bytes) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 4:
            raise KeyboardInterrupt
        return masked_crc32c(data)

    writer = TensorboardWriter(tmp_path)
    monkeypatch.setattr(tensorboard, "masked_crc32c", interrupted)
    writer.add_scalar("loss", 1.0, 0)
    with pytest.raises(KeyboardInterrupt):
        writer.add_scalar("loss", 2.0, 1)
    writer.add_scalar("loss", 3.0, 2)
    writer.close()
    assert scalars(tmp_path) == [1.0, 3.0]


def test_two_writers_in_the_same_second_use_two_files(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        writer = TensorboardWriter(tmp_path)
        writer.add_scalar("loss", value, 0)
        writer.close()
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 50


@pytest.mark.parametrize("method", ["add_scalar", "add_scalars"])
def test_events_are_dropped_while_the_disk_is_full(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TensorboardWriter(tmp_path) as writer:

        def log(value: float) -> None:
            getattr(writer, method)("loss", value if method == "add_scalar" else {"a": value}, 0)
            writer.flush()

        for value in (1.0, 2.0):
            log(value)
        folder = tmp_path if method == "add_scalar" else tmp_path / "loss" / "a"
        (path,) = folder.glob("events*")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
        try:
            for value in (3.0, 4.0):
                log(value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log(5.0)
    assert scalars(folder) == [1.0, 2.0, 5.0]
    assert caplog.text.count("cannot write TensorBoard events") == 1


def test_a_folder_that_cannot_be_made_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tb").write_text("a file")
    with TensorboardWriter(tmp_path / "tb") as writer:
        writer.add_scalar("loss", 1.0, 0)
        (tmp_path / "tb").unlink()
        writer.flush()
        writer.add_scalar("loss", 2.0, 1)
    assert scalars(tmp_path / "tb") == [1.0, 2.0]
    assert caplog.text.count("cannot write TensorBoard events") == 1
