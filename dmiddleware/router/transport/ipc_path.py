"""The file of a listening Unix-domain socket.

nng replaces a file or a link at the path that it listens on, and later removes the path, even if
another listener has it by then. So nng gets a hidden path, and the public one is a second name of
that socket, which replaces only a dead one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dmiddleware.errors import TransportError

__all__ = ["PublishedPath"]

_MAX_BYTES: Final = 107
"""How long the path of a socket may be."""

_LOCK_S: Final = 2.0
_RETRY_S: Final = 0.02


class PublishedPath:
    """A path at which at most one live socket is published.

    Args:
        path: the path.

    Attributes:
        hidden: where to listen before :meth:`publish` is called.

    Raises:
        TransportError: if the path is not absolute, or too long.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._identity = (0, 0)
        if not self._path.is_absolute() or self._path.name in ("", ".."):
            raise TransportError(f"could not listen on ipc://{path}: write ipc:///path/to/socket")
        hidden = self._path.with_name(f".{secrets.token_hex(4)}")
        n_bytes = max(len(os.fsencode(name)) for name in (hidden, self._path))
        if n_bytes > _MAX_BYTES:
            raise TransportError(
                f"could not listen on ipc://{path}: the path of the socket, or of the hidden one "
                f"next to it, has {n_bytes} bytes, but the system allows {_MAX_BYTES}; use a "
                "shorter folder, for example under /tmp"
            )
        self.hidden = str(hidden)

    def publish(self) -> None:
        """Let others connect to the socket at the path, and remove the hidden one.

        Raises:
            TransportError: if the path is a live socket or something else than a socket, or
                another process holds the folder's lock.
        """
        try:
            with _locked(self._path.parent):
                _remove_if_dead(self._path)
                # It fails if something has appeared there meanwhile.
                os.link(self.hidden, self._path)
                self._identity = _identity(self._path)
        except OSError as error:
            raise TransportError(
                f"could not listen on ipc://{self._path}: {error.strerror or error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                Path(self.hidden).unlink()

    def remove(self) -> None:
        """Remove the path, unless another socket has taken its place."""
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._identity:
                self._path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: listeners that start at once must not consider each other dead."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OSError(
                        errno.EAGAIN,
                        f"another process has held the lock of {folder} for {_LOCK_S:g} s; use a "
                        "folder of your own",
                    ) from None
            time.sleep(_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def _remove_if_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "the path exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            # Its queue is full, so a listener is running.
            pass
    raise OSError(errno.EADDRINUSE, "another process is already listening there")
