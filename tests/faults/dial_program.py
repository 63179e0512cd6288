"""A node that dials again and again: ``python -m tests.faults.dial_program '<NodeSpec as JSON>'``.

Each line of its standard input is a time of the monotonic clock, which the processes of a host
share. At that time it dials, waits until it is connected, and closes. It answers with a line of
JSON, see :class:`Answer`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

import msgspec

from dmiddleware.errors import RouterError
from dmiddleware.router import Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from tests.accepting import accepting
from tests.faults.node_program import NodeSpec

__all__ = ["Answer"]

CONNECTIONS = "dmiddleware.router.runtime.connections"
"""The module that logs why a connection failed, before it dials again."""


class Answer(msgspec.Struct, frozen=True):
    """What became of one dial.

    Attributes:
        took_s: seconds from the time of the line until it was connected.
        failures: why connections failed, each with its reason.
    """

    took_s: float
    failures: tuple[str, ...]


class _Reasons(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def dial_at(spec: NodeSpec, when: float) -> Answer:
    """Dial at a time, and close when it is connected."""
    reasons = _Reasons()
    logger = logging.getLogger(CONNECTIONS)
    logger.addHandler(reasons)
    threading.Event().wait(max(0.0, when - time.monotonic()))
    try:
        with Router(
            node_id=spec.node_id,
            dial=spec.dial,
            key=bytes.fromhex(spec.key) or None,
            transport=NngStreamTransport(tls=spec.tls),
            expected_peers=1,
            start_timeout_s=spec.start_timeout_s,
        ) as router:
            router.attach(accepting(lambda *_: None, waits=True))
            router.wait_until_ready()
            answer = Answer(time.monotonic() - when, tuple(reasons.texts))
    except RouterError as error:
        return Answer(spec.start_timeout_s, (*reasons.texts, f"{type(error).__name__}: {error}"))
    finally:
        logger.removeHandler(reasons)
    return answer


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=NodeSpec)
    logging.getLogger(CONNECTIONS).setLevel(logging.DEBUG)
    print("ready", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(dial_at(spec, float(line))).decode(), flush=True)


if __name__ == "__main__":
    main()
