"""Collectors that join a run which goes on already, are put to work, and leave it unharmed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dmiddleware.launch.platforms import DEFAULT_PORT
from tests.dmiddleware.launch import ditask_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

# The learner writes what it sees to a ledger, with the time, and ends when the file `end` is there
# and every collector that is left has sent fifty numbers more.
PROGRAM = """
    import threading, time
    from collections import Counter
    from pathlib import Path
    from dmiddleware import Context, Role, Task, middleware

    changed = threading.Condition()
    taken, here = Counter(), set()

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
        here.add(node)
        write("joined", node)

    def on_left(node, reason):
        here.discard(node)
        write("left", node, reason.replace(" ", "_"))

    def main():
        with Task(Context()) as task:

            @middleware(roles=[Role.COLLECTOR])
            def collect(ctx):
                threading.Event().wait(0.01)  # the environment's pace
                ctx.task.emit("number", task.router.node_id, ctx.total_step, only_remote=True)

            @middleware(roles=[Role.LEARNER])
            def learn(ctx):
                with changed:
                    changed.wait(0.1)
                    if enough is None and Path("end").exists():
                        globals()["enough"] = {node: taken[node] + 50 for node in here}
                    if enough and all(taken[node] >= count for node, count in enough.items()):
                        ctx.task.stop("all went on")

            if task.has_role(Role.LEARNER):
                task.on("number", on_number)
                task.on("node.joined", on_joined)
                task.on("node.left", on_left)
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
    (tmp_path / "key").write_text("k" * 40)
    (tmp_path / "other-key").write_text("o" * 40)
    return tmp_path


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return ditask_process.start(folder, "--main", "program.main", *options)


@contextlib.contextmanager
def going_on(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run of one learner and one collector over tcp; yields it and where it can be joined."""
    roles = ("--roles", "learner=1,collector=1", "--topology", "star", "--protocol", "tcp")
    with start(folder, *roles, *options) as run:
        try:
            yield run, _await_line(run, " listens on ").rpartition(" ")[2]
        finally:
            _kill(run)


def _first_port_of_dialers() -> int:
    """The lowest port that this system gives to who dials, or the usual one of Linux."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(file.read_text().split()[0]) if file.exists() else 32_768


def joining(folder: Path, address: str, *options: str) -> subprocess.Popen[str]:
    common = ("--roles", "collector=2", "--topology", "alone", "--attach-to", address)
    return start(folder, *common, *options)


def test_collectors_join_are_put_to_work_and_killed_do_no_harm(folder: Path) -> None:
    with going_on(folder, "--key-file", "key") as (run, address):
        with joining(folder, address, "--key-file", "key", "--node-ids", "10") as joined:
            entries = _await(folder, {("first", 1), ("first", 10), ("first", 11)})
            _kill(joined)
        _await(folder, {("left", 10), ("left", 11)})
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
    assert run.returncode == 0, text
    assert "all went on" in text
    for node in (10, 11):
        assert entries["first", node].at - entries["joined", node].at < 3.0
    assert not [entry for entry in _ledger(folder) if entry.what == "gap"]


def test_ports_that_nobody_named_are_none_that_dialers_may_have_taken(folder: Path) -> None:
    with going_on(folder) as (_, address):
        assert 1024 < int(address.rpartition(":")[2]) < _first_port_of_dialers()
    assert _first_port_of_dialers() > DEFAULT_PORT


def test_those_who_joined_may_be_asked_to_leave(folder: Path) -> None:
    with going_on(folder, "--key-file", "key") as (run, address):
        with joining(folder, address, "--key-file", "key") as joined:
            entries = _await_firsts(folder, 3)
            joined.send_signal(signal.SIGTERM)
            text, _ = joined.communicate(timeout=80)
            assert joined.returncode == 143, text
        ids = {node for _, node in entries} - {1}
        left = _await(folder, {("left", node) for node in ids})
        assert {left["left", node].rest[0] for node in ids} == {"said_goodbye"}
        assert min(ids) >= 1_000_000, "they chose ids that no node of the run has"
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
    assert run.returncode == 0, text


def test_when_the_run_ends_those_who_joined_end_too(folder: Path) -> None:
    with (
        going_on(folder) as (run, address),
        joining(folder, address, "--key-file", str(_invented_key(run))) as joined,
    ):
        _await_firsts(folder, 3)
        (folder / "end").touch()
        text, _ = run.communicate(timeout=80)
        assert run.returncode == 0, text
        text, _ = joined.communicate(timeout=80)
        assert joined.returncode == 0, text
        assert text.count("ended: node 0: all went on") == 2
    assert not [path for path in folder.iterdir() if path.name.startswith("ditask-")]


def test_without_the_key_nothing_is_started(folder: Path) -> None:
    with joining(folder, "tcp://127.0.0.1:5555") as joined:
        text, _ = joined.communicate(timeout=80)
    assert joined.returncode == 1
    assert "to join a run that goes on already, this side needs its key" in text


def test_with_another_key_the_reason_is_told(folder: Path) -> None:
    with (
        going_on(folder, "--key-file", "key") as (_, address),
        joining(folder, address, "--key-file", "other-key") as joined,
    ):
        text, _ = joined.communicate(timeout=80)
    assert joined.returncode == 1
    assert "HandshakeRefused" in text and "key" in text
    assert not [entry for entry in _ledger(folder) if entry.node > 1]


def test_certificates_are_asked_for_where_the_run_is_secured(folder: Path) -> None:
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


def _invented_key(run: subprocess.Popen[str]) -> Path:
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


def _poll(folder: Path, enough) -> dict[tuple[str, int], Entry]:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 60
    found: dict[tuple[str, int], Entry] = {}
    while time.monotonic() < deadline:
        found = {(entry.what, entry.node): entry for entry in _ledger(folder)}
        if enough(found):
            return found
        time.sleep(0.05)
    pytest.fail(f"the ledger holds no more than {sorted(found)}")


def _kill(launcher: subprocess.Popen[str]) -> None:
    """Kill the launcher and its processes at one blow."""
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
