"""Watching a run in the terminal."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from dmiddleware.errors import RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsFile
from dmiddleware.runs.watch import sparkline, view, watch
from tests.dmiddleware.runs.written_runs import write_run


def end(run: Path) -> None:
    (run / "final_ctx.json").write_text(json.dumps({"stop_reason": "solved"}))


def text_of(run: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view(run))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_view_has_counters_last_values_and_their_course(tmp_path: Path) -> None:
    run = write_run(tmp_path, [1.0, 2.0, 3.5])
    MetricsFile(run / METRICS_FILE).append({"env_step": 1300, "train_iter": 7, "time_s": 61.2})
    text = text_of(run)
    assert "1,300 env steps, 7 updates, 61 s" in text
    assert "eval/return_mean" in text and "3.5" in text and "▁▃█" in text
    assert "running, or killed; the last metrics are 0 s old" in text
    end(run)
    assert "ended: solved" in text_of(run)


@pytest.mark.parametrize(
    ("values", "bars"),
    [([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█"), (list(range(8)), "▁▂▃▄▅▆▇█")],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_a_sparkline_of_many_values_shows_means() -> None:
    assert sparkline([0, 2, 4, 6, 8, 6, 4, 2], width=4) == "▁▅█▃"
    assert len(sparkline(range(1000))) == 40


def test_on_a_terminal_the_view_is_renewed_until_the_run_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path, [1.0])
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)

    def go_on() -> None:
        MetricsFile(run / METRICS_FILE).append({"env_step": 777, "eval/return_mean": 2.0})
        end(run)

    timer = threading.Timer(0.3, go_on)
    timer.start()
    watch(run, console, every_s=0.05)
    timer.join()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "100 env steps" in text and "777 env steps" in text and "ended: solved" in text


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="has no metrics"):
        view(tmp_path)


def test_the_command_prints_once_where_there_is_no_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [5.0])
    result = CliRunner().invoke(ditask, ["watch", str(run)])
    assert result.exit_code == 0 and "eval/return_mean" in result.output
    result = CliRunner().invoke(ditask, ["watch", str(tmp_path)])
    assert result.exit_code == 1 and "has no metrics" in result.output
    result = CliRunner().invoke(ditask, ["watch", str(tmp_path / "none")])
    assert result.exit_code == 2 and "does not exist" in result.output
