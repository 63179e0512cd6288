"""The program of the launch benchmark: every process prints a line in its first step and idles."""

from __future__ import annotations

import time

from dmiddleware import Context, Task, middleware


def main() -> None:
    """Take a step, which needs all peers, and then do nothing."""
    with Task(Context()) as task:

        @middleware(roles=["learner", "collector", "evaluator"])
        def idle(ctx: Context) -> None:
            if ctx.total_step == 0:
                print("formed", flush=True)
            time.sleep(1.0)

        task.use(idle).run()
