"""The lines that show the progress of a serial run."""

import io

from rich.console import Console

from dmiddleware.worker.progress import Progress


def test_lines_come_at_evaluations_and_at_intervals():
    now, out = [0.0], io.StringIO()
    progress = Progress(
        2000, console=Console(file=out, width=200), clock=lambda: now[0], every_s=5.0
    )
    progress.evaluated(0, 0, -3.0)
    for step in range(10):
        now[0] += 1.0
        progress.at(100 * step, step)
    progress.evaluated(1000, 10, 4.0)
    progress.evaluated(1100, 11, {"accuracy": 0.5})
    progress.ended(1234, 12)
    assert out.getvalue().splitlines() == [
        "step 0/2,000 | update 0 | eval -3.0 (best -3.0)",
        "step 400/2,000 | update 4",
        "step 900/2,000 | update 9",
        "step 1,000/2,000 | update 10 | eval 4.0 (best 4.0)",
        "step 1,100/2,000 | update 11 | eval {'accuracy': 0.5}",
        "step 1,234/2,000 | update 12 | finished in 10 s",
    ]
