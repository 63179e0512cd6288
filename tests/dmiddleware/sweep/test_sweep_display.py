"""What a sweep shows, in a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dmiddleware.launch.output import SteadyStream
from dmiddleware.sweep.sweep_display import RunView, SweepDisplay, sweep_table

ERROR = "node 0 failed: ValueError: " + "a long reason " * 10


def views() -> list[RunView]:
    done = [RunView(f"learning_rate-1e-4_seed-{seed}", "done", last=1.5) for seed in range(8)]
    failed = RunView("learning_rate-3e-4_seed-8", "failed", "12,800 env steps", text=ERROR)
    running = RunView("learning_rate-3e-4_seed-9", "running", "400 env steps", 470.25, 460.5)
    return [*done, failed, running, RunView("learning_rate-3e-4_seed-10", "waiting")]


def shown(n_rows: int) -> str:
    console = Console(file=io.StringIO(), width=90, color_system=None)
    console.print(sweep_table(views(), n_rows))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_is_readable_in_a_narrow_terminal() -> None:
    text = shown(20)
    (row,) = [line for line in text.splitlines() if "seed-9" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["learning_rate-3e-4_seed-9", "running", "400 env steps", "470.2", "460.5"]
    assert len([line for line in text.splitlines() if "seed-" in line]) == 11


def test_runs_that_run_or_have_failed_come_first_where_there_is_no_room() -> None:
    text = shown(2)
    assert "seed-8" in text and "seed-9" in text
    assert "seed-0" not in text
    assert "and 9 more runs" in text


def test_elsewhere_each_change_is_a_line() -> None:
    out = io.StringIO()
    with SweepDisplay(SteadyStream(out)) as display:
        for view in (*views(), *views()):
            display.show(view)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10  # not for what waits, and each once
    assert lines[-1] == (
        "[sweep] learning_rate-3e-4_seed-9: running, 400 env steps, last evaluation 470.2"
    )
    assert ERROR.strip() in lines[-2]


@pytest.mark.parametrize("state", ["done", "pruned", "interrupted"])
def test_only_failed_runs_count_as_failures(state: str) -> None:
    display = SweepDisplay(SteadyStream(io.StringIO()))
    display.show(RunView("a", state))
    assert display.failed == []
    display.show(RunView("a", "failed"))
    assert [view.name for view in display.failed] == ["a"]
