"""Runs across hosts that differ as real ones do; each host is a network namespace.

Names, IPv6, several interfaces, address translation, ports that are in use, a slow and lossy link,
and clocks that differ: each works, or is refused with what to do.
"""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process
from tests.faults.network_namespaces import (
    ADDRESSES,
    cable,
    forwarder,
    namespaces,
    slow_cable,
    why_not,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

PORT = 25600
KEY = "0123456789abcdef0123456789abcdef"

PROGRAM = """
    from dmiddleware import Context, Task, middleware

    seen = []

    def main():
        with Task(Context()) as task:
            task.on("hello", seen.append)

            @middleware(roles=["learner"])
            def learn(ctx):
                task.wait_for("hello", 60.0)
                if len(set(seen)) == 2:
                    task.stop("both are here")

            @middleware(roles=["collector"])
            def collect(ctx):
                task.emit("hello", task.router.node_id, only_remote=True)

            task.use(learn).use(collect).run()
            print("ended:", task.stop_reason, sorted(set(seen)), flush=True)
"""

LEARNER = ("--roles", "learner=1,collector=1", "--protocol", "tcp", "--run-id", "hosts")
COLLECTOR = ("--roles", "collector=1", "--run-id", "hosts", "--node-ids", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ditask_process.write_key(tmp_path / "key", KEY)
    return tmp_path


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts that are connected by a cable."""
    with namespaces() as names, cable(*names):
        yield names


def start(folder: Path, host: str, *options: str) -> subprocess.Popen[str]:
    """Start ditask on a host."""
    common = ("--main", "program.main", "--key-file", str(folder / "key"), "--kill-after", "2")
    return ditask_process.start(folder, *common, *options, within=("ip", "netns", "exec", host))


def assert_run_ends(
    folder: Path,
    hosts: tuple[str, str],
    *,
    learner: tuple[str, ...],
    attach_to: str,
) -> str:
    """Check that a run over two hosts does its work; return what the first launcher has printed."""
    ports = ("--ports", str(PORT))
    with (
        start(folder, hosts[0], *LEARNER, *ports, *learner) as first,
        start(folder, hosts[1], *COLLECTOR, "--attach-to", attach_to) as second,
    ):
        printed, joined = first.communicate(timeout=90)[0], second.communicate(timeout=30)[0]
    assert first.returncode == 0 and second.returncode == 0, printed + joined
    assert "ended: both are here [1, 2]" in printed
    return printed


@pytest.mark.slow
def test_hosts_may_have_names(folder: Path, hosts: tuple[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        for host in hosts:
            # `ip netns exec` puts it in the place of /etc/hosts.
            names = Path("/etc/netns") / host
            names.mkdir(parents=True)
            stack.callback(names.rmdir)
            stack.callback((names / "hosts").unlink)
            (names / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} learner.lab\n")
        assert_run_ends(
            folder,
            hosts,
            learner=("--address", "learner.lab"),
            attach_to=f"tcp://learner.lab:{PORT}",
        )


@pytest.mark.slow
def test_hosts_may_have_ipv6_addresses(folder: Path, hosts: tuple[str, str]) -> None:
    for host, address in zip(hosts, ("fd00::1", "fd00::2"), strict=True):
        device = devices(host)[-1]
        run_in(host, "ip", "addr", "add", f"{address}/64", "dev", device, "nodad")
    assert_run_ends(
        folder, hosts, learner=("--address", "fd00::1"), attach_to=f"tcp://[fd00::1]:{PORT}"
    )


@pytest.mark.slow
def test_a_host_may_be_reached_over_another_of_its_interfaces(
    folder: Path, hosts: tuple[str, str]
) -> None:
    first, second = hosts
    run_in(first, "ip", "link", "add", "other", "type", "veth", "peer", "name", "another")
    run_in(first, "ip", "addr", "add", "10.204.0.1/24", "dev", "other")
    run_in(first, "ip", "link", "set", "other", "up")
    run_in(second, "ip", "route", "add", "10.204.0.0/24", "via", ADDRESSES[0])
    assert_run_ends(
        folder,
        hosts,
        learner=("--address", ADDRESSES[0], "--bind", "0.0.0.0"),
        attach_to=f"tcp://10.204.0.1:{PORT}",
    )


def test_a_host_may_be_behind_an_address_translation(folder: Path, hosts: tuple[str, str]) -> None:
    """Others reach it at an address that it does not have itself."""
    with forwarder(hosts[1], "127.0.0.7", PORT, to=(ADDRESSES[0], PORT)):
        printed = assert_run_ends(
            folder,
            hosts,
            learner=("--address", "127.0.0.7", "--bind", ADDRESSES[0]),
            attach_to=f"tcp://127.0.0.7:{PORT}",
        )
    assert f"listens on tcp://127.0.0.7:{PORT}" in printed


def test_a_port_that_is_in_use_is_refused_before_anything_starts(
    folder: Path, hosts: tuple[str, str]
) -> None:
    listens = (
        f"import socket; opened = socket.create_server(('{ADDRESSES[0]}', {PORT})); "
        "print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        ["ip", "netns", "exec", hosts[0], "python3", "-c", listens],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"ready\n"
            address = ("--address", ADDRESSES[0], "--ports", str(PORT))
            with start(folder, hosts[0], *LEARNER, *address) as run:
                printed = run.communicate(timeout=60)[0]
        finally:
            other.kill()
    assert run.returncode != 0
    assert f"{PORT}" in printed and "in use" in printed and "--ports" in printed


def test_an_address_that_the_host_does_not_have_is_refused_with_the_remedy(
    folder: Path, hosts: tuple[str, str]
) -> None:
    with start(folder, hosts[0], *LEARNER, "--address", "10.99.99.99") as run:
        printed = run.communicate(timeout=60)[0]
    assert run.returncode != 0
    assert "10.99.99.99" in printed and "--bind" in printed


@pytest.mark.slow
def test_hosts_may_be_far_apart(folder: Path) -> None:
    """100 ms there and back, and one of 100 packets is lost."""
    with namespaces() as names, slow_cable(*names, delay_s=(0.05, 0.05), loss=0.01):
        assert_run_ends(
            folder,
            names,
            learner=("--address", ADDRESSES[0]),
            attach_to=f"tcp://{ADDRESSES[0]}:{PORT}",
        )


def devices(host: str) -> list[str]:
    """Return the network devices of a host."""
    lines = run_in(host, "ip", "-brief", "link").splitlines()
    return [line.split()[0].partition("@")[0] for line in lines]


def run_in(host: str, *command: str) -> str:
    """Run a command on a host, and return its output."""
    done = subprocess.run(
        ["ip", "netns", "exec", host, *command], capture_output=True, text=True, check=True
    )
    return done.stdout
