"""Slabs of shared memory: filled, taken once and released, and the failures in between."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.router.transport.slabs import SlabPool, SlabReader, sweep
from dmiddleware.router.wire.byte_pieces import BytePieces

MAX_BYTES = 8 << 20


class Now:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def pool(tmp_path: Path, now: Now) -> Iterator[SlabPool]:
    with contextlib.closing(SlabPool(tmp_path, max_bytes=MAX_BYTES, now=now)) as pool:
        yield pool


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SlabReader]:
    with contextlib.closing(SlabReader(tmp_path)) as reader:
        yield reader


def filled(pool: SlabPool, content: bytes, reader: int = 1) -> bytes:
    ticket = pool.fill(content, reader=reader)
    assert ticket is not None
    return ticket


def taken(reader: SlabReader, ticket: bytes) -> memoryview:
    content = reader.take(ticket, max_bytes=MAX_BYTES)
    assert content is not None
    return content


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.slab"))


@pytest.mark.parametrize("size", [0, 1, 65536 - 64, 65536 - 63, 3_000_001])
def test_a_slab_round_trips(pool: SlabPool, reader: SlabReader, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    assert taken(reader, filled(pool, content)) == content


def test_slab_files_are_allocated_in_full(pool: SlabPool, tmp_path: Path) -> None:
    filled(pool, bytes(1_000_000))
    (file,) = files(tmp_path)
    status = file.stat()
    assert status.st_blocks * 512 >= status.st_size >= 1_000_000
    assert status.st_mode & 0o777 == 0o600


def test_a_slab_is_free_when_its_last_view_is_gone(
    pool: SlabPool, reader: SlabReader, tmp_path: Path
) -> None:
    view = taken(reader, filled(pool, bytes(100_000)))
    array = np.frombuffer(view[50_000:], np.uint8)
    del view
    gc.collect()
    filled(pool, b"\1" * 100_000)
    assert len(files(tmp_path)) == 2, "the slab that is being read must not be used"
    assert not array.any()
    del array
    gc.collect()
    filled(pool, b"\2" * 100_000)
    assert len(files(tmp_path)) == 2


def test_a_ticket_is_good_for_one_use(pool: SlabPool, reader: SlabReader) -> None:
    ticket = filled(pool, b"once")
    first = taken(reader, ticket)
    assert reader.take(ticket, max_bytes=MAX_BYTES) is None
    del first
    gc.collect()
    assert reader.take(ticket, max_bytes=MAX_BYTES) is None
    again = filled(pool, b"anew")
    assert reader.take(ticket, max_bytes=MAX_BYTES) is None, "an old ticket got new content"
    assert taken(reader, again) == b"anew"


def test_a_forged_ticket_gets_nothing(pool: SlabPool, reader: SlabReader, tmp_path: Path) -> None:
    ticket = filled(pool, bytes(1000))
    # The content's offset and its length are eight bytes each.
    token, length, name = ticket[:16], ticket[16:32], ticket[32:]
    begin = length[:8]
    too_long = begin + (1 << 20).to_bytes(8, "little")
    huge = begin + (1 << 63).to_bytes(8, "little")
    too_early = bytes(8) + length[8:]
    too_late = (1 << 63).to_bytes(8, "little") + length[8:]
    (tmp_path / f"{os.getpid()}-{'0' * 16}.slab").symlink_to(tmp_path / name.decode())
    (tmp_path / f"{os.getpid()}-{'1' * 16}.slab").write_bytes(b"x")
    (tmp_path / f"{os.getpid()}-{'2' * 16}.slab").write_bytes(bytes(2000))
    os.mkfifo(tmp_path / f"{os.getpid()}-{'3' * 16}.slab")
    for made_up in [
        b"",
        ticket[:20],
        bytes(16) + length + name,
        token + too_long + name,
        token + huge + name,
        token + too_early + name,
        token + too_late + name,
        token + length + b"../" + name,
        token + length + str(tmp_path).encode() + b"/" + name,
        token + length + b"\xff\xfe",
        token + length + b"1-0000000000000000.slab",
        *(token + length + f"{os.getpid()}-{str(digit) * 16}.slab".encode() for digit in range(4)),
    ]:
        assert reader.take(made_up, max_bytes=MAX_BYTES) is None, made_up
    assert reader.take(ticket, max_bytes=999) is None
    assert taken(reader, ticket) == bytes(1000)


def test_slabs_use_bounded_memory_and_free_ones_make_room(
    pool: SlabPool, reader: SlabReader
) -> None:
    views = [taken(reader, filled(pool, bytes(1 << 20))) for _ in range(7)]
    assert pool.fill(bytes(1 << 20), reader=1) is None
    assert pool.n_bytes <= MAX_BYTES
    del views[:3]
    gc.collect()
    assert pool.fill(bytes(3 << 20), reader=1) is not None, "three free slabs were not removed"
    assert pool.n_bytes <= MAX_BYTES


def test_a_full_file_system_is_logged_once_and_not_raised(
    pool: SlabPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with files_of_at_most(1 << 20):
        assert pool.fill(bytes(2 << 20), reader=1) is None
        assert pool.fill(bytes(2 << 20), reader=1) is None
        assert files(tmp_path) == []
        assert pool.fill(bytes(1 << 19), reader=1) is not None
    assert pool.fill(bytes(2 << 20), reader=1) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "socket is used instead" in caplog.text


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_small_file_system_fills_up_without_a_signal(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with (
            contextlib.closing(SlabPool(tmp_path, max_bytes=1 << 30)) as pool,
            contextlib.closing(SlabReader(tmp_path)) as reader,
        ):
            views = []
            for number in range(10):
                ticket = pool.fill(bytes([number]) * (600 << 10), reader=1)
                if ticket is None:
                    break
                views.append(taken(reader, ticket))
            assert len(views) == 3
            for number, view in enumerate(views):
                assert view == bytes([number]) * (600 << 10)
            del view, views
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_abandoning_a_reader_frees_its_slabs_and_keeps_its_views_valid(
    pool: SlabPool, reader: SlabReader, tmp_path: Path
) -> None:
    view = taken(reader, filled(pool, b"x" * 100_000, reader=1))
    filled(pool, b"y" * 100_000, reader=1)
    other = filled(pool, b"z" * 100_000, reader=2)
    pool.abandon(1)
    assert len(files(tmp_path)) == 1
    assert view == b"x" * 100_000
    assert taken(reader, other) == b"z" * 100_000


def test_unread_slabs_are_freed_after_a_while(pool: SlabPool, tmp_path: Path, now: Now) -> None:
    forgotten = filled(pool, bytes(100_000))
    now.s = 29.0
    filled(pool, bytes(100_000))
    assert len(files(tmp_path)) == 2
    now.s = 31.0
    filled(pool, bytes(100_000))
    assert len(files(tmp_path)) == 2
    assert forgotten[32:].decode() not in [file.name for file in files(tmp_path)]


def test_closing_removes_all_files_and_leaves_views_valid(
    tmp_path: Path, reader: SlabReader
) -> None:
    pool = SlabPool(tmp_path, max_bytes=MAX_BYTES)
    view = taken(reader, filled(pool, b"x" * 1000))
    pool.close()
    pool.close()
    reader.close()
    assert files(tmp_path) == []
    assert view == b"x" * 1000


def test_a_reader_keeps_a_bounded_number_of_slabs_mapped(tmp_path: Path) -> None:
    with contextlib.closing(SlabReader(tmp_path)) as reader:
        for _ in range(3):
            with contextlib.closing(SlabPool(tmp_path, max_bytes=1 << 30)) as pool:
                tickets = [filled(pool, b"%d" % number) for number in range(50)]
                assert [bytes(taken(reader, ticket)) for ticket in tickets] == [
                    b"%d" % number for number in range(50)
                ]
        assert _mapped_slabs(tmp_path) <= 64


def test_views_stay_valid_when_the_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with (
        contextlib.closing(SlabReader(folder)) as reader,
        contextlib.closing(SlabPool(folder, max_bytes=1 << 30)) as pool,
    ):
        tickets = [filled(pool, b"%d" % number) for number in range(64)]
        held = [taken(reader, ticket) for ticket in tickets]
        shutil.rmtree(folder)
        assert pool.fill(b"no place", reader=1) is None
        assert reader.take(tickets[0], max_bytes=MAX_BYTES) is None
        assert reader.take(b"\0" * 32 + b"1-0123456789abcdef.slab", max_bytes=MAX_BYTES) is None
        assert held == [b"%d" % number for number in range(64)]


@pytest.mark.process
def test_sweeping_removes_only_the_slabs_of_dead_processes(pool: SlabPool, tmp_path: Path) -> None:
    mine = filled(pool, bytes(1000))[32:].decode()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(20)
    (tmp_path / f"{dead.pid}-{'a' * 16}.slab").write_bytes(b"left behind")
    (tmp_path / "0.sock").touch()
    assert sweep(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.sock", mine]


HEAD = b"what goes before the arrays"
ARRAYS = [np.arange(3000, dtype=np.uint8), np.full(100, 7, np.uint8), np.zeros(64, np.uint8)]


def views(arrays: list[np.ndarray]) -> list[memoryview]:
    return [array.data for array in arrays]


def frame(arrays: list[memoryview], head: bytes = HEAD) -> BytePieces:
    """Put arrays into a frame, each at a multiple of 64 bytes, after a padded head."""
    pieces: list[bytes | memoryview] = [head.ljust(128)]
    for array in arrays:
        pieces += [bytes(-sum(map(len, pieces)) % 64), array]
    return BytePieces(pieces)


def staged(pool: SlabPool) -> list[memoryview]:
    down = pool.stage_arrays(views(ARRAYS))
    assert down is not None
    return down


def test_a_frame_around_staged_arrays_arrives_like_a_copied_one(
    pool: SlabPool, reader: SlabReader, tmp_path: Path
) -> None:
    content = frame(staged(pool))
    ticket = pool.complete(content, reader=1)
    assert ticket is not None
    assert taken(reader, ticket) == bytes(content) == bytes(frame(views(ARRAYS)))
    assert len(files(tmp_path)) == 1


def test_staged_arrays_are_copies(pool: SlabPool) -> None:
    arrays = [array.copy() for array in ARRAYS]
    down = pool.stage_arrays(views(arrays))
    arrays[0][:] = 99
    assert down is not None and down[0] == ARRAYS[0].data


def test_a_frame_is_completed_once(pool: SlabPool, reader: SlabReader) -> None:
    content = frame(staged(pool))
    first = pool.complete(content, reader=1)
    assert first is not None and pool.complete(content, reader=2) is None
    assert taken(reader, first) == bytes(content)
    again = pool.fill(content, reader=2)
    assert again is not None and taken(reader, again) == bytes(content)


def test_only_the_frame_of_the_staged_arrays_is_completed(pool: SlabPool) -> None:
    down = staged(pool)
    assert pool.complete(b"no parts", reader=1) is None
    assert pool.complete(frame(views(ARRAYS)), reader=1) is None
    assert pool.complete(frame(down[:2]), reader=1) is None
    assert pool.complete(frame([*down, np.ones(5, np.uint8).data]), reader=1) is None
    assert pool.complete(frame(down, head=bytes(5000)), reader=1) is None


def test_a_slab_is_not_reused_while_its_staged_arrays_are_alive(
    pool: SlabPool, reader: SlabReader, tmp_path: Path
) -> None:
    down = staged(pool)
    ticket = pool.complete(frame(down), reader=1)
    assert ticket is not None
    taken(reader, ticket)
    gc.collect()
    filled(pool, bytes(3000))
    assert down[0] == ARRAYS[0].data and len(files(tmp_path)) == 2
    del down
    gc.collect()
    filled(pool, bytes(3000))
    assert len(files(tmp_path)) == 2


def test_staged_arrays_outlive_their_reader(pool: SlabPool, reader: SlabReader) -> None:
    content = frame(staged(pool))
    assert pool.complete(content, reader=1) is not None
    pool.abandon(1)
    assert bytes(content) == bytes(frame(views(ARRAYS)))
    ticket = pool.fill(content, reader=2)
    assert ticket is not None and taken(reader, ticket) == bytes(content)


def test_without_free_memory_nothing_is_staged(pool: SlabPool) -> None:
    assert pool.stage_arrays([np.zeros(MAX_BYTES, np.uint8).data]) is None


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["fill", "lay", "complete", "take", "drop", "abandon"]),
            st.integers(0, 200_000),
        ),
        max_size=40,
    )
)
def test_views_never_change_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("slabs")
    with (
        contextlib.closing(SlabPool(folder, max_bytes=1 << 20)) as pool,
        contextlib.closing(SlabReader(folder)) as reader,
    ):
        model = Model(pool, reader)
        for position, (what, number) in enumerate(steps):
            getattr(model, what)(number, position + 1)
            assert pool.n_bytes <= 1 << 20
            assert all(view == content for view, content in model.held)
            assert all(bytes(parts) == content for parts, content in model.down)


class Model:
    """Views of slabs, with the contents that they must have."""

    def __init__(self, pool: SlabPool, reader: SlabReader) -> None:
        self.pool, self.reader = pool, reader
        self.sent: list[tuple[bytes, bytes]] = []
        self.held: list[tuple[memoryview, bytes]] = []
        self.down: list[tuple[BytePieces, bytes]] = []

    def fill(self, number: int, byte: int) -> None:
        content = bytes([byte]) * number
        self._note(self.pool.fill(content, reader=number % 2), content)

    def lay(self, number: int, byte: int) -> None:
        array = np.full(number, byte, np.uint8)
        views_of = self.pool.stage_arrays([array.data])
        if views_of is not None:
            self.down.append((frame(views_of), bytes(frame([array.data]))))

    def complete(self, number: int, byte: int) -> None:
        if self.down:
            parts, content = self.down[number % len(self.down)]
            self._note(self.pool.complete(parts, reader=number % 2), content)

    def take(self, number: int, byte: int) -> None:
        if self.sent:
            ticket, content = self.sent.pop(number % len(self.sent))
            view = self.reader.take(ticket, max_bytes=MAX_BYTES)
            if view is not None:
                self.held.append((view, content))

    def drop(self, number: int, byte: int) -> None:
        kept = self.held if self.held and number % 2 else self.down
        if kept:
            kept.pop(number % len(kept))

    def abandon(self, number: int, byte: int) -> None:
        self.pool.abandon(number % 2)

    def _note(self, ticket: bytes | None, content: bytes) -> None:
        if ticket is not None:
            self.sent.append((ticket, content))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the operating system refuse longer files, as on a full file system."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _mapped_slabs(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/")
