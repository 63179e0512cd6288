"""ditask as process 1 of a container, to which the system gives all orphans."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

CONTAINER = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
ORPHANS = 40
PROGRAM = """
    import os, subprocess, sys
    from pathlib import Path
    from dmiddleware import Context, Task, middleware
    from tests.waiting import wait_until

    def orphans(path):
        for _ in range(ORPHANS):
            if os.fork() == 0:
                if os.fork() == 0:
                    with open(path, "a") as file:
                        file.write("x")
                os._exit(0)
            os.wait()

    def zombies():
        states = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            states += [state] if parent == "1" else []
        return states.count("Z")

    def run(end):
        path = Path(f"orphans-{os.getpid()}")
        orphans(path)
        assert os.stat("/proc/1/exe").st_ino == os.stat(sys.executable).st_ino
        wait_until(lambda: path.read_text() == "x" * ORPHANS, "the orphans", deadline_s=60)
        wait_until(lambda: not zombies(), lambda: f"{zombies()} zombies", deadline_s=60)
        print("no zombies", subprocess.run(["sh", "-c", "exit 7"]).returncode, flush=True)
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                if len(list(Path().glob("orphans-*"))) < 3:
                    end()
                task.emit("restarted", only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                task.wait_for("restarted", 100.0)
                task.stop("all done")

            task.use(collect).use(learn).run()

    def fails():
        run(lambda: sys.exit(3))

    def is_killed():
        run(lambda: os.kill(os.getpid(), 9))
"""


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"]).returncode:
        pytest.skip("this system does not allow new namespaces of processes")


def ditask(folder: Path, function: str, *options: str) -> tuple[int, str]:
    text = textwrap.dedent(PROGRAM).replace("ORPHANS", str(ORPHANS))
    (folder / "program.py").write_text(text)
    roles = ["--roles", "learner=1,collector=1"]
    done = subprocess.run(
        [*CONTAINER, *DITASK, "--main", f"program.{function}", *roles, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("function", "failure"),
    mostly_slow(
        [("is_killed", "was killed by SIGKILL"), ("fails", "it called sys.exit(3)")], keep=1
    ),
)
def test_orphans_are_reaped_and_exit_codes_are_kept(
    tmp_path: Path, function: str, failure: str
) -> None:
    code, text = ditask(tmp_path, function, "--on-failure", "restart")
    assert code == 0, text
    assert text.count("no zombies 7") == 3
    assert failure in text and "restart 1 of 3" in text


def test_a_run_that_fails_has_its_exit_code(tmp_path: Path) -> None:
    code, text = ditask(tmp_path, "fails")
    assert code == 1, text
    assert "node 1 (collector) failed: it called sys.exit(3)" in text
