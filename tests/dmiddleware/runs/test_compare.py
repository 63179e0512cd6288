"""Reading runs, and comparing them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread

from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.runs.compare import compare
from dmiddleware.runs.record import RunRecord, find_runs
from tests.dmiddleware.runs.written_runs import write_run


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_sides(*, tops: tuple[float, float] = (10.0, 20.0), n_runs: int = 4) -> None:
    for side, top in zip("ab", tops, strict=True):
        for seed in range(n_runs):
            returns = [top * at / 20 + seed for at in range(1, 21)]
            policy = {"learning_rate": top, "seed": seed}
            settings = {"seed": seed, "env": {"id": "Toy-v0"}, "policy": policy}
            write_run(Path("runs", side, f"seed-{seed}"), returns, settings=settings)


def test_the_score_is_the_mean_of_the_last_tenth_of_the_evaluations() -> None:
    run = RunRecord.load(write_run(Path("run"), [*range(24), 60.0]))
    assert run.score == (22 + 23 + 60) / 3
    assert run.best == 60
    assert run.axis == "env_step" and run.at[-1] == 2500
    assert RunRecord.load(write_run(Path("short"), [7.0])).score == 7


def test_values_that_were_not_finite_are_left_out() -> None:
    run = RunRecord.load(write_run(Path("run"), [1.0, None, 3.0]))
    assert run.values.tolist() == [1, 3] and run.at.tolist() == [100, 300]


def test_an_offline_run_is_over_updates() -> None:
    assert RunRecord.load(write_run(Path("run"), [1.0], axis="train_iter")).axis == "train_iter"


def test_another_metric_can_be_read() -> None:
    run = RunRecord.load(write_run(Path("run"), [1.0, 2.0]), "learn/total_loss")
    assert run.values.tolist() == [0.5, 0.5]


def test_an_unknown_metric_is_refused_with_those_that_there_are() -> None:
    write_run(Path("run"), [1.0])
    with pytest.raises(RunFolderError, match=r"loss; it has: eval/return_mean, learn/total_loss$"):
        RunRecord.load("run", "loss")


@pytest.mark.parametrize("pattern", ["runs", "runs/a", "runs/*", "runs/a/seed-*", "./runs/../runs"])
def test_runs_are_found_in_folders_and_by_globs(pattern: str) -> None:
    write_sides(n_runs=2)
    assert len(find_runs(pattern)) == (
        4 if pattern.endswith(("runs", "*")) and "a" not in pattern else 2
    )


@pytest.mark.parametrize("pattern", ["none", "runs/[", "runs/c*"])
def test_a_pattern_without_runs_is_refused(pattern: str) -> None:
    write_sides(n_runs=1)
    with pytest.raises(RunFolderError, match=r"found no run in .*metrics.jsonl"):
        find_runs(pattern)


def test_each_side_has_its_scores_with_intervals() -> None:
    write_sides()
    found = compare("runs/a", "better=runs/b")
    assert [(row.task, row.side, row.n_runs) for row in found.rows] == [
        ("Toy-v0", "runs/a", 4),
        ("Toy-v0", "better", 4),
    ]
    low, high = found.rows
    assert low.mean.value == pytest.approx(9.75 + 1.5) and high.mean.value == pytest.approx(21.0)
    assert low.mean.low < low.mean.value < low.mean.high < high.mean.low
    assert low.best == pytest.approx(11.5)
    assert found.improvement["runs/a", "better"].value == 0
    (difference,) = found.differences
    assert (difference.side, difference.than) == ("runs/a", "better")
    assert difference.value.value == pytest.approx(-9.75) and difference.is_visible
    text = str(found)
    assert "11.25 [" in text and "(11.5)" in text and "Toy-v0" in text


def test_settings_that_differ_are_listed_except_for_seeds() -> None:
    write_sides()
    assert compare("runs/a", "runs/b").settings == {"policy.learning_rate": [[10.0], [20.0]]}
    assert compare("runs").settings == {"policy.learning_rate": [[10.0, 20.0]]}


def test_a_setting_that_one_side_lacks_differs() -> None:
    write_run(Path("a"), [1.0], settings={"chain": [{"Learner": {"n": 1}}]})
    write_run(Path("b"), [1.0], settings={"chain": [{"Learner": {}}]})
    write_run(Path("c"), [1.0])
    assert compare("a", "b", "c").settings == {"chain.1.Learner.n": [[1], [None], [None]]}


def test_sides_are_compared_in_the_tasks_that_both_have() -> None:
    for side, tasks in (("a", ("X", "Y")), ("b", ("Y", "Z"))):
        for task in tasks:
            for seed in range(2):
                returns = [5.0 if side == "a" else 3.0]
                write_run(Path(side, task, str(seed)), returns, settings={"env": {"id": task}})
    found = compare("a", "b")
    assert [(row.task, row.side) for row in found.rows] == [
        ("X", "a"), ("Y", "a"), ("Y", "b"), ("Z", "b"),
    ]  # fmt: skip
    assert found.improvement["a", "b"].value == 1


def test_a_single_run_has_no_interval_and_a_warning() -> None:
    write_sides(n_runs=1)
    text = str(compare("runs/a", "runs/b"))
    assert "[" not in text and "run other seeds" in text


def test_two_sides_of_one_name_are_refused() -> None:
    write_sides(n_runs=1)
    with pytest.raises(ConfigError, match="two sides have the name a; write NAME=runs/b"):
        compare("a=runs/a", "a=runs/b")


@pytest.mark.parametrize("n_runs", [1, 3])
def test_the_picture_has_a_curve_for_each_side(n_runs: int) -> None:
    write_sides(n_runs=n_runs)
    compare("runs/a", "runs/b").draw("out.png")
    picture = imread("out.png")[..., :3]
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):
        close = abs(picture * 255 - color).max(-1) < 3
        left, right = close[:, : close.shape[1] // 2], close[:, close.shape[1] // 2 :]
        assert left.sum() > 100 and right.sum() > 100


def ditask_compare(*arguments: str) -> Result:
    return CliRunner().invoke(ditask, ["compare", *arguments])


def test_the_command_prints_the_tables_and_writes_the_picture() -> None:
    write_sides()
    result = ditask_compare("runs/a", "high=runs/b", "--output", "out.svg")
    assert result.exit_code == 0, result.output
    assert "high" in result.output and "policy.learning_rate" in result.output
    assert "wrote out.svg" in result.output and Path("out.svg").read_text().count("<path") > 10


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing argument '[NAME=]RUNS...'"),
        (["none"], "found no run in none"),
        (["runs/a", "--metric", "loss"], "has no values of loss"),
        (["runs/a", "--output", "none/out.png"], "No such file or directory"),
        (["runs/a", "--output", "out.docx"], "'docx' is not supported"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], problem: str) -> None:
    write_sides(n_runs=1)
    result = ditask_compare(*arguments)
    assert result.exit_code in (1, 2) and problem in result.output
    assert "Traceback" not in result.output


def test_the_help_of_ditask_names_the_command() -> None:
    result = CliRunner().invoke(ditask, ["--help"])
    assert "ditask compare RUNS" in result.output
