import gc
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.data.ring.storage import in_memory, mapped_to
from dmiddleware.errors import ConfigError


def rows(first, n):
    number = torch.arange(first, first + n)
    return as_tree({"obs": {"a/b": number.float()[:, None]}, "number": number})


@pytest.mark.parametrize("mapped", [False, True])
def test_every_storage_holds_rows_and_frees_its_memory(mapped, tmp_path):
    folder = tmp_path / "more" / "columns"
    with TensorBuffer(8, storage=folder if mapped else None, seed=0) as buffer:
        buffer.push(rows(0, 6))
        buffer.push(rows(6, 6))
        batch = buffer.sample(8)
        assert torch.equal(batch.number.float(), batch.obs["a/b"][:, 0])
        assert buffer.get(range(4, 12)).number.tolist() == list(range(4, 12))
        assert buffer.nbytes == 8 * 12
        assert folder.exists() == mapped
        state = buffer.state_dict()
    buffer.close()
    assert not folder.exists()
    with TensorBuffer(8) as other:
        other.load_state_dict(state)
        assert other.get(range(4, 12)).number.tolist() == list(range(4, 12))


def test_buffers_may_share_a_folder_with_each_other_and_with_files(tmp_path):
    (tmp_path / "number.column").write_bytes(b"of somebody else")
    one, two = TensorBuffer(8, storage=tmp_path), TensorBuffer(8, storage=tmp_path)
    one.push(rows(0, 8))
    two.push(rows(100, 8))
    assert one.get([3]).number.tolist() == [3]
    one.close()
    assert two.get([3]).number.tolist() == [103]
    two.close()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of somebody else"]


def test_a_buffer_that_was_dropped_leaves_no_files(tmp_path):
    TensorBuffer(8, storage=tmp_path).push(rows(0, 8))
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.usefixtures("warm_processes")
def test_a_process_that_was_killed_leaves_no_files(tmp_path):
    script = f"""
    import pathlib, threading, torch
    from dmiddleware.data import TensorBuffer
    buffer = TensorBuffer(8, storage=pathlib.Path({str(tmp_path)!r}))
    buffer.push({{"number": torch.arange(8)}})
    print("pushed", flush=True)
    threading.Event().wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"pushed\n"
        finally:
            process.kill()
            process.wait(60)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_detected_at_the_first_push(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with (
            TensorBuffer(1 << 20, storage=tmp_path / "columns") as buffer,
            pytest.raises(OSError, match=r"column 'number', which needs 8\.0 MiB"),
        ):
            buffer.push({"number": torch.arange(4)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "columns").exists()


@pytest.mark.parametrize("storage", ["disk", "/tmp/replay"])
def test_a_storage_that_is_not_a_path_is_rejected(storage):
    with pytest.raises(ConfigError, match=r"pathlib\.Path"):
        TensorBuffer(8, storage=storage)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_column_may_have_no_bytes(mapped, tmp_path):
    allocate = mapped_to(tmp_path) if mapped else in_memory
    assert allocate("empty", (4, 0), torch.zeros(1).numpy().dtype).shape == (4, 0)
