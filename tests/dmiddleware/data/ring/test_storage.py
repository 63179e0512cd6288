import gc
import multiprocessing
import pickle
import resource
import subprocess
import sys
import textwrap
import threading
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.data.ring.storage import FileStorage, RamStorage, SharedStorage
from dmiddleware.errors import ConfigError


def rows(first, n):
    number = torch.arange(first, first + n)
    return as_tree({"obs": {"a/b": number.float()[:, None]}, "number": number})


@pytest.mark.parametrize("storage", ["ram", "shared", "file"])
def test_every_storage_holds_rows_and_frees_its_memory(storage, tmp_path):
    folder = tmp_path / "columns"
    segments = []
    with TensorBuffer(8, storage=folder if storage == "file" else storage, seed=0) as buffer:
        buffer.push(rows(0, 6))
        buffer.push(rows(6, 6))
        batch = buffer.sample(8)
        assert torch.equal(batch.number.float(), batch.obs["a/b"][:, 0])
        assert buffer.get(range(4, 12)).number.tolist() == list(range(4, 12))
        assert buffer.nbytes == 8 * 12
        if storage == "file":
            assert {path.name for path in folder.iterdir()} == {
                "number.column",
                "obs.a%2fb.column",
            }
        if storage == "shared":
            segments = [column.segment for column in buffer.shared_handle.columns]
            assert len(segments) == 2
        state = buffer.state_dict()
    buffer.close()
    assert not folder.exists()
    for segment in segments:
        with pytest.raises(FileNotFoundError):
            SharedMemory(segment)
    with TensorBuffer(8) as other:
        other.load_state_dict(state)
        assert other.get(range(4, 12)).number.tolist() == list(range(4, 12))


def read_shared(handle, size, connection):
    with handle.attach() as shared:
        connection.send(shared.take(torch.arange(4, 8).numpy(), size).number.tolist())
        connection.recv()  # the owner pushes
        connection.send(shared.take(torch.arange(8, 12).numpy(), size).number.tolist())


@pytest.mark.process
def test_another_process_sees_shared_columns_as_they_change():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with TensorBuffer(8, storage="shared") as buffer:
        buffer.push(rows(0, 8))
        process = context.Process(target=read_shared, args=(buffer.shared_handle, 8, theirs))
        process.start()
        assert ours.poll(60)
        assert ours.recv() == [4, 5, 6, 7]
        buffer.push(rows(8, 4))
        ours.send("pushed")
        assert ours.poll(60)
        assert ours.recv() == [8, 9, 10, 11]
        process.join(60)
        assert process.exitcode == 0
        # The memory survives the reader.
        assert buffer.get([11]).number.tolist() == [11]
        handle = buffer.shared_handle
    with pytest.raises(FileNotFoundError), handle.attach():
        pass


def test_shared_memory_survives_the_end_of_a_reading_process():
    with TensorBuffer(8, storage="shared") as buffer:
        buffer.push(rows(0, 8))
        handle = buffer.shared_handle
        script = f"""
        import pickle
        with pickle.loads({pickle.dumps(handle)!r}).attach() as shared:
            print(int(shared.arrays["number"].sum()))
        """
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == "28"
        assert not done.stderr
        with handle.attach() as shared:
            assert shared.arrays["number"].sum() == 28


def test_threads_may_attach_at_the_same_time(monkeypatch):
    register, opened, entered = resource_tracker.register, [], threading.Event()
    left = threading.Event()

    def open_segment(*args, **kwargs):
        opened.append(SharedMemory(*args, **kwargs))
        if len(opened) == 1:
            entered.set()
            left.wait(0.2)  # without the lock, the other thread is in here meanwhile
        else:
            left.set()
            first.join(30)
        return opened[-1]

    def attach():
        with handle.attach() as shared:
            assert shared.arrays["number"].sum() == 28

    with TensorBuffer(8, storage="shared") as buffer:
        buffer.push(as_tree({"number": torch.arange(8)}))
        handle = buffer.shared_handle
        monkeypatch.setattr(
            "dmiddleware.data.ring.storage.shared_memory.SharedMemory", open_segment
        )
        first, second = threading.Thread(target=attach), threading.Thread(target=attach)
        first.start()
        assert entered.wait(30)
        second.start()
        for thread in (first, second):
            thread.join(60)
            assert not thread.is_alive()
    assert len(opened) == 2
    assert resource_tracker.register is register


