"""Ask over nng from many threads at once, and close: ``python -m …nng_closing_program ADDRESS``.

A program of its own, since a call of nng that does not end cannot be ended from Python.
"""

from __future__ import annotations

import contextlib
import sys

from dmiddleware.router.transport import Channel
from dmiddleware.router.transport.nng import NngTransport
from tests.dmiddleware.router.request_handlers import at_once, echo

ROUNDS = 6
MAX_BYTES = 1 << 20


def ask(channel: Channel) -> None:
    for number in range(300):
        channel.request(b"%d" % number)


def main(address: str) -> None:
    sys.setswitchinterval(1e-5)  # so that answers overtake what nng notes of their requests
    nng = NngTransport()
    for _ in range(ROUNDS):
        with contextlib.closing(
            nng.listen(address, echo, on_disconnect=lambda _: None, max_frame_bytes=MAX_BYTES)
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
            at_once(ask, [(channel,) for channel in channels * 3])
            for channel in channels:
                channel.close()


if __name__ == "__main__":
    main(sys.argv[1])
