"""What ditask sweep refuses before anything starts, and the plan that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dmiddleware.errors import ConfigError, RegistryError, RunFolderError
from dmiddleware.launch.cli import ditask
from dmiddleware.sweep.new_sweep import SweepOrder, free_folder, make_sweep
from dmiddleware.sweep.sweep_plan import held, read_plan, state_of

PROGRAM = "tests.dmiddleware.sweep.swept_program"
MAIN = f"{PROGRAM}.main"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


def sweep(*words: str) -> Result:
    return CliRunner().invoke(ditask, ["sweep", *words], prog_name="ditask")


def order(*settings: str, program: str = MAIN, **given: object) -> SweepOrder:
    return SweepOrder(program, settings, Path(), "eval/return_mean", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "lerning_rate=1"), "did you mean learning_rate"),
        (("--set", "lr=1e-3,1e-4"), "unknown option; did you mean learning_rate"),
        (("--set", "policy.lr=1e-3,1e-4"), "unknown option; did you mean policy.learning_rate"),
        (("--set", "seed=0:2", "--", "--policy.lr", "1"), "did you mean --policy.learning-rate"),
        (("--set", "learning_rate=1e-3,-1"), "must be a positive number, got -1"),
        (("--set", "seed=0:2", "--parallel-workrs", "2"), "--parallel-workers"),
        (("--set", "seed=0:2", "--", "--n-evaluatio", "3"), "--n-evaluation"),
        (("--set", "seed=0:2", "--", "--help"), "it prints its help"),
        (("--set", "seed=0:2", "--trials", "3"), "--trials is for --sampler optuna"),
        (("--set", "seed=0:2", "--resume", "."), "--resume takes the settings of its plan"),
        ((), "--set learning_rate=1e-4,3e-4"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    refused = sweep("--main", MAIN, *words)
    assert refused.exit_code == 2
    assert message in " ".join(refused.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (f"{PROGRAM}.ambiguous", "name one of policy.learning_rate, other.learning_rate"),
        (f"{PROGRAM}.untyped", "no typed parameters"),
        (f"{PROGRAM}.mains", "has no function 'mains'"),
        ("tests.no_such_program.main", "found no module tests.no_such_program"),
    ],
)
def test_a_program_that_cannot_be_swept_is_refused(main: str, message: str, tmp_path: Path) -> None:
    refused = sweep("--main", main, "--set", "learning_rate=1")
    assert refused.exit_code == 2
    assert message in refused.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "dqn"), "name an algorithm and an env"),
        (("train", "dpn", "CartPole-v1", "--set", "seed=0:2"), "dqn"),
        (("train", "dqn", "CartPole-v1", "--set", "n_stp=1"), "did you mean n_step"),
        (
            ("train", "dqn", "CartPole-v1", "--set", "seed=1", "--", "--config", "x"),
            "cannot read x",
        ),
        (("--set", "seed=0:2"), "name a program with --main"),
    ],
)
def test_mistakes_with_the_zoo_are_refused_too(words: tuple[str, ...], message: str) -> None:
    refused = sweep(*words)
    assert refused.exit_code == 2
    assert message in refused.output


def test_the_plan_survives_and_names_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    made = make_sweep(
        order("learning_rate=1e-4,3e-4", "big=true,false", arguments=["--fails", "1"]), folder
    )
    assert read_plan(folder) == made
    runs = made.grid_runs(folder)
    assert runs[0].name == "learning_rate-1e-4_big-true"
    assert runs[3].words == ("--policy.learning-rate", "3e-4", "--policy.no-big")
    assert made.command(runs[0])[-5:] == ("--fails", "1", *runs[0].words)
    assert [state_of(run) for run in runs] == ["waiting"] * 4


def test_values_that_look_alike_in_a_folder_name_get_numbers(tmp_path: Path) -> None:
    program = "tests.dmiddleware.sweep.swept_program.named"
    made = make_sweep(order("name=a b,a/b", program=program), tmp_path / "a")
    assert [run.name for run in made.grid_runs(tmp_path)] == ["000_name-a-b", "001_name-a-b"]


def test_a_sweep_of_the_zoo_has_its_tuned_settings(tmp_path: Path) -> None:
    words = ("--config", "zoo:dqn/CartPole-v1", "--seed", "3")
    program = "middleware.programs.off_policy.off_policy"
    made = make_sweep(order("n_step=1,3", program=program, arguments=words), tmp_path / "a")
    assert made.arguments == words
    with pytest.raises(RegistryError, match="unknown algorithm"):
        make_sweep(
            order("n_step=1,3", program=program, arguments=("--config", "zoo:sarsa/CartPole-v1")),
            tmp_path / "b",
        )
    assert not (tmp_path / "b").exists()


def test_each_choice_is_checked_with_the_options_that_it_brings(tmp_path: Path) -> None:
    program = "tests.dmiddleware.sweep.swept_program.chosen"
    make_sweep(order("algo=a,b", "learning_rate=1e-3", program=program), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"--policy\.big"):
        make_sweep(order("algo=a,b", "big=true", program=program), tmp_path / "b")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    make_sweep(order("seed=0:2"), tmp_path / "a")
    with pytest.raises(RunFolderError, match="ditask sweep --resume"):
        make_sweep(order("seed=0:2"), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(RunFolderError, match="--output with another folder"):
        make_sweep(order("seed=0:2"), tmp_path / "b")


def test_a_new_sweep_gets_a_free_folder() -> None:
    made = order("seed=0:2", program="examples.cartpole_dqn.main")
    assert free_folder(made) == Path("sweeps/cartpole_dqn")
    Path("sweeps/cartpole_dqn").mkdir(parents=True)
    assert free_folder(made) == Path("sweeps/cartpole_dqn-2")
    named = order("seed=0:2", name="dqn-CartPole-v1")
    assert free_folder(named) == Path("sweeps/dqn-CartPole-v1")
    assert free_folder(order("seed=0:2", program="main")) == Path("sweeps/main")


def test_a_folder_without_a_plan_is_not_resumed(tmp_path: Path) -> None:
    refused = sweep("--resume", str(tmp_path))
    assert refused.exit_code == 2
    assert "is not the folder of a sweep" in refused.output


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    make_sweep(order("seed=0:2"), tmp_path / "a")
    with held(tmp_path / "a"):
        refused = sweep("--resume", str(tmp_path / "a"))
    assert refused.exit_code == 2
    assert "running already" in refused.output