def test_only_a_shared_buffer_has_a_handle():
    with pytest.raises(ValueError, match="storage='shared'"):
        TensorBuffer(8).shared_handle  # noqa: B018
    with (
        TensorBuffer(8, storage="shared") as buffer,
        pytest.raises(ValueError, match="after its first push"),
    ):
        buffer.shared_handle  # noqa: B018


def test_leftover_files_are_replaced_with_a_warning(tmp_path, caplog):
    (tmp_path / "number.column").write_bytes(b"left over")
    (tmp_path / "other").touch()
    with TensorBuffer(8, storage=tmp_path) as buffer:
        buffer.push(rows(0, 8))
        assert buffer.get([3]).number.tolist() == [3]
    assert "left by an earlier buffer" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_folder_belongs_to_one_buffer_at_a_time(tmp_path):
    folder = tmp_path / "columns"
    one, two = TensorBuffer(8, storage=folder), TensorBuffer(8, storage=folder)
    one.push(rows(0, 8))
    for _ in range(2):
        with pytest.raises(ConfigError, match="another buffer keeps its columns in"):
            two.push(rows(100, 8))
    assert one.get([3]).number.tolist() == [3]
    one.close()
    assert not folder.exists()
    two.push(rows(100, 8))
    one.close()
    assert two.get([3]).number.tolist() == [103]
    two.close()
    assert not folder.exists()


def test_a_buffer_that_was_dropped_frees_its_folder(tmp_path):
    TensorBuffer(8, storage=tmp_path).push(rows(0, 8))
    gc.collect()
    with TensorBuffer(8, storage=tmp_path) as buffer:
        buffer.push(rows(100, 8))
        assert buffer.get([3]).number.tolist() == [103]


@pytest.mark.process
def test_a_folder_is_free_when_its_process_was_killed(tmp_path):
    script = f"""
    import pathlib, threading, torch
    from dmiddleware.data import TensorBuffer
    buffer = TensorBuffer(8, storage=pathlib.Path({str(tmp_path)!r}))
    buffer.push({{"number": torch.arange(8)}})
    print("pushed", flush=True)
    threading.Event().wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        TensorBuffer(8, storage=tmp_path) as buffer,
    ):
        try:
            assert process.stdout.readline() == b"pushed\n"
            with pytest.raises(ConfigError, match="another buffer"):
                buffer.push({"number": torch.arange(8)})
        finally:
            process.kill()
            process.wait(60)
        buffer.push({"number": torch.arange(8)})


def test_a_full_disk_is_detected_at_the_first_push(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with (
            TensorBuffer(1 << 20, storage=tmp_path / "columns") as buffer,
            pytest.raises(OSError, match=r"column 'number' .* needs 8\.0 MiB"),
        ):
            buffer.push({"number": torch.arange(4)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "columns").exists()


def test_an_unknown_storage_is_rejected():
    with pytest.raises(ValueError, match=r"'shared' or a pathlib\.Path"):
        TensorBuffer(8, storage="disk")


@pytest.mark.parametrize("make", [RamStorage, SharedStorage, None])
def test_a_column_may_have_no_bytes(make, tmp_path):
    storage = make() if make else FileStorage(tmp_path)
    assert storage.allocate("empty", (4, 0), torch.zeros(1).numpy().dtype).shape == (4, 0)
    storage.close()
    storage.close()
