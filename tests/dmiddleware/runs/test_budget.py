"""Runs of different lengths and grids, and the steps after which they reach a return."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.runs import Comparison, Reach, compare, write_report
from tests.dmiddleware.runs.written_runs import write_run


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ramp(
    n_steps: int, *, every: int = 100, per_step: float = 0.1, plus: float = 0.0
) -> list[float]:
    """Return evaluations that rise with the steps."""
    return [plus + per_step * at for at in range(every, n_steps + 1, every)]


def write_side(
    side: str, lengths: list[int], *, every: int = 100, task: str = "Toy-v0", rate: float = 0.1
) -> None:
    for seed, length in enumerate(lengths):
        values = ramp(length, every=every, per_step=rate, plus=seed)
        folder = Path(side, task.replace("/", "-"), f"seed-{seed}")
        write_run(folder, values, settings={"env": {"id": task}}, every=every)


def words_of(comparison: Comparison) -> str:
    return " ".join(str(comparison).split())


def test_the_same_learner_for_longer_is_not_better() -> None:
    write_side("short", [4000] * 3)
    write_side("long", [10_000] * 3)
    found = compare("short", "long")
    assert found.budgets["Toy-v0"].n_steps == 4000
    short, long = found.rows
    assert short.mean == long.mean and short.best == long.best
    assert short.n_steps == (4000, 4000) and long.n_steps == (10_000, 10_000)
    assert found.improvement["short", "long"].value == 0.5
    assert "have 4,000 to 10,000 env steps, and are compared at 4,000" in words_of(found)


def test_another_budget_can_be_named() -> None:
    write_side("short", [4000] * 3)
    write_side("long", [10_000] * 3)
    assert compare("short", "long", at=2000).rows[1].best == pytest.approx(201)
    found = compare("short", "long", at=1e4)
    assert found.rows[1].best == pytest.approx(1001)
    assert "3 of 6 runs ended before 10,000 env steps" in words_of(found)


def test_each_side_has_the_steps_of_its_shortest_and_longest_run() -> None:
    write_side("a", [1000, 3000])
    assert compare("a").rows[0].n_steps == (1000, 3000)
    assert "1,000 to 3,000 env steps" in str(compare("a"))


def test_lengths_that_differ_by_a_batch_are_equal() -> None:
    for side, every in (("a", 1000), ("b", 1008)):
        write_run(Path(side), ramp(10 * every, every=every), every=every)
    found = compare("a", "b")
    assert found.rows[1].best == pytest.approx(1008)
    assert not [text for text in found.warnings if "compared at" in text or "apart" in text]


def test_steps_after_the_last_evaluation_count_for_the_length() -> None:
    run = write_run(Path("a"), ramp(1000))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_step": 1900, "learn/total_loss": 1.0}\n')
    assert compare("a").rows[0].n_steps == (1900, 1900)


def test_each_task_has_its_own_budget() -> None:
    for side, factor in (("a", 1), ("b", 2)):
        write_side(side, [1000 * factor], task="X")
        write_side(side, [5000 * factor], task="Y")
    found = compare("a", "b")
    assert {task: budget.n_steps for task, budget in found.budgets.items()} == {
        "X": 1000,
        "Y": 5000,
    }


def test_grids_that_differ_are_named() -> None:
    write_side("a", [4000] * 2, every=100)
    write_side("b", [4000] * 2, every=500)
    assert "evaluations are 100 to 500 env steps apart" in words_of(compare("a", "b"))
    assert "apart" not in words_of(compare("a", "same=a"))


def test_a_run_without_an_evaluation_in_the_budget_is_named() -> None:
    write_side("a", [4000] * 2, every=1000)
    with pytest.raises(
        RunFolderError, match=r"seed-0 has no evaluation in its first 500 env steps"
    ):
        compare("a", at=500)


def test_runs_over_steps_and_over_updates_are_taken_to_their_ends() -> None:
    write_run(Path("a"), ramp(500))
    write_run(Path("b"), ramp(9000), axis="train_iter")
    found = compare("a", "b")
    assert [row.best for row in found.rows] == [50, 900]
    assert "some runs count env steps and others updates" in words_of(found)


@pytest.mark.parametrize("option", ["at", "reach"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "many"])
def test_budgets_and_returns_are_finite_numbers(option: str, value: float) -> None:
    write_run(Path("a"), ramp(500))
    with pytest.raises(ConfigError, match=option):
        compare("a", **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -5])
def test_a_budget_is_positive(value: float) -> None:
    write_run(Path("a"), ramp(500))
    with pytest.raises(ConfigError, match="at must be a positive number"):
        compare("a", at=value)


def test_runs_that_never_reach_a_return_count_as_such() -> None:
    for seed, top in enumerate((50.0, 50.0, 10.0)):
        write_run(Path("a", str(seed)), [min(top, 10.0 * n) for n in range(1, 11)])
    write_run(Path("b", "0"), [10.0 * n for n in range(1, 11)])
    found = compare("a", "b", reach=50)
    a, b = found.reaches
    assert a.steps == [500, 500, math.inf] and a.n_reached == 2 and a.median.value == 500
    assert a.median.high == math.inf and a.budget == 1000
    assert b.steps == [500] and b.n_reached == 1
    text = words_of(found)
    assert "Steps to eval/return_mean of 50" in text and "never" in text
    assert "reaches 50 sooner" in text


def test_a_side_that_mostly_fails_has_no_median() -> None:
    for seed, top in enumerate((50.0, 10.0, 10.0)):
        write_run(Path("a", str(seed)), [min(top, 10.0 * n) for n in range(1, 11)])
    (a,) = compare("a", reach=50).reaches
    assert a.median.value == math.inf and a.n_reached == 1
    (never,) = compare("a", reach=500).reaches
    assert never.n_reached == 0 and never.median == (math.inf, math.inf, math.inf)


def reach_of(*, reach: float, at: float | None = None) -> dict[str, Reach]:
    return {row.side: row for row in compare("a", "b", reach=reach, at=at).reaches}


def test_a_run_that_ended_because_it_reached_the_return_shortens_no_other() -> None:
    write_side("a", [500, 500])  # reached 50, and stopped
    write_side("b", [2000, 2000], rate=0.03)
    found = reach_of(reach=50)
    assert found["a"].steps == [500, 500] and found["b"].steps == [1700, 1700]


def test_what_comes_after_the_budget_of_a_run_that_failed_does_not_count() -> None:
    write_side("a", [1000, 1000], rate=0.03)  # ended at 30 and 31
    write_side("b", [2000, 2000], rate=0.03)
    found = reach_of(reach=40)
    assert found["b"].steps == [math.inf, math.inf] and found["b"].budget == 1000
    assert reach_of(reach=40, at=1500)["b"].steps == [1400, 1300]


def test_a_run_never_reaches_a_return_within_more_steps_than_it_had() -> None:
    write_side("a", [1000, 1200], rate=0.03)  # ended at 30 and 37
    write_side("b", [2000, 2000], rate=0.03)
    found = reach_of(reach=40, at=1500)
    assert found["a"].steps == [math.inf, math.inf] and found["a"].budget == 1000
    assert found["b"].budget == 1500
    assert reach_of(reach=400, at=50_000)["b"].budget == 2000


def test_scores_of_several_tasks_are_not_pooled_without_reference_scores() -> None:
    write_side("a", [1000, 1000], task="X")
    write_side("a", [1000, 1000], task="Y", rate=5.0)
    found = compare("a")
    assert found.overall == [] and "--reference FILE" in words_of(found)
    assert [axes.get_title() for axes in found.figure().axes] == ["X", "Y"]


def test_reference_scores_give_means_and_profiles_over_tasks() -> None:
    write_side("a", [1000, 1000], task="X")  # scores 100 and 101
    write_side("a", [1000, 1000], task="Y", rate=5.0)  # 5000 and 5001
    write_side("b", [1000, 1000], task="X", rate=0.2)  # 200 and 201
    write_side("b", [1000, 1000], task="Y", rate=5.0)
    scores = {"X": (0.5, 200.5), "Y": [5000.5, 5010.5], "Z": (0, 1)}
    found = compare("a", "b", reference=scores)
    assert [row.mean.value for row in found.overall] == pytest.approx([0.25, 0.5])
    assert found.overall[0].tasks == ["X", "Y"]
    assert "performance profile" in [axes.get_title() for axes in found.figure().axes]
    Path("scores.yaml").write_text("X: [0.5, 200.5]\nY: [5000.5, 5.0105e3]\n")
    assert compare("a", "b", reference="scores.yaml").overall == found.overall


def test_the_zoo_has_reference_scores() -> None:
    write_side("a", [1000, 1000], task="CartPole-v1")
    write_side("a", [1000, 1000], task="Pendulum-v1")
    (row,) = compare("a", reference="zoo").overall
    assert row.tasks == ["CartPole-v1", "Pendulum-v1"]


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ("Toy-v1: [0, 1]", "has no scores of Toy-v0; did you mean Toy-v1?"),
        ("Toy-v0: 5", "Toy-v0 has 5; write a line"),
        ("Toy-v0: '12'", "Toy-v0 has '12'; write a line"),
        ("Toy-v0: [1]", "write a line for each task"),
        ("Toy-v0: [2, 2]", "two different finite numbers"),
        ("Toy-v0: [0, .nan]", "two different finite numbers"),
        ("[1, 2]", "has no tasks"),
        ("a: [", "is not YAML"),
    ],
)
def test_reference_scores_are_checked(scores: str, problem: str) -> None:
    write_side("a", [1000])
    Path("scores.yaml").write_text(scores)
    result = CliRunner().invoke(ditask, ["compare", "a", "--reference", "scores.yaml"])
    assert result.exit_code == 1 and problem in " ".join(result.output.split())


def test_a_reference_that_is_no_file_is_refused() -> None:
    write_side("a", [1000])
    with pytest.raises(ConfigError, match=r"No such file.*or zoo"):
        compare("a", reference="zo")


def test_games_are_tasks_of_their_own() -> None:
    for game in ("ALE/Pong-v5", "ALE/Breakout-v5"):
        env = {"id": "dmiddleware.env:make_atari_env", "env_kwargs": {"game": game}}
        write_run(Path("a", game), ramp(500), settings={"env": env})
    assert [row.task for row in compare("a").rows] == ["ALE/Breakout-v5", "ALE/Pong-v5"]


def test_the_last_line_says_what_the_runs_can_show() -> None:
    for side, plus in (("a", 0.0), ("b", 1.0)):
        for seed in range(4):
            write_run(Path(side, str(seed)), [plus + 10.0 * seed])
    found = compare("a", "b")
    (difference,) = found.differences
    assert difference.n_needed is not None and difference.n_needed > 1000
    last = str(found).splitlines()[-2:]
    text = " ".join(last)
    assert "they differ by 1, which may be luck" in text
    assert f"about {difference.n_needed:,} runs on each side would show" in text
    assert f"can show a difference of {difference.detectable:.4g} or more" in " ".join(
        found.conclusion.split()
    )


def test_the_last_line_about_single_runs_asks_for_more() -> None:
    for side in ("a", "b"):
        write_run(Path(side), ramp(500))
    assert "run at least 3 on each" in compare("a", "b").conclusion


def test_the_command_takes_the_options() -> None:
    write_side("a", [1000, 1000])
    write_side("b", [4000, 4000])
    words = ["a", "b", "--at", "1e3", "--reach", "90", "--reference", "scores.yaml"]
    Path("scores.yaml").write_text("Toy-v0: [0, 100]")
    for command, output in (("compare", ()), ("report", ("--output", "page.html"))):
        result = CliRunner().invoke(ditask, [command, *words, *output])
        assert result.exit_code == 0, result.output
    page = Path("page.html").read_text()
    for text in ("Steps to eval/return_mean of 90", "Scores over tasks", "can show a difference"):
        assert text in page


def test_steps_and_updates_until_a_return_are_not_compared() -> None:
    write_run(Path("a"), ramp(500))
    write_run(Path("b"), ramp(9000), axis="train_iter")
    comparison = compare("a", "b", reach=30)
    text = words_of(comparison)
    assert not comparison.reaches
    assert "sooner" not in text and "steps until a return cannot be compared" in text
    (lengths,) = [rows for title, _, rows in comparison.tables() if "last tenth" in title]
    assert [row[3] for row in lengths] == ["500 env steps", "9,000 updates"]


def test_a_report_says_which_scores_are_those_of_whole_runs() -> None:
    write_run(Path("a"), ramp(1000))
    write_report("report.html", "a", at=500)
    page = Path("report.html").read_text()
    assert "score at its end" in page
