"""Nodes that are forked from a process that has imported what they need."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from dmiddleware.launch.early_imports import early_imports, early_modules
from dmiddleware.launch.hosts import local
from dmiddleware.launch.hosts.fork_server import fork_orphan
from dmiddleware.launch.leftovers import NO_MARK
from dmiddleware.launch.plan import NodeConfig, plan_run
from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow
from tests.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="nodes are forked on Linux only")

OWN = """
import os, sys

PID = os.getpid()
IS_EARLY = "torch" in sys.modules
"""
PROGRAM = """
    import own
    import json, os, random, secrets, sys, time
    from pathlib import Path
    from dmiddleware import Context, Task

    def write_facts():
        lines = Path("/proc/self/environ").read_text().split("\\0")
        shown = dict(line.split("=", 1) for line in lines if line)
        found = dict(
            pid=os.getpid(), parent=os.getppid(), session=os.getsid(0), imported_by=own.PID,
            is_forked="fork_server" in Path("/proc/self/cmdline").read_text(),
            name=Path("/proc/self/comm").read_text().strip(), arguments=sys.argv[1:],
            marks=[shown["DITASK_MARKS"], os.getenv("DITASK_MARKS")],
            variables=[os.getenv(name) for name in "AB"], stdin=sys.stdin.read(),
            is_early=own.IS_EARLY,
            drawn=dict(python=random.random(), secret=secrets.token_hex(4)),
        )
        if "torch" in sys.modules:
            found["drawn"]["torch"] = sys.modules["torch"].rand(1).item()
            found["drawn"]["numpy"] = sys.modules["numpy"].random.rand()
        Path(f"facts-{time.monotonic_ns()}.json").write_text(json.dumps(found))

    def n_started():
        return len(list(Path().glob("facts-*")))

    def main():
        write_facts()
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=2)

    def ends(end):
        write_facts()
        with Task(Context()) as task:

            def step(ctx):
                if "learner" in task.roles:
                    task.wait_for("the end", 100.0)
                if n_started() == 2:
                    end()
                task.stop("one has been started again")

            task.use(step).run()

    def exits():
        ends(lambda: sys.exit(7))

    def aborts():
        ends(os.abort)

    def kills_server():
        def end():
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    _, name, rest = (folder / "stat").read_text().replace(")", "(").split("(")
                    command = (folder / "cmdline").read_text()
                except OSError:
                    continue
                is_sibling = int(rest.split()[1]) == os.getppid()
                if is_sibling and "fork_server" in command and "node" not in name:
                    os.kill(int(folder.name), 9)
            sys.exit(7)

        ends(end)
