"""Byte streams.

The layer below the router: messages of one size to another process on the same machine, each of
which is answered with one byte. nng's byte streams, as the router uses them, are compared with
plain sockets that block in one thread on each side. A round trip has one message on its way, the
others have four.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from tests.benchmarks.report import Row, interleaved
from tests.benchmarks.stream_sides import Side

KB, MB = 1_000, 1_000_000
REPEATS: Final = 9
N_TRIPS: Final = 500


def rows() -> list[Row]:
    """Measure both over ipc and tcp."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        return [
            row
            for over, nng, plain in (
                ("ipc", f"ipc://{name}/nng", f"{name}/plain"),
                ("tcp", "tcp://127.0.0.1:0", "127.0.0.1:0"),
            )
            for row in (
                round_trip(over, nng, plain),
                throughput(over, nng, plain, label="64 KB", size=64 * KB, n=1000),
                throughput(over, nng, plain, label="1 MB", size=MB, n=150),
            )
        ]


def round_trip(over: str, nng: str, plain: str) -> Row:
    with Side("nng", nng, 64) as ours, Side("plain", _other(plain), 64) as reference:
        pair = interleaved(
            lambda: ours.send(N_TRIPS), lambda: reference.send(N_TRIPS), repeats=REPEATS
        )
    return Row.of_time(
        f"round trip of 64 bytes over {over}", pair, calls=N_TRIPS, against="plain sockets"
    )


def throughput(over: str, nng: str, plain: str, *, label: str, size: int, n: int) -> Row:
    with Side("nng", nng, size) as ours, Side("plain", _other(plain), size) as reference:
        pair = interleaved(
            lambda: ours.send(n, in_flight=4),
            lambda: reference.send(n, in_flight=4),
            repeats=REPEATS,
        )
    return Row.of_rate(
        f"messages of {label} over {over}",
        pair,
        count=n * size / MB,
        unit="MB/s",
        against="plain sockets",
        at_least=None,
    )


def _other(plain: str) -> str:
    """Return an unused path next to a path, or the address as it is."""
    if not plain.startswith("/"):
        return plain
    folder = Path(plain).parent
    return f"{plain}-{len(list(folder.iterdir()))}"
