"""Files of runs that were cut or damaged, as every command reads them."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dmiddleware.launch.cli import ditask
from dmiddleware.runs import RunRecord, compare, find_runs, read_metrics
from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsFile
from dmiddleware.runs.watch import view
from dmiddleware.sweep.metrics_tail import MetricsTail
from tests.dmiddleware.runs.written_runs import write_run

METRIC = "eval/return_mean"
DAMAGE = {
    "half a line": b'{"env_step": 150, "eval/retu\n',
    "zeros of a power failure": bytes(64) + b"\n",
    "bytes that are not UTF-8": b'{"env_step": 150, "eval/return_mean": \xff\xfe}\n',
    "a list": b"[1, 2]\n",
    "a number": b"150\n",
    "null": b"null\n",
    "text as a value": b'{"env_step": 150, "eval/return_mean": "90"}\n',
    "a list as a value": b'{"env_step": [150], "eval/return_mean": 90}\n',
    "two lines in one": b'{"env_step": 150, "eval/re{"env_step": 160, "eval/return_mean": 5}\n',
    "a number beyond a float": b'{"env_step": 1' + b"0" * 400 + b', "eval/return_mean": 1}\n',
    "brackets without an end": b"[" * 100_000 + b"\n",
    "an end without a line": b'{"env_step": 400, "eval/return_mean',
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=DAMAGE.values(), ids=DAMAGE)
def run(request: pytest.FixtureRequest) -> Path:
    """Return a run of three evaluations, of which a line after the first is damaged."""
    run = write_run(Path("run"), [1.0, 2.0, 3.0], settings={"env": {"id": "Toy-v0"}})
    lines = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    at = 2 if request.param.endswith(b"\n") else len(lines)
    (run / METRICS_FILE).write_bytes(b"".join([*lines[:at], request.param, *lines[at:]]))
    return run


def invoke(*words: str) -> Result:
    return CliRunner().invoke(ditask, list(words), catch_exceptions=False)


def test_damaged_lines_are_skipped_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rows = read_metrics(run)
    assert [row[METRIC] for row in rows if METRIC in row] == [1, 2, 3]
    assert "metrics.jsonl: skipped line" in caplog.text and "cut or damaged" in caplog.text


def test_every_command_skips_damaged_lines_and_says_so(run: Path) -> None:
    assert RunRecord.load(run).values.tolist() == [1, 2, 3]
    for words in (("compare", "run"), ("watch", "run")):
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        assert "skipped line" in " ".join(result.output.split())
    assert "skipped line" in " ".join(compare("run").warnings)
    console = Console(file=io.StringIO(), width=200)
    console.print(view(run))
    assert "skipped line" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_skips_damaged_lines_of_all_processes_and_says_so(run: Path) -> None:
    (run / "metrics.node-3.jsonl").write_bytes((run / METRICS_FILE).read_bytes())
    result = invoke("report", "run", "--output", "page.html")
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text()
    assert "run/metrics.jsonl: skipped line" in page
    assert "run/metrics.node-3.jsonl: skipped line" in page


def test_a_sweep_skips_damaged_lines_and_counts_them(run: Path) -> None:
    tail = MetricsTail(run, METRIC)
    tail.update()
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'\n{"env_step": 900, "eval/return_mean": 4}\n')
    tail.update()
    assert tail.values == [1, 2, 3, 4] and tail.n_skipped == 1 and tail.at == "900 env steps"


def test_a_run_continues_its_damaged_file(run: Path) -> None:
    file = MetricsFile(run / METRICS_FILE)
    file.append({"env_step": 400, METRIC: 4.0})
    assert [row[METRIC] for row in file.rows() if METRIC in row] == [1, 2, 3, 4]
    assert RunRecord.load(run).values.tolist() == [1, 2, 3, 4]


def test_many_damaged_lines_are_counted() -> None:
    run = write_run(Path("run"), [1.0])
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b"x\n" * 6 + b"\n\n")
    assert "skipped 6 lines 3, 4, 5, …, which are cut" in RunRecord.load(run).skipped


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-1e999", b"null"])
def test_values_that_are_not_finite_are_none(value: bytes) -> None:
    run = write_run(Path("run"), [1.0])
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'{"env_step": 200, "eval/return_mean": ' + value + b"}\n")
    assert RunRecord.load(run).values.tolist() == [1] and not RunRecord.load(run).skipped
    assert invoke("watch", "run").exit_code == 0


def test_a_whole_line_without_an_end_counts() -> None:
    run = write_run(Path("run"), [1.0, 2.0])
    os.truncate(run / METRICS_FILE, (run / METRICS_FILE).stat().st_size - 1)
    assert RunRecord.load(run).values.tolist() == [1, 2]


def test_rows_without_a_counter_are_left_out() -> None:
    run = write_run(Path("run"), [1.0])
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'{"eval/return_mean": 7, "time_s": null}\n')
    assert RunRecord.load(run).values.tolist() == [1]
    for words in (("compare", "run"), ("report", "run"), ("watch", "run")):
        assert invoke(*words).exit_code == 0
    (run / METRICS_FILE).write_text('{"eval/return_mean": 7}\n')
    result = invoke("compare", "run")
    assert result.exit_code == 1 and "has env_step or train_iter" in result.output


def test_a_run_that_began_again_in_its_folder_counts_from_there() -> None:
    run = write_run(Path("run"), [1.0, 2.0, 3.0, 4.0])
    with (run / METRICS_FILE).open("ab") as file:
        file.write(b'{"env_step": 200, "eval/return_mean": 9}\n')
    record = RunRecord.load(run)
    assert record.at.tolist() == [100, 200, 200] and record.values.tolist() == [1, 2, 9]
    assert "2 evaluations of an earlier attempt" in record.skipped


def test_a_run_without_an_evaluation_is_left_out_of_its_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_run(Path("runs/whole"), [1.0])
    write_run(Path("runs/killed"), [])
    (Path("runs/killed") / METRICS_FILE).write_bytes(b'{"env_st')
    found = compare("runs")
    assert found.rows[0].n_runs == 1
    assert any("left out runs/killed has no values" in text for text in found.warnings)
    assert len(find_runs("runs")) == 1 and "runs/killed has no values" in caplog.text
    result = invoke("compare", "runs/killed")
    assert result.exit_code == 1 and "skipped line 1" in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"solved"', "5"])
def test_a_damaged_end_of_a_run_is_no_end(text: str) -> None:
    run = write_run(Path("run"), [1.0])
    (run / "final_ctx.json").write_text(text)
    result = invoke("watch", "run")
    assert result.exit_code == 0 and "running, or killed" in result.output


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"env: [", b"a: b: c"])
def test_damaged_settings_are_named(data: bytes) -> None:
    run = write_run(Path("run"), [1.0])
    (run / "config.yaml").write_bytes(data)
    for command in ("compare", "report", "play", "resume"):
        result = invoke(command, "run")
        assert result.exit_code == 1 and "run/config.yaml is not YAML" in " ".join(
            result.output.split()
        )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("runs/cartpole_dnq", "found no run in runs/cartpole_dnq; did you mean runs/cartpole_dqn?"),
        (
            "x=runs/cartpole_dnq",
            "found no run in runs/cartpole_dnq; did you mean runs/cartpole_dqn?",
        ),
        ("none/at/all", "found no run in none/at/all; a run's folder"),
        ("~nobody-here/runs", "found no run in ~nobody-here/runs"),
        ("x=", "name runs: a folder"),
        ("", "name runs: a folder"),
    ],
)
def test_an_unknown_run_is_answered_with_the_nearest(name: str, problem: str) -> None:
    write_run(Path("runs/cartpole_dqn"), [1.0])
    result = invoke("compare", name)
    assert result.exit_code == 1 and problem in " ".join(result.output.split())


@pytest.mark.parametrize("metric", ["return_mean", "eval/retrun_mean", "evl/return_mean"])
def test_an_unknown_metric_is_answered_with_the_nearest(metric: str) -> None:
    write_run(Path("runs/cartpole_dqn"), [1.0])
    result = invoke("compare", "runs", "--metric", metric)
    assert result.exit_code == 1
    assert "did you mean eval/return_mean?" in " ".join(result.output.split())


def test_runs_are_found_by_absolute_globs_and_in_folders_with_an_equals_sign() -> None:
    write_run(Path("runs/lr=0.1/seed-0"), [1.0])
    assert len(find_runs(str(Path("runs/*").absolute()))) == 1
    assert list(compare("runs/lr=0.1").sides) == ["runs/lr=0.1"]
    assert list(compare("low=runs/lr=0.1").sides) == ["low"]


def test_runs_on_both_sides_are_named() -> None:
    write_run(Path("runs/a"), [1.0])
    write_run(Path("runs/b"), [1.0])
    assert any("1 runs in common" in text for text in compare("runs", "runs/a").warnings)
