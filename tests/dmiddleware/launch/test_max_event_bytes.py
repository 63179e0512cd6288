"""ditask --max-event-bytes: what a process grants for large events, and what it refuses."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import numpy as np
    from dmiddleware import Context, Task, middleware

    def main():
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                ctx.task.emit("array", np.zeros(3_000_000, np.uint8), only_remote=True)
                ctx.task.wait_for("enough", timeout_s=60)

            @middleware(roles=["learner"])
            def learn(ctx):
                ctx.task.wait_for("enough", timeout_s=60)

            if task.has_role("learner"):
                # Before the run, or the event may be sent while nobody wants it.
                task.on("array", lambda array: task.stop("it has arrived"))
            task.use(collect).use(learn).run()
"""


def test_a_larger_event_than_the_option_says_ends_the_run_with_the_option_to_raise(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with ditask_process.start(
        tmp_path,
        *("--main", "program.main", "--roles", "learner=1,collector=1"),
        *("--max-event-bytes", "2000000"),
    ) as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "FrameTooLarge" in text and "3000" in text and "1999744" in text
    assert "--max-event-bytes" in text
