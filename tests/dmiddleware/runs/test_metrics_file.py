"""The metrics file of a run."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from dmiddleware.data import pack_checkpoint, unpack_checkpoint
from dmiddleware.errors import RunFolderError
from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsFile, read_metrics
from tests.middleware.disk import no_room


def row(at: int) -> dict[str, float | None]:
    return {"env_step": at, "learn/total_loss": at / 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / METRICS_FILE


def saved(file: MetricsFile) -> Any:
    """Pass the state through the bytes of a snapshot."""
    return unpack_checkpoint(pack_checkpoint(file.state_dict()))


def test_pandas_reads_the_file_in_one_call(path: Path) -> None:
    file = MetricsFile(path)
    file.append(row(10))
    file.append({"env_step": 20, "eval/return_mean": 1.5})
    table = pandas.read_json(path, lines=True)
    assert table["env_step"].tolist() == [10, 20]
    assert table["eval/return_mean"][1] == 1.5 and math.isnan(table["eval/return_mean"][0])
    assert (
        read_metrics(path.parent)
        == file.rows()
        == [row(10), {"env_step": 20, "eval/return_mean": 1.5}]
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_becomes_null(path: Path, value: float | None) -> None:
    MetricsFile(path).append({"env_step": 1, "a": value})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"env_step": 1, "a": None}


@pytest.mark.process
def test_rows_survive_kill_minus_nine(path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dmiddleware.runs.metrics_file import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "for at in range(100): file.append({'env_step': at})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert [one["env_step"] for one in read_metrics(path.parent)] == list(range(100))


@pytest.mark.parametrize("n_after", [0, 1, 30])
def test_rows_behind_the_state_are_replaced(path: Path, n_after: int) -> None:
    killed = MetricsFile(path)
    for at in range(5):
        killed.append(row(at))
    state = saved(killed)
    for at in range(100, 100 + n_after):
        killed.append(row(at))
    resumed = MetricsFile(path)
    resumed.load_state_dict(state)
    assert resumed.rows() == [row(at) for at in range(5)]
    resumed.append(row(5))
    assert read_metrics(path.parent) == resumed.rows() == [row(at) for at in range(6)]


def test_the_state_does_not_grow_with_the_file(path: Path) -> None:
    file = MetricsFile(path)
    sizes = []
    for n_rows in (10, 1000):
        for at in range(n_rows):
            file.append(row(at))
        sizes.append(len(pack_checkpoint(file.state_dict())))
    assert sizes[1] < sizes[0] + 20


def test_a_run_continues_in_another_folder(tmp_path: Path) -> None:
    first, second = MetricsFile(tmp_path / "a"), MetricsFile(tmp_path / "b")
    first.append(row(1))
    second.load_state_dict(saved(first))
    second.append(row(2))
    assert second.rows() == [row(1), row(2)]
    assert len((tmp_path / "b").read_text().splitlines()) == 2
    assert first.rows() == [row(1)]


@pytest.mark.parametrize("damage", ["removed", "changed", "cut"])
def test_metrics_whose_file_is_gone_begin_where_the_run_resumes(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = MetricsFile(path), MetricsFile(path)
    for at in range(3):
        first.append(row(at))
    state = saved(first)
    content = path.read_bytes()
    path.write_bytes(content[:-9] if damage == "cut" else content.replace(b"env", b"Env"))
    if damage == "removed":
        path.unlink()
    second.load_state_dict(state)
    assert "metrics.jsonl is missing or was changed" in caplog.text
    second.append(row(3))
    assert read_metrics(path.parent) == second.rows() == [row(3)]


def test_rows_without_room_are_written_later_or_kept_in_the_state(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = MetricsFile(path), MetricsFile(path)
    first.append(row(0))
    with no_room(path.stat().st_size + 10):
        first.append(row(1))
        first.append(row(2))
        state = saved(first)
    assert first.rows() == [row(0), row(1), row(2)]
    second.load_state_dict(state)
    assert second.rows() == first.rows()
    second.append(row(3))
    assert read_metrics(path.parent) == [row(at) for at in range(4)]
    assert caplog.text.count("cannot write metrics") == 1


def test_half_a_line_at_the_end_is_left_out(path: Path) -> None:
    MetricsFile(path).append(row(1))
    with path.open("ab") as file:
        file.write(b'{"env_step": 2, "lea')
    assert read_metrics(path.parent) == [row(1)]


def test_a_file_that_exists_is_continued_behind_its_last_whole_line(path: Path) -> None:
    MetricsFile(path).append(row(1))
    with path.open("ab") as file:
        file.write(b'{"env_step": 2, "lea')
    again = MetricsFile(path)
    again.append(row(2))
    assert read_metrics(path.parent) == again.rows() == [row(1), row(2)]


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no metrics \(No such file.*name the folder"):
        read_metrics(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_lines_that_a_run_cannot_read_again_are_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"env_step": 1}\n{"env_st\n[3]\n{"env_step": 4}\n')
    metrics = MetricsFile(path)
    for n_more in range(3):
        assert [row["env_step"] for row in metrics.rows()] == [1, 4, *range(n_more)]
        metrics.append({"env_step": n_more})
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: skipped 2 lines 2, 3, which are cut or damaged"
    ]
