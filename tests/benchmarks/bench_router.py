"""The router.

Both sides are two processes on one machine, connected over ipc unless a row says "over tcp", and
without a key. Our reliable events are acknowledged, and an event counts as done once the other
process has handled it. There are three kinds of references. nng's bare Push0 and Pull0 send the
same bytes over nng's ipc or tcp and acknowledge nothing. A Ray actor runs a method that does
nothing, with four calls in flight (ours: four unacknowledged events, each in a frame of its own).
The other bars are absolute. For the weights, one process publishes them and three others load
them into a torch module.

The round trip depends on the machine, so it has no bar. Most of it is Python that runs on both
sides, one after the other, and it wakes three threads on each side in turn. An interpreter that is
built without optimizations makes the absolute figures worse by a quarter to a third. At 8 MB, where
the socket's copies leave the processor's cache, shared memory is several times as fast as ipc.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Row, interleaved
from tests.benchmarks.router_sides import RawStream, RayActor, Stream, Weights, payload

KB, MB = 1_000, 1_000_000
REPEATS = 9


def rows() -> list[Row]:
    """Measure throughput, round trips and weights."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        return [
            *against_nng(folder, ""),
            *against_nng(folder, " over tcp", tcp=True),
            small_events(folder),
            round_trip(folder),
            round_trip(folder, tcp=True),
            *shared_memory(folder),
            weights(folder),
            *against_ray(folder),
        ]


def against_nng(folder: Path, over: str, *, tcp: bool = False) -> list[Row]:
    found = []
    with Stream(folder, tcp=tcp) as ours, RawStream(folder, tcp=tcp) as raw:
        for label, size, n, bar in (("64 KB", 64 * KB, 400, 0.5), ("1 MB", MB, 60, 0.4)):
            array = payload(size)
            raw_bytes = array.tobytes()
            pair = interleaved(
                lambda n=n, array=array: ours.send(n, array),
                lambda n=n, raw_bytes=raw_bytes: raw.send(n, raw_bytes),
                repeats=REPEATS,
            )
            found.append(
                Row.of_rate(
                    f"reliable events of {label}{over}",
                    pair,
                    count=n * size / MB,
                    unit="MB/s",
                    against="Push0/Pull0",
                    at_least=bar,
                )
            )
    return found


def small_events(folder: Path) -> Row:
    n = 50_000
    with Stream(folder) as ours:
        rate = n / median_s(lambda: ours.send(n, 1.5), repeats=5)
    return absolute("small events, batched", rate, 100_000, "events/s", at_least=1.0)


def round_trip(folder: Path, *, tcp: bool = False) -> Row:
    with Stream(folder, tcp=tcp) as ours:
        duration = median_s(ours.ping, repeats=2_000)
    name = f"round trip over {'tcp' if tcp else 'ipc'}, median"
    return Row(name, "no bar", ours=duration * 1e6, unit="µs")


def shared_memory(folder: Path) -> list[Row]:
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory,
        Stream(folder, shared=Path(memory)) as shared,
        Stream(folder) as plain,
    ):
        for label, size, n in (("1 MB", MB, 100), ("8 MB", 8 * MB, 20)):
            array = payload(size)
            pair = interleaved(
                lambda n=n, array=array: shared.send(n, array),
                lambda n=n, array=array: plain.send(n, array),
                repeats=REPEATS,
            )
            name = f"shared memory, events of {label}"
            count = n * size / MB
            found.append(
                Row.of_rate(name, pair, count=count, unit="MB/s", against="ipc", at_least=2.0)
            )
            rate = count / pair.ours_s
            found.append(absolute(name, rate, 3_000, "MB/s", at_least=1.0))
    return found


def weights(folder: Path) -> Row:
    with Weights(folder) as published:
        duration = median_s(published.publish, repeats=30)
    return absolute("10 MB of weights, loaded by 3", duration * 1e3, 100, "ms", at_most=1.0)


def against_ray(folder: Path) -> list[Row]:
    sizes = (("1 KB", KB, 2_000, 2.5), ("100 KB", 100 * KB, 500, 2.0), ("1 MB", MB, 100, 1.5))
    names = [f"events of {label}, 4 in flight" for label, *_ in sizes]
    if importlib.util.find_spec("ray") is None:
        note = "ray is not installed"
        return [Row.missing(name, against="Ray actor", note=note) for name in names]
    found = []
    with RayActor() as actor:
        for name, (_, size, n, bar) in zip(names, sizes, strict=True):
            array = payload(size)
            with Stream(folder, outbox_bytes=4 * size + 1_000, batched=False) as ours:
                pair = interleaved(
                    lambda n=n, array=array, ours=ours: ours.send(n, array),
                    lambda n=n, array=array: actor.send(n, array),
                    repeats=5,
                )
            found.append(
                Row.of_rate(name, pair, count=n, unit="events/s", against="Ray actor", at_least=bar)
            )
    return found


def absolute(
    name: str,
    ours: float,
    bar: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Return a row whose reference is a figure to reach, not a measurement."""
    return Row(
        name,
        "absolute bar",
        ours=ours,
        reference=bar,
        ratio=ours / bar,
        unit=unit,
        at_least=at_least,
        at_most=at_most,
    )


def median_s(function: Callable[[], Any], *, repeats: int) -> float:
    """Return the median duration of a call, after some to warm up."""
    durations = []
    for turn in range(repeats + max(1, repeats // 10)):
        began = time.perf_counter()
        function()
        if turn >= max(1, repeats // 10):
            durations.append(time.perf_counter() - began)
    return statistics.median(durations)