"""


def run(
    folder: Path, function: str, *options: str, last_line: str = ""
) -> tuple[list[dict[str, Any]], str]:
    """Run a program, and return what its nodes have written, by their starts, and the output."""
    (folder / "own.py").write_text(OWN)
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM) + last_line)
    with start(folder, "--main", f"program.{function}", *options) as launcher:
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    nodes = [json.loads(file.read_text()) for file in sorted(folder.glob("facts-*"))]
    assert all(one["parent"] == launcher.pid for one in nodes)
    return nodes, output


@needs_linux
def test_a_forked_node_has_what_a_new_process_has(tmp_path: Path) -> None:
    (tmp_path / "learning.py").write_text("import torch\n")
    options = ("--parallel-workers", "3", "--env", "A=1", "--", "x", "--y=é")
    nodes, _ = run(tmp_path, "main", *options, last_line="import learning\n")
    assert len(nodes) == 3
    for one in nodes:
        assert one["is_forked"] and one["is_early"]
        # Modules of the program are imported by each node.
        assert one["session"] == one["pid"] == one["imported_by"]
        assert one["arguments"] == ["x", "--y=é"]
        assert one["variables"] == ["1", None]
        assert one["marks"][0] == one["marks"][1]
        assert NO_MARK not in one["marks"][0]
        assert one["stdin"] == ""
    assert {one["name"] for one in nodes} == {f"ditask node {number}" for number in range(3)}
    for drawn in ("python", "secret", "torch", "numpy"):
        assert len({one["drawn"][drawn] for one in nodes}) == 3, drawn


@needs_linux
def test_torch_is_not_loaded_before_a_program_that_may_set_variables(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    last_line = "import threads, torch\nassert torch.get_num_threads() == 2\n"
    nodes, _ = run(tmp_path, "main", "--parallel-workers", "2", last_line=last_line)
    assert [(one["is_forked"], one["is_early"]) for one in nodes] == [(True, False)] * 2


@needs_linux
def test_nodes_with_variables_of_their_own_are_started_one_by_one(tmp_path: Path) -> None:
    # Libraries read some variables when they are loaded.
    options = ("--roles", "learner=1,collector=2,evaluator=2", "--env", "learner:A=1")
    nodes, _ = run(tmp_path, "main", *options, "--env", "evaluator:B=2")
    forked = [(one["is_forked"], *one["variables"]) for one in nodes]
    assert sorted(forked, key=str) == [
        (False, "1", None),
        (True, None, "2"),
        (True, None, "2"),
        (True, None, None),
        (True, None, None),
    ]


@needs_linux
def test_a_program_that_imports_nng_is_not_forked(tmp_path: Path) -> None:
    last_line = "import dmiddleware.router.transport.nng_library\n"
    nodes, _ = run(tmp_path, "main", "--parallel-workers", "2", last_line=last_line)
    assert [one["is_forked"] for one in nodes] == [False, False]


RESTARTS = ("--roles", "learner=1,collector=1", "--on-failure", "restart")


@needs_linux
@pytest.mark.parametrize(
    ("function", "failure"),
    mostly_slow([("exits", "it called sys.exit(7)"), ("aborts", "was killed by SIGABRT")], keep=1),
)
def test_a_forked_node_has_an_exit_code_and_is_forked_again(
    tmp_path: Path, function: str, failure: str
) -> None:
    nodes, output = run(tmp_path, function, *RESTARTS)
    assert [one["is_forked"] for one in nodes] == [True, True, True]
    assert failure in output


@needs_linux
def test_a_node_is_started_if_its_fork_server_was_killed(tmp_path: Path) -> None:
    nodes, _ = run(tmp_path, "kills_server", *RESTARTS)
    assert [one["is_forked"] for one in nodes] == [True, True, False]


@needs_linux
def test_a_fork_that_the_system_refuses_has_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no more")

    monkeypatch.setattr(os, "fork", refuse)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="no more"):
        fork_orphan()
    assert len(list(Path("/proc/self/fd").iterdir())) == n_open


PLAN = plan_run({"learner": 1, "collector": 1}, addresses=["tcp://127.0.0.1:1"])
CONFIGS = [NodeConfig(run=PLAN, main="program.main", package="")] * 2


@needs_linux
def test_a_host_that_cannot_fork_nodes_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(local, "adopted_orphans", refuse)
    with local.LocalHost(configs=CONFIGS) as host:
        assert host._servers == {}


@needs_linux
def test_a_fork_server_that_was_killed_is_reaped() -> None:
    with local.LocalHost(configs=CONFIGS) as host:
        (server,) = host._servers.values()
        os.kill(server.pid, signal.SIGKILL)

        def is_reaped() -> bool:
            assert not list(host.events(0.01))
            return not psutil.pid_exists(server.pid)

        wait_until(is_reaped, "the server", deadline_s=30)
        assert host._servers == {}


def test_what_is_imported_early_is_ours_or_torch_in_any_module_of_the_program(
    tmp_path: Path,
) -> None:
    modules = {
        "program.py": "import os, agents.dqn, numpy, torchvision, middleware_of_mine\n"
        "from dmiddleware import Task, Context as C\n"
        "def main():\n    from dmiddleware.policy import dqn\n",
        "agents/__init__.py": "from middleware.collect import *\n",
        "agents/dqn.py": "from . import networks\nfrom ... import beyond\n",
        "agents/networks.py": "import torch.nn as nn, program\n",
        "unused.py": "import dmiddleware.env\n",
    }
    (tmp_path / "agents").mkdir()
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    assert early_imports("program.main", tmp_path) == [
        "dmiddleware",
        "dmiddleware.Context",
        "dmiddleware.Task",
        "dmiddleware.policy",
        "dmiddleware.policy.dqn",
        "middleware.collect",
        "torch.nn",
    ]
    assert early_imports("dmiddleware.zoo.main", tmp_path) == ["dmiddleware.zoo"]
    assert early_imports("nowhere.main", tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\n",
        "from os import environ\nenviron.update(A='1')\n",
        "import os\ndef set():\n    os.putenv('A', '1')\n",
        "no python",
    ],
)
def test_nothing_is_imported_before_variables_may_be_set(tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text("import torch, settings\n")
    (tmp_path / "settings.py").write_text(text)
    assert early_imports("program.main", tmp_path) == []


def test_what_a_program_has_loaded_is_imported_early() -> None:
    loaded = ["os", "torch", "torch.nn", "torchvision", "dmiddleware", "dmiddleware.policy.dqn"]
    assert early_modules([*loaded, "middleware.collect"]) == [
        "torch",
        "dmiddleware",
        "middleware.collect",
    ]
