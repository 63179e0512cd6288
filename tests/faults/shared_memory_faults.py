"""Shared memory that is full, or whose users are killed."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from dmiddleware.router.transport.slabs import sweep
from tests.faults.delivery_faults import KB, MB
from tests.faults.fault_result import FaultResult
from tests.faults.node_program import Sends
from tests.faults.process_cluster import cluster
from tests.faults.process_faults import all_of, killed_dialers, killed_listener

__all__ = ["full", "killed_in_transfer", "why_not_full"]

_IN_MEMORY = "/dev/shm"


def killed_in_transfer(*, kills: int, size: int = 2 * MB) -> FaultResult:
    """Kill senders, and then receivers, while large messages go through shared memory.

    Args:
        kills: number of kills per side; each hits another phase of a transfer.
        size: bytes per message.
    """
    with tempfile.TemporaryDirectory(prefix="faults-", dir=_IN_MEMORY) as name:
        folder = Path(name)
        result = FaultResult(
            f"kill -9 during transfers of {size // KB:,} KB, {kills} times on each side", "ipc"
        )
        with _slabs_in(folder, size) as slabs:
            for part in (
                killed_dialers("ipc", kills=kills, dialers=2, size=size, shared=name),
                killed_listener("ipc", kills=kills, size=size, shared=name),
            ):
                result.checks += part.checks
        sweep(folder)
        left = [path.name for path in folder.iterdir()]
    result.check("shared memory was used", f"{len(slabs)} slabs seen", len(slabs) > 0)
    result.check("no files left after the sweep", f"{len(left)} files", not left)
    return result


@contextlib.contextmanager
def _slabs_in(folder: Path, size: int) -> Iterator[set[str]]:
    """Collect the names of all files that were ever large enough for a message."""
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_size >= size:
                        seen.add(path.name)

    watcher = threading.Thread(target=watch, name="slabs", daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join(5.0)


def full(*, count: int, size: int = 2 * MB) -> FaultResult:
    """Send large messages while shared memory has less room than one message needs.

    Args:
        count: number of messages.
        size: bytes per message.
    """
    result = FaultResult(f"full shared memory, {count:,} x {size // KB:,} KB", "ipc")
    with _file_system(2 * size) as folder, cluster("ipc") as nodes:
        sends = Sends(count=count, size=size)
        receiver = nodes.listener(receives=("e",), shared=str(folder))
        sender = nodes.dialer(1, sends=sends, expected=1, shared=str(folder))
        sender.await_line("ready")
        used = _fill(folder)
        sender.send_command("send")
        verdict = all_of(sender, receiver)
        alive = sender.alive and receiver.alive
        sender.stop()
        receiver.stop()
    result.check(
        "falls back to sockets: 0 lost", verdict, verdict.clean and verdict.accepted == count
    )
    result.check("both processes survive", f"{alive}, {used // KB:,} KB free", alive)
    return result


def why_not_full() -> str:
    """Return why a small file system cannot be mounted here; empty: it can."""
    try:
        with _file_system(MB):
            return ""
    except (OSError, RuntimeError) as error:
        return f"cannot mount a tmpfs: {error}"


def _fill(folder: Path) -> int:
    """Fill the file system, leave room for a fraction of a message, and return how much."""
    room = 256 * KB
    with (folder / "filler").open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * KB))
            file.flush()
    with (folder / "filler").open("r+b") as file:
        file.truncate((folder / "filler").stat().st_size - room)
    return room


@contextlib.contextmanager
def _file_system(size: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        options = f"size={size},mode=0700"
        _run("mount", "-t", "tmpfs", "-o", options, "dmiddleware", name)
        try:
            yield Path(name)
        finally:
            _run("umount", "--lazy", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
