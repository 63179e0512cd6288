"""Two network namespaces, connected by a cable that can be cut, or by a slow and lossy one.

The first is a veth pair. The second is a pair of tun devices and a thread that carries packets
between them, which delays packets and drops some; it needs no kernel module. Both need root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from dmiddleware.process.closing import Closing

__all__ = ["Cable", "SlowCable", "cable", "forwarder", "namespaces", "slow_cable", "why_not"]

_NAMES = itertools.count()
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_LARGEST_PACKET = 1 << 16
_SEED = 13

_FORWARD = """
import socket, sys, threading

def carry(source, target):
    while content := source.recv(65536):
        target.sendall(content)
    target.shutdown(socket.SHUT_WR)

with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("ready", flush=True)
    while True:
        here, _ = listener.accept()
        try:
            there = socket.create_connection((sys.argv[3], int(sys.argv[4])))
        except OSError:
            here.close()
            continue
        for pair in ((here, there), (there, here)):
            threading.Thread(target=carry, args=pair, daemon=True).start()
"""

ADDRESSES = ("10.203.0.1", "10.203.0.2")


def why_not() -> str:
    """Return why namespaces cannot be created here; empty: they can."""
    name = f"dmw{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except FileNotFoundError:
        return "the command `ip` is missing; install iproute2"
    except RuntimeError as error:
        return f"network namespaces cannot be created: {error}"
    return ""


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Create two namespaces, and delete them at the end."""
    number = next(_NAMES)
    names = (f"dmw{os.getpid()}-{number}a", f"dmw{os.getpid()}-{number}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _in(name, "link", "set", "lo", "up")
        yield names


@dataclass(frozen=True, slots=True)
class Cable:
    """A veth pair.

    Attributes:
        namespace: the namespace of its first end.
        device: the device at its first end.
    """

    namespace: str
    device: str

    def cut(self) -> float:
        """Cut the cable, and return the time."""
        at = time.monotonic()
        _in(self.namespace, "link", "set", self.device, "down")
        return at

    def repair(self) -> float:
        """Repair the cable, and return the time."""
        _in(self.namespace, "link", "set", self.device, "up")
        return time.monotonic()


@contextlib.contextmanager
def cable(first: str, second: str) -> Iterator[Cable]:
    """Connect two namespaces by a veth pair."""
    devices = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
    for namespace, device, address in zip((first, second), devices, ADDRESSES, strict=True):
        _plug_in(namespace, device, address)
    yield Cable(first, devices[0])


class SlowCable(Closing):
    """Carries packets between two tun devices, with delay and loss.

    Args:
        delay_s: delay of the packets from the first and from the second device.
        loss: the share of packets that is lost, in both directions.
    """

    def __init__(self, *, delay_s: tuple[float, float], loss: float) -> None:
        self.carried = self.lost = 0
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(_SEED)
        self._files: list[int] = []
        self._devices: list[str] = []
        self._late: list[tuple[float, int, int, bytes]] = []
        self._done, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Cut the cable."""
        os.write(self._wake, b"x")
        self._thread.join(5.0)
        for file in (*self._files, self._done, self._wake):
            os.close(file)

    def plug_in(self, namespace: str, address: str) -> None:
        """Create the next end in a namespace."""
        device = f"t{os.getpid()}{'ab'[len(self._files)]}"
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._files.append(file)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN_WITHOUT_HEADER))
        _plug_in(namespace, device, address)

    def _carry(self) -> None:
        tie = itertools.count()
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([*self._files, self._done], [], [], wait_s)
            if self._done in ready:
                return
            for file in ready:
                self._take(self._files.index(file), next(tie))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._late)
                with contextlib.suppress(OSError):
                    os.write(self._files[to], packet)

    def _take(self, side: int, tie: int) -> None:
        with contextlib.suppress(BlockingIOError):
            packet = os.read(self._files[side], _LARGEST_PACKET)
            if self._random.random() < self._loss:
                self.lost += 1
                return
            self.carried += 1
            due = time.monotonic() + self._delay_s[side]
            heapq.heappush(self._late, (due, tie, 1 - side, packet))


@contextlib.contextmanager
def slow_cable(
    first: str, second: str, *, delay_s: tuple[float, float], loss: float
) -> Iterator[SlowCable]:
    """Connect two namespaces by a cable with delay and loss."""
    slow = SlowCable(delay_s=delay_s, loss=loss)
    for namespace, address in zip((first, second), ADDRESSES, strict=True):
        slow.plug_in(namespace, address)
    with slow:
        yield slow


@contextlib.contextmanager
def forwarder(namespace: str, address: str, port: int, *, to: tuple[str, int]) -> Iterator[None]:
    """Carry connections to an address of a namespace on to another one, as a router does."""
    command = [sys.executable, "-c", _FORWARD, address, str(port), to[0], str(to[1])]
    with subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"nothing forwards {address}:{port}")
            yield
        finally:
            process.kill()


def _plug_in(namespace: str, device: str, address: str) -> None:
    _ip("link", "set", device, "netns", namespace)
    _in(namespace, "addr", "add", f"{address}/24", "dev", device)
    _in(namespace, "link", "set", device, "up")


def _in(namespace: str, *arguments: str) -> None:
    _ip("-n", namespace, *arguments)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
