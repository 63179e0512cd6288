"""Make requests over nng from many threads at once, and close.

Run as ``python -m …nng_closing_program ADDRESS``. It is a separate program because Python cannot
interrupt a call into nng that does not return.
"""

from __future__ import annotations

import contextlib
import sys

from dmiddleware.router.transport import Channel
from dmiddleware.router.transport.nng import NngTransport
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import echo, in_threads

ROUNDS = 6
MAX_BYTES = 1 << 20


def make_requests(channel: Channel) -> None:
    for number in range(300):
        channel.request(b"%d" % number)


def main(address: str) -> None:
    sys.setswitchinterval(1e-5)  # so that replies overtake nng's own record of the requests
    nng = NngTransport()
    for _ in range(ROUNDS):
        with contextlib.closing(
            nng.listen(address, echo, on_disconnect=lambda _: None, limits=unlimited(MAX_BYTES))
        ) as listener:
            channels = [
                nng.dial(
                    listener.address,
                    connect_timeout_s=5,
                    reply_timeout_s=20,
                    max_frame_bytes=MAX_BYTES,
                )
                for _ in range(2)
            ]
            in_threads(make_requests, [(channel,) for channel in channels * 3])
            for channel in channels:
                channel.close()


if __name__ == "__main__":
    main(sys.argv[1])
