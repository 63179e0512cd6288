import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmiddleware.errors import CheckpointDamaged, ConfigError
from dmiddleware.worker.comm import compression
from dmiddleware.worker.comm.compression import compress, decompress
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.errors import StepDataLost

STEPS = [
    {"obs": torch.arange(4.0), "action": torch.tensor(1), "done": False, "id": "a"},
    {"obs": torch.zeros(4), "action": torch.tensor(0), "done": True, "id": None},
]


@pytest.fixture(params=["none", "zlib", "lz4"])
def compressor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "data", tmp_path / "policy", "run")


def test_step_data_comes_back_as_it_was(tmp_path: Path, compressor: str) -> None:
    store: Store = FileStore(tmp_path, tmp_path, "run", compressor=compressor)
    ref = store.put("env_0_abc", STEPS)
    ending = {"none": "", "zlib": ".zlib", "lz4": ".lz4"}[compressor]
    assert ref == f"run/env_0_abc.safetensors{ending}"
    assert (tmp_path / ref).is_file()
    [first, second] = store.get(ref)
    assert torch.equal(first["obs"], STEPS[0]["obs"])
    assert (second["done"], second["id"]) == (True, None)


def test_a_store_reads_what_another_compressor_wrote(tmp_path: Path, compressor: str) -> None:
    ref = FileStore(tmp_path, tmp_path, "run", compressor=compressor).put("a", {"x": 1})
    assert FileStore(tmp_path, tmp_path, "run", compressor="none").get(ref) == {"x": 1}


def test_deleted_data_is_lost_and_deleting_it_again_does_nothing(store: FileStore) -> None:
    ref = store.put("a", STEPS)
    store.delete([ref])
    store.delete([ref])
    with pytest.raises(StepDataLost) as caught:
        store.get(ref)
    assert caught.value.data_id == "a"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 200), flip=st.integers(0, 10_000))
def test_a_damaged_file_is_lost_data(tmp_path: Path, compressor: str, cut: int, flip: int) -> None:
    store = FileStore(tmp_path, tmp_path, "run", compressor=compressor)
    ref = store.put("a", {"x": torch.arange(50), "y": "text"})
    content = bytearray((tmp_path / ref).read_bytes())
    content[flip % len(content)] ^= 0x55
    (tmp_path / ref).write_bytes(content[: len(content) - cut])
    try:
        answer = store.get(ref)
    except StepDataLost as error:
        assert error.data_id == "a"
    else:  # a change that decompression does not see, such as that of a flag
        assert torch.equal(answer["x"], torch.arange(50))


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a b", "ä", "a\n", "/etc/passwd"])
def test_names_that_are_not_plain_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        FileStore(tmp_path, tmp_path, name)
    store = FileStore(tmp_path, tmp_path, "run")
    with pytest.raises(ConfigError, match="letters, digits"):
        store.put(name, 1)
    with pytest.raises(ConfigError, match="letters, digits"):
        store.publish(name, 1, {})
    with pytest.raises(ConfigError, match="letters, digits"):
        store.newest(name, 0)


