"""Leave the program while streams connect, send and receive, without closing anything.

Run as ``python -m …stream_exit_program ADDRESS``.
"""

from __future__ import annotations

import sys

from tests.dmiddleware.router.stream_closing_program import Side, transport_of


def main(address: str) -> None:
    transport, dials = transport_of(), transport_of()
    sides: list[Side] = []
    listener = transport.listen(address, lambda stream: sides.append(Side(stream)))
    for number in range(10):
        side = Side(dials.dial(listener.address, timeout_s=10.0))
        sides.append(side)
        # Half of them connect when the program ends, and the others exchange bytes.
        if number < 5:
            assert side.has_moved.wait(10.0), "no callback came"
    print("leaving", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
