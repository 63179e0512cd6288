"""A node's process loads only what its program uses, so that many of them start quickly."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SLOW = {
    *("torch", "treetensor", "numpy", "importlib.metadata", "rich"),
    *("annotated_types", "cloudpickle", "multiprocessing", "dmiddleware.launch.options"),
}

# The learner and the collector exchange events before they look. They are few: large frames have
# fragments, which need numpy.
PROGRAM = """
    import sys, threading
    from dmiddleware import Context, Task, middleware

    def main():
        taken, has_all = [], threading.Event()

        def take(number):
            taken.append(number)
            if len(taken) == 5:
                has_all.set()

        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                for number in range(5):
                    ctx.task.emit("number", [number, {"a": 1.5}], only_remote=True)
                ctx.task.wait_for("the end", 60.0)

            @middleware(roles=["learner"])
            def learn(ctx):
                assert has_all.wait(60.0)
                print("loaded:", *sys.modules, flush=True)
                ctx.task.stop("looked")

            if task.has_role("learner"):
                task.on("number", take)
            task.use(collect).use(learn).run()
"""


def loaded(folder: Path, *options: str) -> set[str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    options = ("--main", "program.main", "--roles", "learner=1,collector=1", *options)
    with start(folder, *options) as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, text
    (line,) = (line for line in text.splitlines() if "loaded:" in line)
    return set(line.split())


@pytest.mark.parametrize(
    ("options",), mostly_slow([((),), (("--protocol", "tcp"),)], keep=1), ids=["ipc", "tcp"]
)
def test_a_program_without_arrays_loads_neither_torch_nor_numpy(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert loaded(tmp_path, *options) & SLOW == set()


def test_only_a_router_without_a_transport_of_its_own_loads_nng() -> None:
    code = (
        "import sys\n"
        "from dmiddleware.launch import node\n"
        "from dmiddleware.router import Router\n"
        "from dmiddleware.testing.stream_network import StreamNetwork\n"
        "Router(transport=StreamNetwork().transport('a'))\n"
        "assert 'pynng' not in sys.modules\n"
        "Router()\n"
        "assert 'pynng' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_command_imports_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("FOUND = True\n")
    code = (
        "import contextlib, sys\n"
        "from dmiddleware.launch.__main__ import main\n"
        "sys.argv = ['ditask', '--version']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "import here\n"
    )
    # With -P, the current folder is not on the path, as in a console script.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
