"""Tasks that a node's program runs in a thread, or in a process of its own."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import asyncio, multiprocessing, os, threading
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from pathlib import Path
    from dmiddleware import Context, Task, middleware

    def train():
        with Task(Context()) as task:
            seen = set()

            @middleware(roles=["learner"])
            def learn(ctx):
                ctx.task.wait_for("collected", timeout_s=60.0)
                ctx.task.stop("collected")

            @middleware(roles=["collector"])
            def collect(ctx):
                ctx.task.emit("collected", only_remote=True)

            task.use(learn).use(collect).run()
            Path(f"{os.getpid()}.end").write_text(str(task.stop_reason))

    def thread():
        worker = threading.Thread(target=train)
        worker.start()
        worker.join()

    def daemon_that_is_not_joined():
        begun = threading.Event()

        def work():
            with Task(Context(), name="late") as task:
                task.use(lambda ctx: begun.set() or task.wait_for("never", timeout_s=0.5))
                try:
                    task.run(max_step=1)
                except Exception:
                    pass
            Path(f"{os.getpid()}.end").write_text("late")

        threading.Thread(target=work, daemon=True).start()
        begun.wait()

    def pool():
        with ThreadPoolExecutor(2) as workers:
            workers.submit(train).result()

    def to_thread():
        asyncio.run(asyncio.to_thread(train))

    def executor():
        async def main():
            await asyncio.get_running_loop().run_in_executor(None, train)

        asyncio.run(main())

    def two_at_once():
        with ThreadPoolExecutor(2) as workers:
            for future in [workers.submit(train), workers.submit(train)]:
                future.result()

    def child(method):
        process = multiprocessing.get_context(method).Process(target=train)
        process.start()
        process.join()
        raise SystemExit(process.exitcode)

    def spawned():
        child("spawn")

    def forked():
        child("fork")

    def forkserver():
        child("forkserver")

    def process_pool():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
            workers.submit(train).result()
"""


def run(folder: Path, function: str, *options: str) -> tuple[int, str, list[str]]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    options = ("--main", f"program.{function}", "--roles", "learner=1,collector=1", *options)
    with start(folder, *options) as launcher:
        text, _ = launcher.communicate(timeout=150)
    return launcher.returncode, text, sorted(path.read_text() for path in folder.glob("*.end"))


@pytest.mark.parametrize(
    "function", mostly_slow(["thread", "to_thread", "pool", "executor"], keep=1)
)
def test_a_task_in_a_thread_joins_the_run(tmp_path: Path, function: str) -> None:
    code, text, ends = run(tmp_path, function)
    assert code == 0, text
    assert ends == ["collected", "node 0: collected"]


def test_a_node_ends_when_the_task_of_its_thread_has_ended(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "daemon_that_is_not_joined")
    assert code == 1, text  # the wait has failed, in each of them
    assert "WaitTimeout" in text


def test_two_tasks_at_once_are_refused(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "two_at_once")
    assert code == 1, text
    assert "TaskStateError" in text
    assert re.search(r"node \d has the task 'task', and its peers talk to one task", text), text


@pytest.mark.parametrize(
    "function", mostly_slow(["spawned", "forked", "forkserver", "process_pool"], keep=1)
)
def test_a_task_in_a_child_process_of_a_node_is_refused(tmp_path: Path, function: str) -> None:
    code, text, ends = run(tmp_path, function)
    assert code == 1, text
    assert ends == []
    assert re.search(r"this process was started by node \d with multiprocessing", text), text
