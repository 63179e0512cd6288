"""Collectors that join a running run, contribute to it, and leave it without harm."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dmiddleware.launch.options import DEFAULT_PORT
from tests.dmiddleware.launch import ditask_process
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

# The learner writes what it sees to a ledger, with the time. Once the file `end` exists, it stops
# after every connected collector has sent fifty more numbers.
PROGRAM = """
    import threading, time
    from collections import Counter
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    changed = threading.Condition()
    taken, connected = Counter(), set()

    def write(*words):
        with open("ledger", "a") as ledger:
            print(time.time(), *words, file=ledger, flush=True)

    def on_number(node, number):
        with changed:
            if number != taken[node]:
                write("gap", node, taken[node], number)
            if not taken[node]:
                write("first", node)
            taken[node] += 1
            changed.notify()

    def on_joined(node, **_):
        connected.add(node)
        write("joined", node)

    def on_left(node, reason):
        connected.discard(node)
        write("left", node, reason.replace(" ", "_"))

    def main():
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                threading.Event().wait(0.01)  # the pace of the environment
                ctx.task.emit("number", task.router.node_id, ctx.total_step, only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                with changed:
                    changed.wait(0.1)
                    if enough is None and Path("end").exists():
                        globals()["enough"] = {node: taken[node] + 50 for node in connected}
                    if enough and all(taken[node] >= count for node, count in enough.items()):
                        ctx.task.stop("all continued")

            if task.has_role("learner"):
                task.on("number", on_number)
                task.on("node.joined", on_joined)
                task.on("node.left", on_left)
                # A peer may have connected before there was a handler.
                connected.update(task.router.peer_ids())
            task.use(collect).use(learn).run()
            print("ended:", task.stop_reason, flush=True)

    enough = None
"""


@dataclass
class Entry:
    at: float
    what: str
    node: int
    rest: list[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ditask_process.write_key(tmp_path / "key")
    ditask_process.write_key(tmp_path / "other-key", "abcdefghij" * 4)
    return tmp_path


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return ditask_process.start(folder, "--main", "program.main", *options)


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start one learner and one collector over tcp; yield the launcher and the address to join."""
    roles = ("--roles", "learner=1,collector=1", "--topology", "star", "--protocol", "tcp")
    with start(folder, *roles, *options) as run:
        try:
            yield run, _await_line(run, " listens on ").rpartition(" ")[2]
        finally:
            _kill(run)


def _await_notes(run: subprocess.Popen[str], start: str, names: set[str]) -> set[str]:
    """Return the names that the launcher's notes have, until all are there."""
    found: set[str] = set()
    while found < names:
        found |= set(_await_line(run, start).strip().rpartition(": ")[2].split(", "))
    return found


def _first_ephemeral_port() -> int:
    """Return the lowest port for outgoing connections, or the usual one on Linux."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(file.read_text().split()[0]) if file.exists() else 32_768


def joining(folder: Path, address: str, *options: str) -> subprocess.Popen[str]:
    common = ("--roles", "collector=2", "--topology", "alone", "--attach-to", address)
    return start(folder, *common, *options)


def test_collectors_join_and_can_be_killed_without_harm(folder: Path) -> None:
    with running(folder, "--key-file", "key") as (run, address):
        with joining(folder, address, "--key-file", "key", "--node-ids", "10") as joined:
            entries = _await(folder, {("first", 1), ("first", 10), ("first", 11)})
            _kill(joined)
        _await(folder, {("left", 10), ("left", 11)})
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
    assert run.returncode == 0, text
    assert "all continued" in text
    for node in (10, 11):
        assert entries["first", node].at - entries["joined", node].at < 3.0
    assert not [entry for entry in _ledger(folder) if entry.what == "gap"]


def test_default_ports_are_below_those_of_outgoing_connections(folder: Path) -> None:
    with running(folder) as (_, address):
        assert 1024 < int(address.rpartition(":")[2]) < _first_ephemeral_port()
    assert _first_ephemeral_port() > DEFAULT_PORT


@pytest.mark.slow
def test_nodes_that_joined_can_leave_without_ending_the_run(folder: Path) -> None:
    with running(folder, "--key-file", "key") as (run, address):
        with joining(folder, address, "--key-file", "key") as joined:
            entries = _await_firsts(folder, 3)
            ids = {node for _, node in entries} - {1}
            names = {f"node {node} (collector)" for node in ids}
            assert _await_notes(run, "joined the run: ", names) == names
            joined.send_signal(signal.SIGTERM)
            text, _ = joined.communicate(timeout=80)
            assert joined.returncode == 143, text
        left = _await(folder, {("left", node) for node in ids})
        assert {left["left", node].rest[0] for node in ids} == {"said_goodbye"}
        assert min(ids) >= 1_000_000, "nodes that join choose ids from a range of their own"
        assert text.count("connected to node 0 (learner)") == 1
        assert _await_notes(run, "left the run: ", names) == names
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
    assert run.returncode == 0, text


@pytest.mark.slow
def test_nodes_that_joined_end_with_the_run(folder: Path) -> None:
    with (
        running(folder) as (run, address),
        joining(folder, address, "--key-file", str(_generated_key(run))) as joined,
    ):
        _await_firsts(folder, 3)
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
        assert run.returncode == 0, text
        text, _ = joined.communicate(timeout=80)
        assert joined.returncode == 0, text
        assert text.count("ended: node 0: all continued") == 2
    assert not [path for path in folder.iterdir() if path.name.startswith("ditask-")]


def test_without_the_key_nothing_is_started(folder: Path) -> None:
    with joining(folder, "tcp://127.0.0.1:5555") as joined:
        text, _ = joined.communicate(timeout=80)
    assert joined.returncode == 1
    assert "joining a run requires its key" in text


def test_another_key_is_refused_with_the_reason(folder: Path) -> None:
    with (
        running(folder, "--key-file", "key") as (_, address),
        joining(folder, address, "--key-file", "other-key", "--start-timeout", "2") as joined,
    ):
        text, _ = joined.communicate(timeout=80)
    assert joined.returncode == 1
    assert "HandshakeRefused" in text and "key" in text
    assert not [entry for entry in _ledger(folder) if entry.node > 1]


def test_joining_over_tls_needs_certificates(folder: Path) -> None:
    with joining(folder, "tls+tcp://127.0.0.1:5555", "--key-file", "key") as joined:
        text, _ = joined.communicate(timeout=80)
    assert joined.returncode == 1
    assert "--attach-to tls+tcp://127.0.0.1:5555 needs certificates" in text


def _await_line(run: subprocess.Popen[str], words: str) -> str:
    assert run.stdout is not None
    for line in run.stdout:
        if words in line:
            return line.strip()
    pytest.fail(f"the run ended without a line with {words!r}")


def _generated_key(run: subprocess.Popen[str]) -> Path:
    key = Path(_await_line(run, "--key-file").rpartition(" ")[2])
    assert key.stat().st_mode & 0o777 == 0o600
    return key


def _ledger(folder: Path) -> list[Entry]:
    file = folder / "ledger"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [
        Entry(float(at), what, int(node), rest)
        for at, what, node, *rest in (line.split() for line in lines)
    ]


def _await(folder: Path, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Entry]:
    return _poll(folder, lambda found: wanted <= set(found))


def _await_firsts(folder: Path, count: int) -> dict[tuple[str, int], Entry]:
    found = _poll(folder, lambda found: sum(what == "first" for what, _ in found) >= count)
    return {name: entry for name, entry in found.items() if name[0] == "first"}


def _poll(
    folder: Path, enough: Callable[[dict[tuple[str, int], Entry]], bool]
) -> dict[tuple[str, int], Entry]:
    entries: dict[tuple[str, int], Entry] = {}

    def is_enough() -> bool:
        entries.update({(entry.what, entry.node): entry for entry in _ledger(folder)})
        return enough(entries)

    wait_until(is_enough, lambda: f"more in the ledger than {sorted(entries)}", deadline_s=60)
    return entries


def _kill(launcher: subprocess.Popen[str]) -> None:
    """Kill the launcher and its nodes at once."""
    if launcher.poll() is not None:
        return
    processes = [
        *psutil.Process(launcher.pid).children(recursive=True),
        psutil.Process(launcher.pid),
    ]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait(60)
