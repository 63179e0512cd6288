"""Shared memory that is full, or whose users are killed."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dmiddleware.router.transport.slabs import sweep
from tests.faults.delivery_faults import KB, MB
from tests.faults.fault_result import FaultResult
from tests.faults.node_program import Sends
from tests.faults.process_cluster import IN_MEMORY, Slabs, cluster
from tests.faults.process_faults import all_of, killed_dialers, killed_listener

__all__ = ["full", "killed_in_transfer", "why_not_full"]


def killed_in_transfer(transport: str, *, kills: int, size: int = 2 * MB) -> FaultResult:
    """Kill senders, and then receivers, while large messages go through shared memory.

    Args:
        transport: only ``shared memory``, from the default size up.
        kills: number of kills per side; each hits another phase of a transfer.
        size: bytes per message.
    """
    with tempfile.TemporaryDirectory(prefix="faults-", dir=IN_MEMORY) as name:
        folder = Path(name)
        what = f"kill -9 during transfers of {size // KB:,} KB, {kills} times on each side"
        result = FaultResult(what, transport)
        with Slabs(folder, size) as slabs:
            for part in (
                killed_dialers("ipc", kills=kills, dialers=2, size=size, shared=name),
                killed_listener("ipc", kills=kills, size=size, shared=name),
            ):
                result.checks += part.checks
        sweep(folder)
        left = [path.name for path in folder.iterdir()]
    measured = f"{len(left)} of {len(slabs.names)} files"
    result.check("no file is left after the sweep", measured, slabs.names and not left)
    return result


def full(transport: str, *, count: int, size: int = 2 * MB) -> FaultResult:
    """Send large messages while shared memory has less room than one message needs.

    Args:
        transport: only ``shared memory``, from the default size up.
        count: number of messages.
        size: bytes per message.
    """
    result = FaultResult(f"full shared memory, {count:,} x {size // KB:,} KB", transport)
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
    result.check("both processes survive", f"{used // KB:,} KB free", alive)
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
