"""Close nng channels at the moment when their requests reach their deadlines.

Run as ``python -m …nng_racing_program COUNT``; prints the number of closes. It is a separate
program because nng may abort the process.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.nng import NngTransport
from tests.dmiddleware.router.endpoints import unlimited

MAX_BYTES = 1 << 20
N_REQUESTS = 8
N_THREADS = 8
DEADLINE_S = 0.03


def race(nng: NngTransport, address: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        outcomes: queue.SimpleQueue[memoryview | TransportError] = queue.SimpleQueue()
        with contextlib.closing(
            nng.dial(address, connect_timeout_s=20, reply_timeout_s=20, max_frame_bytes=MAX_BYTES)
        ) as channel:
            for _ in range(N_REQUESTS):
                channel.send(b"?", outcomes.put, timeout_s=DEADLINE_S)
            time.sleep(DEADLINE_S + rng.uniform(-0.002, 0.001))
        for _ in range(N_REQUESTS):
            assert isinstance(outcomes.get(timeout=20), TransportError)


def main(count: int) -> None:
    nng = NngTransport()
    share = count // N_THREADS
    with (
        contextlib.closing(
            nng.listen(
                "tcp://127.0.0.1:0",
                lambda raw, connection, reply: None,
                on_disconnect=lambda _: None,
                limits=unlimited(MAX_BYTES),
            )
        ) as listener,
        ThreadPoolExecutor(N_THREADS) as threads,
    ):
        races = [
            threads.submit(race, nng, listener.address, share, seed) for seed in range(N_THREADS)
        ]
        for one in races:
            one.result()
    print(share * N_THREADS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
