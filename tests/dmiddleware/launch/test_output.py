"""Streams that never raise, log files, and lines of bounded length."""

from __future__ import annotations

import os
import pty
import time
from pathlib import Path

import pytest

from dmiddleware.launch.output import LineSplitter, LogFile, SteadyStream


def lines(*chunks: bytes, longest: int = 8192) -> list[str]:
    splitter = LineSplitter(longest)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.end()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((b"one\ntwo\nthree",), ["one", "two", "three"]),
        ((b"on", b"e\nt", b"wo\n"), ["one", "two"]),
        ((b"\n\none\n",), ["", "", "one"]),
        ((b"\r 10%\r 20%\r\n", b"done\n"), [" 10%", " 20%", "done"]),
        ((b"one\r", b"\ntwo\r\n"), ["one", "two"]),
        ((b"one\r", b"two\n", b"\n"), ["one", "two", ""]),
        ((b"one\r\n\ntwo",), ["one", "", "two"]),
        (("für".encode(), b"\xff\n"), ["für�"]),
    ],
)
def test_lines_end_at_newlines_and_carriage_returns(
    chunks: tuple[bytes, ...], expected: list[str]
) -> None:
    assert lines(*chunks) == expected


def test_a_carriage_return_shows_a_line_at_once() -> None:
    assert LineSplitter().feed(b"50%\r") == ["50%"]


def test_only_the_beginning_of_a_long_line_is_kept() -> None:
    expected = ["xxxx … (6 more bytes)", "next"]
    assert lines(b"xxx", b"xxx", b"xxxx\nnext\n", longest=4) == expected
    assert lines(b"xxxx\nnext\n", longest=4) == ["xxxx", "next"]


def test_a_line_without_an_end_takes_bounded_memory_and_linear_time() -> None:
    splitter = LineSplitter()
    chunk = b"x" * (1 << 16)
    started_at = time.process_time()
    for _ in range(1000):
        assert splitter.feed(chunk) == []
    assert time.process_time() - started_at < 5.0
    (line,) = splitter.end()
    assert line == "x" * 8192 + " … (65,527,808 more bytes)"


def test_a_full_disk_is_counted() -> None:
    with Path("/dev/full").open("w") as full:
        stream = SteadyStream(full)
        assert stream.write("one\n") == 4
        stream.write("two\n")
    assert (stream.n_lost, stream.error) == (2, "No space left on device")


def test_a_closed_stream_is_counted_and_none_discards() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        stream = SteadyStream(pipe)
        stream.write("one\n")
        assert (stream.n_lost, stream.error) == (1, "Broken pipe")
    nowhere = SteadyStream(None)
    nowhere.write("one\n")
    assert nowhere.n_lost == 0
    assert not nowhere.isatty()


def test_a_reader_that_reads_nothing_holds_up_one_write_only() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as pipe, os.fdopen(read_end, "rb", buffering=0) as reader:
        stream = SteadyStream(pipe)
        while not stream.n_lost:
            stream.write("x" * 4096)
        started_at = time.monotonic()
        for _ in range(100):
            stream.write("lost\n")
        assert time.monotonic() - started_at < 0.9
        assert stream.n_lost == 101
        reader.read(1 << 16)
        stream.write("shown\n")
        assert stream.n_lost == 101
        assert reader.read(1 << 16).endswith(b"shown\n")


def test_what_the_encoding_lacks_is_replaced() -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="ascii") as out:
        stream = SteadyStream(out)
        assert stream.isatty()
        stream.write("│ für\n")
        assert stream.n_lost == 0
        assert os.read(main, 100) == b"? f?r\r\n"
    os.close(main)


def test_a_log_is_appended_to_and_its_errors_are_counted(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "made" / "node-0.log")
    log.write(b"one\n")
    log.close()
    log.write(b"two\n")
    assert log.path.read_bytes() == b"one\ntwo\n"
    full = LogFile(Path("/dev/full"))
    full.write(b"one\n")
    assert (full.n_lost, full.error) == (1, "No space left on device")
    full.close()
    log.close()