@pytest.mark.parametrize(
    "ref",
    ["", "a", "run/a", "other/a.safetensors", "run/../a.safetensors", "/a.safetensors",
     "run/b/a.safetensors", "../run/a.safetensors"],
)  # fmt: skip
def test_references_that_lead_elsewhere_are_refused(store: FileStore, ref: str) -> None:
    with pytest.raises(ConfigError):
        store.get(ref)
    kept = store.put("kept", 1)
    with pytest.raises(ConfigError):
        store.delete([kept, ref])
    assert store.get(kept) == 1


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.safetensors").write_bytes(b"secret")
    (tmp_path / "data" / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        FileStore(tmp_path / "data", tmp_path, "run")
    store = FileStore(tmp_path / "data2", tmp_path, "run", compressor="none")
    store.put("b", 1)
    (tmp_path / "data2/run/a.safetensors").symlink_to(tmp_path / "elsewhere/a.safetensors")
    for use in (store.get, lambda ref: store.delete([ref]), lambda ref: store.put("a", 1)):
        with pytest.raises(ConfigError, match="symbolic link"):
            use("run/a.safetensors")
    assert (tmp_path / "elsewhere/a.safetensors").read_bytes() == b"secret"


def test_what_a_file_cannot_hold_is_refused_and_leaves_no_file(
    store: FileStore, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="object"):
        store.put("a", {"x": object()})
    assert not list(tmp_path.rglob("*a*"))


def test_the_store_names_references_whose_files_are_gone(store: FileStore) -> None:
    refs = [store.put(name, 1) for name in "abc"]
    store.delete(refs[1:2])
    assert store.missing(refs) == {refs[1]}
    with pytest.raises(ConfigError):
        store.missing(["../a"])


def test_a_policy_is_returned_once_for_each_version(store: FileStore) -> None:
    assert store.newest("policy_1", -1) is None
    store.publish("policy_1", 0, {"model": {"w": torch.ones(2)}, "iter": 0})
    found = store.newest("policy_1", -1)
    assert found is not None
    assert found[0] == 0
    assert torch.equal(found[1]["model"]["w"], torch.ones(2))
    assert store.newest("policy_1", 0) is None
    store.publish("policy_1", 5, {"iter": 5})
    assert store.newest("policy_1", 0) == (5, {"iter": 5})
    assert store.newest("policy_1", 5) is None


def test_an_unchanged_policy_is_not_read_again(store: FileStore, tmp_path: Path) -> None:
    store.publish("p", 3, {"iter": 3})
    assert store.newest("p", 0) == (3, {"iter": 3})
    path = tmp_path / "policy" / "p.safetensors"
    status = path.stat()
    size = path.stat().st_size
    path.write_bytes(b"x" * size)  # the same file, with the same times
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.newest("p", 3) is None


def test_a_file_that_is_no_policy_is_reported(store: FileStore, tmp_path: Path) -> None:
    ref = FileStore(tmp_path, tmp_path, "policy", compressor="none").put("p", [1])
    assert ref == "policy/p.safetensors"
    with pytest.raises(CheckpointDamaged, match="published policy"):
        store.newest("p", 0)


def test_readers_never_see_half_of_a_policy(store: FileStore) -> None:
    done = threading.Event()

    def write() -> None:
        for version in range(100):
            weights = torch.full((100_000,), float(version))
            store.publish("p", version, {f"layer{n}": weights for n in range(version % 5 + 1)})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    have = -1
    while not done.is_set():
        if found := store.newest("p", have):
            version, state = found
            assert version > have
            assert len(state) == version % 5 + 1
            assert all(bool((layer == version).all()) for layer in state.values())
            have = version
    writer.join()
    assert have >= 0


KILLED = """
import os, sys
from pathlib import Path
from dmiddleware.files import atomic_file
from dmiddleware.worker.comm.file_store import FileStore
store = FileStore(sys.argv[1], sys.argv[1], "run", compressor="none")
store.put("whole", 1)
def write(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
atomic_file.write_atomically(Path(sys.argv[1]) / "run" / "half.safetensors", write, durable=False)
"""


@pytest.mark.process
def test_a_store_removes_the_half_written_files_of_killed_processes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert len(list((tmp_path / "run").iterdir())) == 2
    store = FileStore(tmp_path, tmp_path, "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["whole.safetensors"]
    assert store.get("run/whole.safetensors") == 1


def test_clear_ignores_files_that_a_worker_deletes_meanwhile(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        store.put(name, STEPS)
    unlink, others = os.unlink, []

    def unlink_after_another(path: str, **options: Any) -> None:
        if not others:
            others.append(path)
            unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink_after_another)
    store.clear()
    assert others and not (tmp_path / "data" / "run").exists()


def test_clear_deletes_the_data_of_its_own_run_only(tmp_path: Path) -> None:
    store, other = FileStore(tmp_path, tmp_path, "a"), FileStore(tmp_path, tmp_path, "b")
    store.put("x", 1)
    kept = other.put("x", 2)
    store.clear()
    store.clear()
    assert not (tmp_path / "a").exists()
    assert other.get(kept) == 2


@given(st.binary(max_size=500))
def test_bytes_are_the_same_after_compressing_and_decompressing(data: bytes) -> None:
    for name in compression.COMPRESSORS:
        assert decompress(name, compress(name, data)) == data


def test_an_unknown_compressor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none, zlib, lz4"):
        FileStore(tmp_path, tmp_path, "run", compressor="gzip")


def test_without_lz4_zlib_is_used_and_lz4_files_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = FileStore(tmp_path, tmp_path, "run").put("a", 1)
    monkeypatch.setattr(compression, "lz4", None)
    with caplog.at_level(logging.WARNING):
        store = FileStore(tmp_path, tmp_path, "run")
    assert "zlib" in caplog.text
    assert store.put("b", np.float32(1)).endswith(".zlib")
    with pytest.raises(ConfigError, match=r"dmiddleware\[classic\]"):
        store.get(written)


def test_a_damaged_policy_is_reported_with_its_path(store: FileStore, tmp_path: Path) -> None:
    store.publish("p", 1, {})
    (tmp_path / "policy" / "p.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointDamaged, match=r"p\.safetensors"):
        store.newest("p", 0)


def test_a_policy_that_is_published_while_it_is_read_is_seen_whole(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(version: int) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((1000,), float(version))}

    open_storage = torch.UntypedStorage.from_file

    def publish_then_open(*args: Any, **kwargs: Any) -> Any:
        # The safetensors library opens a file for its header, and again for its tensors.
        store.publish("policy", 2, weights(2))
        return open_storage(*args, **kwargs)

    store.publish("policy", 1, weights(1))
    monkeypatch.setattr(torch.UntypedStorage, "from_file", publish_then_open)
    newest = store.newest("policy", 0)
    assert newest is not None
    version, state = newest
    assert torch.equal(state["weight"], weights(version)["weight"])
