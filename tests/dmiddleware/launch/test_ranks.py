"""Learners that learn as one: their environment, and their common restart."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import DITASK

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PROGRAM = """
    import os, signal, sys, threading
    from pathlib import Path
    from dmiddleware import Context, Task, middleware
    from dmiddleware.pipeline import current_node

    # The rank that data_parallel() would yield: these programs need no torch.
    RANK = int(os.environ["RANK"]) if "RANK" in os.environ else None

    NAMES = ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]

    def show():
        node = current_node()
        values = " ".join(os.environ.get(name, "-") for name in NAMES)
        print("values", node.role_index, values, "torch" in sys.modules, flush=True)

    def crash_once():
        node = current_node()
        start = Path(f"starts-{node.node_id}")
        with start.open("a") as file:
            file.write("x")
        n_starts = len(start.read_text())
        both = threading.Event()
        left = []
        with Task(Context(), rank=RANK) as task:
            task.on("node.left", lambda node_id, reason: left.append(node_id))
            task.on("started", lambda n: both.set() if n == n_starts else None)

            @middleware(roles=["learner"])
            def learn(ctx):
                task.emit("started", n_starts, only_remote=True)
                if not both.wait(0.05):
                    return
                if n_starts == 1 and node.node_id == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if n_starts == 2:
                    task.stop("all learners are back", only_local=True)

            @middleware(roles=["collector"])
            def collect(ctx):
                threading.Event().wait(0.05)
                if sorted(one for one in left if one < 2) == [0, 0, 1, 1]:
                    task.stop("all learners have left", only_local=True)

            task.use(learn).use(collect).run()
            print("stopped:", task.stop_reason, flush=True)
"""


def ditask(folder: Path, function: str, *options: str) -> tuple[int, str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [*DITASK, "--main", f"program.{function}", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(folder), "WORLD_SIZE": "9", "RANK": "8"},
        check=False,
    )
    return done.returncode, done.stdout


def test_learners_get_the_variables_of_their_group_and_others_get_none(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "show", "--roles", "collector=2,learner=2")
    assert code == 0, text
    found = {}
    for line in text.splitlines():
        node, _, values = line.partition(" values ")
        if values:
            found[node] = values.split()
    port = found["[node 2]"][2]
    assert 1024 < int(port) < 65536
    assert found == {
        "[node 0]": ["0", *["-"] * 6, "False"],
        "[node 1]": ["1", *["-"] * 6, "False"],
        "[node 2]": ["0", "127.0.0.1", port, "0", "0", "2", "2", "False"],
        "[node 3]": ["1", "127.0.0.1", port, "1", "1", "2", "2", "False"],
    }


def test_a_learner_that_dies_is_restarted_together_with_the_others(tmp_path: Path) -> None:
    roles = ("--roles", "learner=2,collector=2")
    code, text = ditask(tmp_path, "crash_once", *roles, "--on-failure", "restart")
    assert code == 0, text
    assert "node 1 (learner) was killed by SIGKILL" in text
    assert "restarting all learners in 0.5 s (restart 1 of 3)" in text
    assert "node 0 (learner) has ended, to be restarted with the other learners" in text
    starts = [(tmp_path / f"starts-{node}").read_text() for node in range(4)]
    assert starts == ["xx", "xx", "x", "x"]
    assert "all learners are back" in text
