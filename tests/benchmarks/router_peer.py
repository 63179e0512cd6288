"""The peer process of the router's benchmarks: ``python -m tests.benchmarks.router_peer MODE …``.

It prints "ready" and serves until its standard input is closed.

- ``sink ADDRESS``: a listening router that counts the ``data`` events. It emits ``done`` after as
  many of them as the ``begin`` event asked for, and answers ``ping`` with ``pong``.
- ``shared-sink ADDRESS FOLDER``: the same, with shared memory for large frames.
- ``raw-sink ADDRESS DONE``: the same with nng's bare sockets: Pull0 for the data, and a Pair0 at
  the address DONE for ``begin`` and ``done``.
- ``reader ADDRESS N``: a router that dials as node N, loads the weights of each ``weights``
  event and answers each version with ``applied``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pynng

from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport.shared_memory import SharedMemory
from tests.accepting import accepting
from tests.benchmarks.router_sides import WEIGHTS_SIZE

DONE = Event("done")
PONG = Event("pong")
APPLIED = Event("applied")


def sink(address: str, shared: Path | None = None) -> None:
    """Count the events that arrive through a router."""
    awaited, came = 0, 0
    memory = None if shared is None else SharedMemory(shared)
    with Router(node_id=1, listen=address, shared_memory=memory) as router:

        def offer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            nonlocal awaited, came
            if name == "data":
                came += 1
            elif name == "begin":
                awaited += args[0]
            elif name == "ping":
                router.emit(PONG, args, {})
            if awaited and came == awaited:
                awaited = came = 0
                router.emit(DONE, (), {})
            return True

        router.attach(accepting(offer))
        for name in ("data", "begin", "ping"):
            router.subscribe(name, active=True)
        _serve()


def raw_sink(address: str, done: str) -> None:
    """Count the messages that arrive through bare sockets."""
    with (
        pynng.Pull0(listen=address) as data,
        pynng.Pair0(listen=done) as control,
    ):

        def pull() -> None:
            with contextlib.suppress(pynng.Closed):
                while True:
                    for _ in range(int(control.recv())):
                        data.recv()
                    control.send(b"done")

        threading.Thread(target=pull, daemon=True).start()
        _serve()


def reader(address: str, node_id: int) -> None:
    """Load each version of the weights."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(WEIGHTS_SIZE, WEIGHTS_SIZE)
    with Router(node_id=node_id, dial=[address]) as router:

        def deliver(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name == "weights":
                version, state = args
                model.load_state_dict(state)
                router.emit(APPLIED, (version, node_id), {})

        router.attach(accepting(deliver, waits=True))
        router.subscribe("weights", active=True)
        router.wait_for_peers(1, timeout_s=30.0)
        _serve()


def _serve() -> None:
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mode, where, *more = sys.argv[1:]
    if mode == "raw-sink":
        raw_sink(where, more[0])
    elif mode == "reader":
        reader(where, int(more[0]))
    else:
        sink(where, *map(Path, more))
