"""The command that makes docs/results.md, with programs that end at once."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.command_line import arguments_of
from dmiddleware.zoo import tuned
from middleware.programs.train import program_of
from tests.faults.process_cluster import alive
from tests.results import __main__ as results
from tests.results import bars, compare, ours, record, report, training
from tests.results.__main__ import all_entries, print_list, run
from tests.results.cases import CASES
from tests.results.entry import Entry
from tests.results.goals import Goal, goal_of
from tests.results.record import Record
from tests.results.training import TrainingError, train
from tests.variants import mostly_slow
from tests.waiting import wait_until

ENTRY = Entry("A section", "an algorithm", "Env-v0", "program", seeds=(0, 1), at_least=10)
SNAPSHOTS = Path("runs/results/program/0/snapshots")
GOAL_OF_TEN = ("--evaluator.stop-value", "10", "--evaluator.stop-evaluations", "2")
PROGRAM = """
import json, pathlib, sys

resumes = "--resume" in sys.argv
words = [word for word in sys.argv[1:] if word != "--resume"]
options = dict(zip(words[::2], words[1::2]))
folder = pathlib.Path("runs") / options["--exp-name"]
folder.mkdir(parents=True, exist_ok=resumes)
result = {
    "mean_return": 10.0 + int(options["--seed"]), "last_return": 9.0, "n_episode": 100,
    "env_step": 500, "train_iter": 50, "train_s": 2.5, "evaluations": [[0, 1.0], [500, 10.0]],
}
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def write_program(text: str) -> None:
    Path("program.py").write_text(text)


def write_snapshot() -> None:
    SNAPSHOTS.mkdir(parents=True)
    (SNAPSHOTS / "step_000000000007.safetensors").touch()


def some_record(seed: int, figure: float) -> Record:
    points = ((0, 1.0), (100 + seed, figure))
    return Record(seed, "python -m program", "abc", "2", figure, 8.0, 100, 500, 50, 2.5, points)


ENTRIES = sorted(all_entries(), key=lambda entry: entry.program)
FIRST = [at for at, one in enumerate(ENTRIES) if not at or one.program != ENTRIES[at - 1].program]


@pytest.mark.parametrize("entry", mostly_slow(ENTRIES, keep=FIRST), ids=lambda one: one.name)
def test_every_entry_names_a_program_that_exists(entry: Entry) -> None:
    if entry.is_in_zoo:
        env, *options = entry.options
        assert env in tuned(entry.program).entries, entry.command
        line = ("--config", f"zoo:{entry.program}/{env}", *options)
        arguments_of(program_of(entry.program), line)
        return
    assert importlib.util.find_spec(entry.program) is not None, entry.program
    if entry.program.startswith("examples."):
        arguments_of(importlib.import_module(entry.program).main, entry.options)


def test_the_commands_of_the_zoo_and_of_programs() -> None:
    zoo = replace(ENTRY, program="dqn", options=("ALE/Pong-v5", "--policy.compile"))
    assert zoo.command == "ditask train dqn ALE/Pong-v5 --policy.compile"
    assert zoo.name == "dqn_ALE_Pong_v5_policy_compile"
    assert replace(zoo, nodes=4).command == (
        "ditask --parallel-workers 4 train dqn ALE/Pong-v5 --policy.compile"
    )
    program = replace(ENTRY, program="examples.digits", options=("--seed", "3"))
    assert program.command == "python -m examples.digits --seed 3"
    assert replace(program, nodes=2).command == (
        "ditask --main examples.digits.main --parallel-workers 2 -- --seed 3"
    )


def test_every_module_with_entries_is_on_the_page() -> None:
    names = {path.stem for path in Path(results.__file__).parent.glob("[a-z]*.py")} - {
        "test_results"
    }
    modules = {importlib.import_module(f"tests.results.{name}") for name in names}
    assert {one for one in modules if hasattr(one, "ENTRIES")} == set(results.MODULES)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_training_is_recorded_with_what_its_run_folder_tells(jobs: int) -> None:
    write_program(PROGRAM)
    assert run([ENTRY], again=False, jobs=jobs) == []
    one = record.load("program", 1)
    assert one is not None
    assert (one.figure, one.last, one.env_step, one.train_s) == (11.0, 9.0, 500, 2.5)
    assert one.evaluations == ((0, 1.0), (500, 10.0))
    assert one.command == "python -m program --seed 1"


