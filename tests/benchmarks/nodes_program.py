"""The processes of the benchmark of many nodes: ``python nodes_program.py MODE …``.

- ``hub ADDRESS``: a listening router. It reads commands from its standard input and answers each
  with a line of JSON; see :class:`Hub`.
- ``peers ADDRESS FIRST COUNT``: routers with node ids from FIRST on, which dial the hub.

Both end when their standard input is closed. The program uses only what every version of the
router has had, so that the same file also measures an older checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from tests.accepting import accepting

KEY = bytes(range(32))
MB = 1 << 20
NEWS = Event("news")
WEIGHTS = Event("weights", delivery="latest")
GOT = Event("got")
FORM_S = 120.0
_SETTLE_S = 0.5


class Hub:
    """The center of a star.

    Args:
        address: where it listens.
    """

    def __init__(self, address: str) -> None:
        self.router = Router(node_id=0, listen=address, key=KEY)
        self.n_left = 0
        self.reasons: Counter[str] = Counter()
        self._got = threading.Semaphore(0)

    def wait_for(self, n_peers: int) -> dict[str, Any]:
        """Wait for the peers; measure how long that took, and what was added for them."""
        before = time.process_time()
        started = time.perf_counter()
        self.router.wait_for_peers(n_peers, timeout_s=FORM_S)
        return {
            "form_s": time.perf_counter() - started,
            "form_cpu_s": time.process_time() - before,
            "threads": _count("/proc/self/task") - self._n_threads,
            "descriptors": _count("/proc/self/fd") - self._n_descriptors,
        }

    def idle(self, seconds: float) -> dict[str, Any]:
        """Measure the share of a core that it uses while nothing is emitted."""
        before, started = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        share = (time.process_time() - before) / (time.perf_counter() - started)
        return {"share": share, "left": self.n_left}

    def broadcast(self, times: int) -> dict[str, Any]:
        """Measure the CPU time of a small event: until it is sent, and with what follows."""
        idle = float(self.idle(2.0)["share"])
        sent, total = [], []
        for _ in range(times):
            time.sleep(_SETTLE_S)
            before, started = time.process_time(), time.perf_counter()
            # Acknowledgments arrive meanwhile, on other threads.
            sending = time.thread_time()
            self.router.emit(NEWS, (1, "a small event"), {})
            sent.append(time.thread_time() - sending)
            time.sleep(_SETTLE_S)
            waited = time.perf_counter() - started
            total.append(time.process_time() - before - idle * waited)
        return {"sent_s": sorted(sent)[times // 2], "total_s": sorted(total)[times // 2]}

    def weights(self, size: int, n_peers: int, rounds: int) -> dict[str, Any]:
        """Measure how long large events take to reach all peers, and how many leave meanwhile."""
        array = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
        self.n_left = 0
        before, started = time.process_time(), time.perf_counter()
        missing = 0
        for version in range(rounds):
            self.router.emit(WEIGHTS, (version, array), {})
            missing += sum(not self._got.acquire(timeout=60.0) for _ in range(n_peers))
        return {
            "round_s": (time.perf_counter() - started) / rounds,
            "cpu_s": (time.process_time() - before) / rounds,
            "left": self.n_left,
            "reasons": self.reasons,
            "missing": missing,
        }

    def serve(self) -> None:
        """Obey the commands on standard input."""
        self.router.attach(accepting(self._take))
        self.router.subscribe("got", active=True)
        with self.router:
            self._n_threads = _count("/proc/self/task")
            self._n_descriptors = _count("/proc/self/fd")
            print(json.dumps({"address": self.router.address}), flush=True)
            for line in sys.stdin:
                name, *arguments = json.loads(line)
                print(json.dumps(getattr(self, name)(*arguments)), flush=True)
            os._exit(0)  # the peers are gone already

    def _take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "got":
            self._got.release()
        if name == "node.left":
            self.n_left += 1
            self.reasons[str(kwargs["reason"])[:16]] += 1
        return True


def _count(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def peers(address: str, first: int, count: int) -> None:
    """Run several peers until standard input is closed."""
    with contextlib.ExitStack() as stack:
        for number in range(first, first + count):
            router = Router(node_id=number, dial=[address], key=KEY, start_timeout_s=FORM_S)

            def take(
                name: str, args: tuple[Any, ...], kwargs: dict[str, Any], router: Router = router
            ) -> bool:
                if name == "weights":
                    router.emit(GOT, (args[0],), {})
                return True

            router.attach(accepting(take))
            for name in ("news", "weights"):
                router.subscribe(name, active=True)
            stack.enter_context(router)
        sys.stdin.read()
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "hub":
        Hub(sys.argv[2]).serve()
    else:
        peers(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
