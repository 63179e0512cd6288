"""A process with few descriptors that listens, for tests of what strangers can cost it.

It trusts whoever makes a request, opens a file, and replies with its memory in KB, its CPU time in
ms, and its numbers of descriptors and threads.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

from dmiddleware.router.transport.sockets import SocketTransport

from dmiddleware.router.transport import ListenLimits, Reply

MAX_DESCRIPTORS = 200


def main(address: str) -> None:
    """Listen until the standard input is closed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_DESCRIPTORS, MAX_DESCRIPTORS))

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        listener.trust(connection)
        if bytes(raw) == b"many":
            reply(bytes(1 << 20))
            return
        resident_kb = int(Path("/proc/self/statm").read_text().split()[1]) * 4
        cpu_ms = int(time.process_time() * 1000)
        n_descriptors = len(list(Path("/proc/self/fd").iterdir()))
        reply(b"%d %d %d %d" % (resident_kb, cpu_ms, n_descriptors, threading.active_count()))

    listener = SocketTransport().listen(
        address,
        serve,
        on_disconnect=lambda _: None,
        limits=ListenLimits(max_frame_bytes=256 << 20, max_untrusted_frame_bytes=4096),
    )
    print(listener.address, flush=True)
    sys.stdin.read()
    listener.close()


if __name__ == "__main__":
    main(sys.argv[1])