def test_a_training_with_a_record_is_not_repeated() -> None:
    write_program(PROGRAM)
    record.save("program", some_record(0, 3.0))
    run([ENTRY], again=False)
    kept, made = record.load("program", 0), record.load("program", 1)
    assert kept is not None
    assert made is not None
    assert (kept.figure, made.figure) == (3.0, 11.0)
    run([ENTRY], again=True)
    repeated = record.load("program", 0)
    assert repeated is not None
    assert repeated.figure == 10.0


def test_the_plan_has_measured_times_where_there_are_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured = replace(ENTRY, minutes=999)
    for seed, train_s in ((0, 3600), (1, 7200)):
        record.save(measured.name, replace(some_record(seed, 1.0), train_s=train_s))
    others = [replace(ENTRY, program="planned", minutes=60)]
    others.append(replace(ENTRY, program="distributed", minutes=60, nodes=4, seeds=(0,)))
    print_list([measured, *others], jobs=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "program: 2 of 90.0 min (measured); seeds with a record: 0, 1"
    assert lines[1] == "planned: 2 of 60.0 min (planned); seeds with a record: none"
    assert lines[-1] == "3.5 h in all, with 2 at a time"


def test_two_trainings_run_at_a_time() -> None:
    # Opening a pipe for reading waits for the process that opens it for writing, and vice versa.
    os.mkfifo("both")
    meet = "open('both', 'r' if options['--seed'] == '0' else 'w').close()\n"
    write_program(f"{PROGRAM}\nimport signal\nsignal.alarm(60)\n{meet}")
    assert run([ENTRY], again=False, jobs=2) == []


@pytest.mark.parametrize(("jobs", "n_threads"), [(1, "None"), (2, "1")])
def test_trainings_that_run_at_a_time_have_one_thread_each(
    jobs: int, n_threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    tell = "(folder / 'threads').write_text(str(os.environ.get('OMP_NUM_THREADS')))"
    write_program(f"{PROGRAM}\nimport os\n{tell}")
    run([ENTRY], again=False, jobs=jobs)
    assert Path("runs/results/program/1/threads").read_text() == n_threads


def test_what_an_interrupted_training_left_is_removed() -> None:
    write_program(PROGRAM)
    Path("runs/results/program/0").mkdir(parents=True)
    assert train(ENTRY, 0).figure == 10.0


def test_an_interrupted_training_with_a_snapshot_is_resumed() -> None:
    write_program(PROGRAM.replace("10.0 +", "(20.0 if resumes else 10.0) +"))
    SNAPSHOTS.mkdir(parents=True)
    assert train(ENTRY, 0).figure == 10.0  # the folder is empty
    write_snapshot()
    resumed = train(ENTRY, 0)
    assert (resumed.figure, resumed.resumed) == (20.0, True)
    assert not SNAPSHOTS.exists()
    write_snapshot()
    fresh = train(ENTRY, 0, again=True)
    assert (fresh.figure, fresh.resumed) == (10.0, False)
    assert not SNAPSHOTS.exists()


def test_a_resumed_training_that_fails_says_how_to_start_again() -> None:
    write_program("import sys; sys.exit('another chain')")
    write_snapshot()
    first, second = run([ENTRY], again=False)
    assert "--again starts from scratch" in first
    assert "--again" not in second


def test_a_printed_figure_is_read_from_the_output() -> None:
    write_program("print('lost 1,003 of many games')")
    entry = replace(ENTRY, printed=r"lost ([\d,]+) of", figure="games lost")
    assert train(entry, 0).figure == 1003.0


def test_the_mean_of_a_logged_figure_stands_on_the_page() -> None:
    log = "step 1: learn/lag 1.5, learn/lag_max 9\\nlearn/other 7\\nstep 2: learn/lag 2.5\\n"
    write_program(f"{PROGRAM}\n(folder / 'log.txt').write_text('{log}')")
    entry = replace(ENTRY, logged="learn/lag", seeds=(0,))
    run([entry], again=False)
    one = record.load(entry.name, 0)
    assert one is not None
    assert one.logged == 2.0
    page = report.render([entry], {entry.name: [one]}, {})
    assert "an algorithm, Env-v0: `learn/lag` was 2.0 on average." in page
    with pytest.raises(TrainingError, match=r"has no figure learn/la$"):
        train(replace(entry, logged="learn/la"), 1)


def test_a_training_without_a_log_fails_and_the_others_go_on() -> None:
    write_program(PROGRAM)
    failed = run([replace(ENTRY, logged="learn/lag")], again=False)
    assert len(failed) == len(ENTRY.seeds)
    assert all("has no figure learn/lag" in line for line in failed)


def test_a_logged_figure_may_have_thousands() -> None:
    write_program(f"{PROGRAM}\n(folder / 'log.txt').write_text('learn/lag 1,002.5, learn/n 3')")
    assert train(replace(ENTRY, logged="learn/lag"), 0).logged == 1002.5


def test_what_a_training_needs_is_made_before(tmp_path: Path) -> None:
    Path("maker.py").write_text("import sys; open(sys.argv[1], 'a').write('made')")
    write_program(PROGRAM + "\nassert open('data').read() == 'made'")
    entry = replace(ENTRY, prepare=("maker", "data"), prepare_minutes=120)
    assert train(entry, 0).figure == 10.0


def test_time_to_prepare_counts_once_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    both = [replace(ENTRY, program=name, minutes=60, prepare=("a",)) for name in "pq"]
    print_list([replace(entry, prepare_minutes=120) for entry in both], jobs=2)
    assert capsys.readouterr().out.splitlines()[-1] == "3.0 h in all, with 2 at a time"


def test_a_training_that_fails_has_no_record_and_the_others_go_on() -> None:
    write_program(PROGRAM + "\nsys.exit(3 if options['--seed'] == '0' else 0)")
    failed = run([ENTRY], again=False)
    assert len(failed) == 1
    assert "exit code 3" in failed[0]
    assert record.load("program", 0) is None
    assert record.load("program", 1) is not None


def test_a_training_that_tells_no_figure_fails() -> None:
    write_program("print('nothing')")
    with pytest.raises(TrainingError, match="does not tell its mean return"):
        train(ENTRY, 0)


@pytest.mark.process
def test_a_command_that_does_not_end_fails_at_its_deadline(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(TrainingError, match=r"has not ended in 0\.5 s"):
        training.run_command(command, tmp_path / "log", 0.5, {})


@pytest.mark.process
def test_processes_of_a_command_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import os, signal; print('started', os.getpid(), flush=True); signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    wait = subprocess.Popen.wait

    def wait_for_the_child(process: Any, timeout: float | None = None) -> int:
        if timeout is not None:
            wait_until(lambda: log.read_text().endswith("\n"), "the child", deadline_s=60)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_child)
    with pytest.raises(TrainingError):
        training.run_command([sys.executable, "-c", parent], log, 0.0, {})
    name, pid = log.read_text().split()
    assert name == "started"
    # Killed at once, but it ends a little later.
    wait_until(lambda: not alive(int(pid)), "the end of the child", deadline_s=10)


def test_the_page_tells_scores_with_intervals_best_policies_and_missed_bars() -> None:
    many = tuple((at, float(at)) for at in range(1, 20))
    records = {
        "program": [
            replace(some_record(0, 9.0), evaluations=(*many, (20, 2.0))),
            replace(some_record(1, 11.0), evaluations=(*many, (20, 12.5))),
        ]
    }
    page = report.render([ENTRY, replace(ENTRY, env="Other-v0", nodes=2)], records, {})
    row, other = (line for line in page.splitlines() if line.startswith("| an algorithm"))
    # The last two of twenty evaluations: 10.5 and 15.75.
    assert row.split(" | ")[4:7] == ["13.12 [10.5, 15.75] (10)", "≥ 10 **missed**", "2"]
    assert "an algorithm, 2 processes | Other-v0 |  | not run yet" in other
    assert "ditask --main program.main --parallel-workers 2" in page


@pytest.mark.parametrize(
    ("curves", "told"),
    [
        ([(1, 10, 10), (9, 9, 10, 10)], "2,000 to 3,000"),
        ([(1, 10, 10), (9, 10, 9, 10, 9)], "2,000 (1 of 2 seeds)"),
        ([(9, 9)], "not reached"),
        ([(12, 10)], "1,000"),
    ],
)
def test_of_a_training_with_a_goal_the_page_tells_the_steps_and_no_return(
    curves: list[tuple[float, ...]], told: str
) -> None:
    entry = Entry("A", "PPO", "Pendulum-v1", "ppo", ("Pendulum-v1", *GOAL_OF_TEN))
    records = [
        replace(
            some_record(seed, 123.0),
            evaluations=tuple((1000 * at, float(value)) for at, value in enumerate(values)),
        )
        for seed, values in enumerate(curves)
    ]
    page = report.render([entry], {entry.name: records}, {})
    (row,) = (line for line in page.splitlines() if line.startswith("| PPO"))
    assert row.split(" | ")[2:5] == ["≥ 10, 2 times in a row", told, ""]
    assert "123" not in row


def test_a_goal_is_that_of_the_program_and_the_options() -> None:
    names = {"examples.cartpole_dqn": 475.0, "examples.doorkey_rnd": 0.94, "examples.offline": None}
    for program, value in names.items():
        goal = goal_of(Entry("", "", "", program))
        assert (None if goal is None else goal.value) == value
    zoo = Entry("", "", "", "dqn", ("CartPole-v1", "--evaluator.stop-value", "100"))
    assert goal_of(zoo) == Goal(100.0, 3)
    assert goal_of(replace(zoo, program="sac", options=("Hopper-v5", "--policy.compile"))) is None


@pytest.mark.parametrize(("other", "is_missed"), [(9.0, False), (10.0, True), (11.0, True)])
def test_an_entry_may_have_to_beat_another(other: float, is_missed: bool) -> None:
    rival = replace(ENTRY, program="rival", algorithm="Cloning")
    entry = replace(ENTRY, at_least=None, beats=rival)
    records = {
        "program": [some_record(0, 8.0), some_record(1, 12.0)],
        "rival": [some_record(0, other)],
    }
    assert bool(bars.missed(entry, records)) is is_missed
    row = next(
        line for line in report.render([entry], records, {}).splitlines() if "Env-v0" in line
    )
    assert ("> Cloning **missed**" in row) is is_missed
    assert "> Cloning" in row


def test_a_bar_may_be_for_the_last_policy() -> None:
    entry = replace(ENTRY, at_least=8.0, at_most=8.0, of_last=True)
    assert bars.text(entry) == "= 8 (last policy)"
    assert not bars.missed(entry, {"program": [some_record(0, 100.0)]})
    assert bars.missed(replace(entry, of_last=False), {"program": [some_record(0, 100.0)]})


def test_the_curves_are_drawn_with_their_spread(tmp_path: Path) -> None:
    entries = [ENTRY, replace(ENTRY, env="Other-v0", program="other"), replace(ENTRY, program="no")]
    records = {
        "program": [some_record(0, 9.0), some_record(1, 11.0)],
        "other": [some_record(0, 9.0)],
    }
    path = tmp_path / "curves" / "a.png"
    assert report.draw_curves("A section", entries, records, path)
    assert path.stat().st_size > 5000
    assert not report.draw_curves("Nothing", entries[2:], records, tmp_path / "b.png")


def test_records_are_plain_json() -> None:
    record.save("program", some_record(0, 9.0))
    assert json.loads(record.path_of("program", 0).read_text())["figure"] == 9.0


def test_a_record_without_evaluations_has_no_score_and_the_page_says_so() -> None:
    page = report.render([ENTRY], {"program": [replace(some_record(0, 9.0), evaluations=())]}, {})
    assert "| not recorded (9) |" in page
    assert "an algorithm, Env-v0: the records have no evaluations during the training" in page


@pytest.mark.parametrize(
    ("ours", "is_visible", "is_missed"),
    [
        ((90.0, 91.0, 92.0), True, True),
        ((70.0, 95.0, 98.0), False, False),
        ((110.0, 111.0, 113.0), True, False),
    ],
)
def test_a_pair_is_missed_if_ours_is_lower_by_more_than_luck_makes_it(
    ours: tuple[float, ...], is_visible: bool, is_missed: bool
) -> None:
    pair = compare.PAIRS[0]
    records = {
        pair.ours.name: [some_record(seed, score) for seed, score in enumerate(ours)],
        pair.rival.name: [
            some_record(seed, score) for seed, score in enumerate((99.0, 100.0, 101.0))
        ],
    }
    found = compare.difference(pair.ours.env, *records.values())
    assert found is not None
    assert found.is_visible is is_visible
    assert bool(compare.missed([pair.ours.name], records)) is is_missed


@pytest.mark.parametrize("name", mostly_slow(sorted(ours.MAKERS), keep=[1]))  # DDPG
def test_our_side_makes_as_many_updates_as_the_other(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Episodes of an untrained policy are long.
    monkeypatch.setattr(ours, "Experiment", functools.partial(ours.Experiment, n_fresh_episode=3))
    case = CASES[name]
    options = {**case.options, "learning_starts": 200}
    networks = {**case.policy_kwargs, "net_arch": [8, 8]}
    if "n_quantiles" in networks:
        networks["n_quantiles"] = 5
    short = replace(
        case,
        env_step=600,
        options=options,
        policy_kwargs=networks,
        n_evaluations=2,
        n_episode=2,
        eval_env_num=2,
    )
    result = ours.train(name, short, 0, "short")
    n_step = ours.steps_of_a_rollout(case)
    assert 600 <= result.env_step < 600 + n_step
    # SB3's first update follows the rollout that goes beyond learning_starts.
    assert abs(result.train_iter - (result.env_step - 200)) <= n_step


@pytest.mark.parametrize(
    ("name", "n_evaluations"),
    [
        ("dqn_lunarlander", 15),
        ("c51_lunarlander", 15),
        ("qrdqn_lunarlander", 14),
        ("ddpg_pendulum", 4),
    ],
)
def test_the_last_policies_are_evaluated_on_our_side_too(name: str, n_evaluations: int) -> None:
    case = CASES[name]
    # Learning begins as soon as there is a batch, at the latest.
    n_updates = case.env_step - max(
        case.options["learning_starts"], case.options.get("batch_size", 0)
    )
    every = ours.updates_between_evaluations(case)
    rollout = ours.steps_of_a_rollout(case)
    assert (n_updates - rollout) // every == n_evaluations
    assert every % rollout == 0
    assert n_updates - n_evaluations * every < 0.06 * n_updates


def test_the_comparison_tells_figures_and_the_ratio_of_times() -> None:
    pair = compare.PAIRS[0]
    records = {
        pair.ours.name: [replace(some_record(0, 80.0), train_s=5.0)],
        pair.rival.name: [replace(some_record(0, 100.0), train_s=10.0)],
    }
    rows = [line for line in compare.table(records).splitlines() if "200,000" in line]
    assert "80 (80) | 100 (100) | -20 | any | stable-baselines3 | 1, 1 | 0.50" in rows[0]
    assert "not run yet | not run yet |  |  |" in rows[1]
    assert not compare.missed([pair.rival.name], records)  # a single seed shows nothing
