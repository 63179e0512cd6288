"""Output that cannot end a run: a stream that never raises, log files, and short lines."""

from __future__ import annotations

import io
import os
import select
from pathlib import Path
from typing import IO, Final

__all__ = ["LineSplitter", "LogFile", "SteadyStream"]

LONGEST_LINE: Final = 8192
_PATIENCE_S: Final = 1.0
_PIECE: Final = 4096
"""Bytes that a pipe takes without blocking once it is ready."""


class SteadyStream(io.TextIOBase):
    """A text stream that counts errors instead of raising them.

    It drops the text if the disk is full, the pipe is closed or the terminal is gone. A reader that
    takes nothing for a second, such as a paused pager, loses lines too, so that it cannot hold up
    the run.

    Args:
        stream: where to write; None, as for a closed standard output, discards everything.

    Attributes:
        n_lost: number of writes that failed.
        error: the first error; empty: none.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.n_lost = 0
        self.error = ""
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._patience_s = _PATIENCE_S

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write the text, or count the failure."""
        try:
            self._write(text)
        except (OSError, ValueError) as error:
            self.n_lost += 1
            self.error = self.error or _describe(error)
        return len(text)

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        if self._descriptor is None:
            self._stream.write(text)
            return
        unwritten = text.encode(self.encoding, "replace")
        while unwritten:
            if not select.select([], [self._descriptor], [], self._patience_s)[1]:
                self._patience_s = 0.0
                raise TimeoutError(f"nothing was read for {_PATIENCE_S:g} s")
            self._patience_s = _PATIENCE_S
            unwritten = unwritten[os.write(self._descriptor, unwritten[:_PIECE]) :]


class LogFile:
    """A file to append to; it counts errors instead of raising them.

    Args:
        path: the file, made with its folder if it is missing.

    Attributes:
        path: the file.
        n_lost: number of writes that failed.
        error: the first error; empty: none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_lost = 0
        self.error = ""
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Append the bytes."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.n_lost += 1
            self.error = self.error or _describe(error)

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LineSplitter:
    """Cuts the output of a process into lines.

    Lines end at a newline or, as progress bars write them, at a carriage return. Of a longer line
    only the first ``longest`` bytes are kept, so memory stays bounded.

    Args:
        longest: bytes of a line to keep.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._line = bytearray()
        self._n_cut = 0
        self._after_return = False

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete."""
        lines = []
        *whole, rest = data.split(b"\n")
        for part in whole:
            lines += self._segments(part)
            if self._line or not self._after_return:
                lines.append(self._take())
            self._after_return = False
        lines += self._segments(rest)
        return lines

    def end(self) -> list[str]:
        """Return the last line, if it has no end."""
        return [self._take()] if self._line else []

    def _segments(self, part: bytes) -> list[str]:
        """Keep the bytes after the last carriage return, and return the lines before it."""
        *whole, rest = part.split(b"\r")
        lines = []
        for segment in whole:
            self._keep(segment)
            if self._line:
                lines.append(self._take())
        if whole:
            self._after_return = True
        if rest:
            self._keep(rest)
            self._after_return = False
        return lines

    def _keep(self, data: bytes) -> None:
        room = self._longest - len(self._line)
        self._line += data[:room]
        self._n_cut += max(len(data) - room, 0)

    def _take(self) -> str:
        text = self._line.decode(errors="replace").rstrip()
        if self._n_cut:
            text += f" … ({self._n_cut:,} more bytes)"
        self._line.clear()
        self._n_cut = 0
        return text


def _descriptor(stream: IO[str] | None) -> int | None:
    """Return the descriptor to write to; None: the stream has none."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def _describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
