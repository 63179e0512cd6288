"""A router with few descriptors, for tests of what strangers can cost it.

For each line on its standard input it prints its memory in KB, its CPU time in ms, its numbers of
descriptors and threads, and the number of its peers.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

from dmiddleware.router import Router

MAX_DESCRIPTORS = 200
KEY = bytes(range(32))


def main(address: str) -> None:
    """Listen until the standard input is closed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))
    with Router(listen=address, key=KEY) as router:
        print(router.address, flush=True)
        while sys.stdin.readline():
            resident_kb = int(Path("/proc/self/statm").read_text().split()[1]) * 4
            cpu_ms = int(time.process_time() * 1000)
            n_descriptors = len(list(Path("/proc/self/fd").iterdir()))
            n_peers = len(router.peer_ids())
            print(resident_kb, cpu_ms, n_descriptors, threading.active_count(), n_peers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
