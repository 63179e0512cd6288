import enum
import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dmiddleware.data import (
    as_tree,
    check_saveable,
    convert_checkpoint,
    load_checkpoint,
    pack_checkpoint,
    save_checkpoint,
    unpack_checkpoint,
)
from dmiddleware.errors import CheckpointDamaged, CheckpointWriteError


def same(a, b):
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and bytes(a.reshape(-1).view(torch.uint8)) == bytes(b.reshape(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | st.text()
    | st.binary()
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
TENSORS = st.builds(
    lambda s, d: torch.linspace(-1, 9, math.prod(s)).reshape(s).to(d),
    SHAPES,
    st.sampled_from(DTYPES),
)
ARRAYS = st.builds(
    lambda s, d: np.linspace(0, 9, math.prod(s)).reshape(s).astype(d),
    SHAPES,
    st.sampled_from(["f4", "f8", "i8", "u1", "u2", "?", ">f4"]),
)
KEYS = st.text(max_size=3) | st.integers(0, 3) | st.tuples(st.booleans(), st.text(max_size=1))
STATES = st.recursive(
    PLAIN | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def native(value):
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, dict):
        return {key: native(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(native, value))
    return value


@settings(max_examples=80, deadline=None)
@given(state=STATES)
def test_a_state_comes_back_as_it_was(state, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_checkpoint(path, state)
    assert same(native(state), load_checkpoint(path))


def test_optimizer_states_batches_and_views_come_back(tmp_path):
    path = tmp_path / "folder" / "c.safetensors"
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    batch = as_tree({"obs": {"a": torch.ones(2)}, "x": torch.zeros(2)})
    state = {
        "optimizer": optimizer.state_dict(),
        "batch": batch,
        "view": torch.arange(6).reshape(2, 3).t(),
        "reversed": np.arange(3)[::-1],
        "__rest__": torch.ones(1),
        "__metadata__": torch.ones(1),
    }
    save_checkpoint(path, state)
    loaded = load_checkpoint(path)
    assert same(loaded["optimizer"], optimizer.state_dict())
    assert torch.equal(loaded["batch"].obs.a, batch.obs.a)
    assert torch.equal(loaded["view"], state["view"])
    assert np.array_equal(loaded["reversed"], state["reversed"])
    assert torch.equal(loaded["__rest__"], torch.ones(1))
    assert torch.equal(loaded["__metadata__"], torch.ones(1))


def not_unicode(folder):
    """Return a folder whose name is not Unicode, as in another encoding; only on Linux."""
    path = folder / os.fsdecode(b"n\xe9")
    try:
        path.mkdir()
    except OSError:
        pytest.skip("this system has no such folders")
    return path


@pytest.mark.parametrize("is_relative", [True, False])
def test_checkpoints_may_be_in_folders_that_are_not_unicode(tmp_path, monkeypatch, is_relative):
    folder = not_unicode(tmp_path)
    monkeypatch.chdir(folder)
    path = Path("c.safetensors") if is_relative else folder / "c.safetensors"
    state = {"weights": torch.arange(4.0), "folder": str(folder), str(folder): [torch.ones(2)]}
    save_checkpoint(path, state)
    loaded = load_checkpoint(path)
    assert same(loaded, state)
    assert same(load_checkpoint(path, mapped_above=0), state)


@pytest.mark.parametrize("text", ["\udce9", "a\udcffb", "\ud800", "é", ""])
def test_any_text_can_be_saved(text, tmp_path):
    state = {"value": text, text: 1, "more": [{text}, (text, 2), deque([text])]}
    save_checkpoint(tmp_path / "c.safetensors", state)
    assert same(load_checkpoint(tmp_path / "c.safetensors"), state)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, "a"},
        set(),
        frozenset({(1, 2), (3, 4)}),
        Counter("abca"),
        OrderedDict(b=1, a=2),
        defaultdict(list, a=[1]),
        defaultdict(None, a=1),
        deque([1, 2, 3], maxlen=3),
        np.float32(0.1),
        np.float64(0.1),
        np.float16("nan"),
        np.int64(-3),
        np.uint8(200),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.str_("text"),
        np.str_(""),
        np.datetime64("2024-01-02"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_the_same_type(value, tmp_path):
    save_checkpoint(tmp_path / "c.safetensors", {"nested": [value], value_key(value): 0})
    (loaded,) = load_checkpoint(tmp_path / "c.safetensors")["nested"]
    assert type(loaded) is type(value)
    assert loaded == value or value != value
    assert getattr(loaded, "dtype", None) == getattr(value, "dtype", None)
    for name in ("default_factory", "maxlen"):
        assert getattr(loaded, name, None) == getattr(value, name, None)


def value_key(value):
    return value if isinstance(value, np.generic) else "other"


class Color(enum.IntEnum):
    RED = 1


class Settings(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Color.RED,
        Settings(a=1),
        range(3),
        1j,
        defaultdict(lambda: 3),
        np.ma.masked_array([1]),
        np.zeros(1, "V3")[0],
        torch.zeros(1, dtype=torch.complex128),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_come_back_as_another_type_is_rejected(value, tmp_path):
    for refuse in (check_saveable, partial(save_checkpoint, tmp_path / "c.safetensors")):
        with pytest.raises(TypeError, match=r"state\['kept'\]\[0\] is "):
            refuse({"kept": [value]})
    assert not list(tmp_path.iterdir())


def test_any_safetensors_reader_can_read_the_tensors(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"model": {"weight": torch.ones(2, 3)}, "step": 3})
    assert torch.equal(load_file(path)["model.weight"], torch.ones(2, 3))


def test_unsupported_values_are_rejected_with_their_path_before_writing(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is of type builtins.object"):
        save_checkpoint(path, {"a": [0, object()]})
    with pytest.raises(TypeError, match=r"array of object"):
        save_checkpoint(path, np.array([None]))
    with pytest.raises(TypeError, match="complex128"):
        save_checkpoint(path, torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo"):
        save_checkpoint(path, torch.eye(2).to_sparse())
    assert not list(tmp_path.iterdir())


def test_a_loaded_tensor_does_not_depend_on_the_file(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, torch.ones(5000))
    loaded = load_checkpoint(path, map_location=torch.device("cpu"))
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert loaded.sum() == 5000


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_byte_is_detected_or_has_no_effect(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    state = {"w": torch.arange(8.0), "n": [1, "two", (3.0,)]}
    save_checkpoint(path, state)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        loaded = load_checkpoint(path)
    except CheckpointDamaged:
        return
    assert same(loaded, state)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_truncated_file_is_rejected(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_checkpoint(path, {"w": torch.arange(8.0)})
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointDamaged, match="not a complete checkpoint"):
        load_checkpoint(path)


def test_a_foreign_file_and_a_missing_file_raise_different_errors(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointDamaged, match="not a checkpoint of this project"):
        load_checkpoint(tmp_path / "foreign.safetensors")
    with pytest.raises(FileNotFoundError, match="not found"):
        load_checkpoint(tmp_path / "missing.safetensors")


def test_pickled_files_are_rejected_without_loading_them(tmp_path):
    path = tmp_path / "c.pt"
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointDamaged):
        load_checkpoint(path)


def test_the_old_file_survives_a_full_disk(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"w": torch.zeros(100)})
    # Beyond a file-size limit the kernel refuses writes as it does on a full disk, and setting one
    # needs no privileges. A separate process, because the limit applies to the whole process.
    script = f"""
    import resource, torch
    from dmiddleware.data import save_checkpoint
    from dmiddleware.errors import CheckpointWriteError
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_checkpoint({str(path)!r}, {{"w": torch.ones(1_000_000)}})
    except CheckpointWriteError as error:
        print(error.errno, error.filename)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(errno.EFBIG), str(path)]
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]
    assert load_checkpoint(path)["w"].sum() == 0


def start_writing(path, in_fsync):
    """Start a process that saves a checkpoint and runs a statement before the rename."""
    script = f"""
    import os, sys, torch
    from dmiddleware.data import save_checkpoint
    def fsync(descriptor):
        {in_fsync}
    os.fsync = fsync
    save_checkpoint({str(path)!r}, {{"w": torch.ones(100)}})
    """
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.process
def test_the_next_write_removes_the_temporary_file_of_a_killed_process(tmp_path):
    with start_writing(tmp_path / "step_1.safetensors", "os.kill(os.getpid(), 9)") as killed:
        assert killed.wait(60) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    (tmp_path / ".notes.tmp").touch()  # another program's file
    save_checkpoint(tmp_path / "step_2.safetensors", {"w": torch.zeros(1)})
    assert {file.name for file in tmp_path.iterdir()} == {"step_2.safetensors", ".notes.tmp"}


@pytest.mark.process
def test_a_file_that_another_process_is_writing_is_kept(tmp_path):
    path = tmp_path / "step_1.safetensors"
    with start_writing(path, "print(flush=True); sys.stdin.read(1)") as writing:
        assert writing.stdout.readline()  # the temporary file is complete
        save_checkpoint(tmp_path / "step_2.safetensors", {"w": torch.zeros(1)})
        assert len(list(tmp_path.iterdir())) == 2
        writing.communicate(b".", timeout=60)
    assert load_checkpoint(path)["w"].sum() == 100
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_created_is_a_write_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match="could not be written") as caught:
        save_checkpoint(tmp_path / "file" / "c.safetensors", {})
    assert caught.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("protocol", ["zip", "pickle"])
def test_a_file_of_torch_is_converted(protocol, tmp_path):
    source, target = tmp_path / "ckpt_best.pth.tar", tmp_path / "ckpt_best.safetensors"
    state = {"model": {"weight": torch.ones(2)}, "last_iter": 3}
    torch.save(state, source, _use_new_zipfile_serialization=protocol == "zip")
    with pytest.raises(CheckpointDamaged, match="convert_checkpoint"):
        load_checkpoint(source)
    convert_checkpoint(source, target)
    loaded = load_checkpoint(target)
    assert loaded["last_iter"] == 3
    assert loaded["model"]["weight"].tolist() == [1.0, 1.0]


def test_a_file_of_torch_with_code_in_it_is_not_converted(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointDamaged):
        convert_checkpoint(tmp_path / "evil.pt", tmp_path / "out.safetensors")
    with pytest.raises(FileNotFoundError):
        convert_checkpoint(tmp_path / "no.pt", tmp_path / "out.safetensors")


def test_packed_bytes_are_the_content_of_the_file(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "step": 4, "name": "a"}
    save_checkpoint(tmp_path / "a.safetensors", state)
    data = pack_checkpoint(state)
    assert data == (tmp_path / "a.safetensors").read_bytes()
    again = unpack_checkpoint(data)
    assert torch.equal(again.pop("w"), torch.arange(3.0))
    assert again == {"step": 4, "name": "a"}


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_packed_bytes_that_are_incomplete_are_refused(cut: int) -> None:
    with pytest.raises(CheckpointDamaged):
        unpack_checkpoint(pack_checkpoint({"w": torch.arange(3.0)})[:cut])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_large_tensors_are_mapped_and_writing_to_them_leaves_the_file_unchanged(tmp_path):
    path = tmp_path / "one.safetensors"
    state = {"large": torch.arange(3000.0), "small": torch.arange(5.0), "array": np.arange(2000)}
    save_checkpoint(path, state)
    small = load_checkpoint(path)["small"]
    assert not is_mapped(path)
    loaded = load_checkpoint(path, mapped_above=4000)
    assert is_mapped(path)
    assert same(loaded, state)
    loaded["large"] += 1.0
    loaded["array"][:] = 0
    assert same(load_checkpoint(path), state)
    save_checkpoint(path, {"small": small})  # replaces the file
    assert same(loaded["large"], state["large"] + 1.0)
    small = loaded["small"]
    del loaded
    assert not is_mapped(path)
    assert same(small, state["small"])
