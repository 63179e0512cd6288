"""ditask resume continues a run with the program, the arguments and the state that it had."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dmiddleware.data import load_checkpoint
from dmiddleware.files.serialization import pack
from dmiddleware.launch.cli import ditask
from dmiddleware.runs.resuming import changed_settings, resume_words
from tests.warm_process import run_warm

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.middleware.resumable_program"


def run(folder: Path, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_warm([*map(str, words)], cwd=folder, env=environment, timeout=110)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a run has ended after 512 steps of an env."""
    folder = tmp_path_factory.mktemp("ended")
    run(folder, "-m", PROGRAM, "--policy.learning-rate", "2e-3")
    return folder


@pytest.fixture
def stopped(ended: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder."""
    return shutil.copytree(ended, tmp_path / "copy")


def resume(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "dmiddleware.launch", "resume", "runs/resumable", *words, check=check)


def final(folder: Path) -> Any:
    """Return the policy at the end of a run, in a form that can be compared."""
    state = load_checkpoint(folder / "runs" / "resumable" / "ckpt" / "final.safetensors")
    rest, tensors = pack(state)
    return rest, {name: one.tolist() for name, one in tensors.items()}


def final_step(folder: Path) -> int:
    state = load_checkpoint(folder / "runs/resumable/ckpt/final.safetensors")
    return int(state["last_step"])


@pytest.mark.process
def test_a_larger_budget_continues_exactly(stopped: Path) -> None:
    resume(stopped, "--", "--max-env-step", "1024")
    config = yaml.safe_load((stopped / "runs/resumable/config.yaml").read_text())
    assert config["arguments"]["max_env_step"] == 1024
    assert config["policy"]["learning_rate"] == 0.002
    assert [one.name for one in (stopped / "runs").iterdir()] == ["resumable"]
    resumed = final(stopped)
    shutil.rmtree(stopped / "runs")
    run(stopped, "-m", PROGRAM, "--policy.learning-rate", "2e-3", "--max-env-step", "1024")
    assert final(stopped) == resumed


@pytest.mark.process
def test_a_changed_setting_is_shown_and_must_be_accepted(stopped: Path) -> None:
    changed = ("--", "--max-env-step", "640", "--policy.batch-size", "8")
    before = (stopped / "runs/resumable/config.yaml").read_bytes()
    refused = resume(stopped, *changed, check=False)
    assert refused.returncode == 1
    assert "policy.batch_size: 16 -> 8" in refused.stdout
    assert "--accept-changes" in refused.stdout
    assert (stopped / "runs/resumable/config.yaml").read_bytes() == before
    accepted = resume(stopped, "--accept-changes", *changed)
    assert "policy.batch_size: 16 -> 8" in accepted.stdout


@pytest.mark.slow
@pytest.mark.process
def test_a_run_continues_in_as_many_processes_or_in_others_if_accepted(stopped: Path) -> None:
    roles = ("--roles", "learner=1,collector=1")
    refused = resume(stopped, *roles, "--", "--max-env-step", "1024", check=False)
    assert refused.returncode == 1
    assert "launch.roles: None -> learner=1,collector=1" in refused.stdout
    done = resume(stopped, "--accept-changes", *roles, "--", "--max-env-step", "1024")
    assert "resumed at step" in (stopped / "runs/resumable/log.txt").read_text(), done.stdout
    assert final_step(stopped) >= 1024
    done = resume(stopped, "--", "--max-env-step", "2048")
    assert final_step(stopped) >= 2048
    config = yaml.safe_load((stopped / "runs/resumable/config.yaml").read_text())
    assert config["launch"] == {"roles": "learner=1,collector=1"}
    snapshot = max((stopped / "runs/resumable/snapshots").glob("step_*"))
    assert load_checkpoint(snapshot)["roles"] == ["learner"]


@pytest.mark.process
def test_a_program_that_asks_for_no_snapshot_is_refused(stopped: Path) -> None:
    before = final(stopped)
    refused = resume(stopped, "--", "--no-asks", check=False)
    assert refused.returncode == 1 and "SnapshotSaver.resume" in refused.stdout
    assert final(stopped) == before


@pytest.mark.slow
@pytest.mark.process
def test_a_run_whose_snapshots_are_all_damaged_does_not_start_over(stopped: Path) -> None:
    for path in (stopped / "runs/resumable/snapshots").glob("step_*"):
        path.write_bytes(path.read_bytes()[:-9])
    refused = resume(stopped, check=False)
    assert refused.returncode == 1 and "no snapshot that can be read" in refused.stdout


def test_what_cannot_be_resumed_is_refused_in_words(tmp_path: Path) -> None:
    def refused() -> str:
        result = CliRunner().invoke(ditask, ["resume", str(tmp_path)])
        assert result.exit_code == 1
        return result.output

    assert "run_program" in refused()
    (tmp_path / "config.yaml").write_text("program: train.main\n")
    assert "SnapshotSaver" in refused()


def test_the_program_gets_its_arguments_and_those_that_differ(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("program: train.main\n")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "step_000000000008.safetensors").touch()
    config = f"{tmp_path}/config.yaml"
    assert resume_words(tmp_path, ["--roles", "learner=1"], ["--seed", "3"]) == [
        "--roles", "learner=1", "--main", "train.main", "--", "--config", config, "--seed", "3",
    ]  # fmt: skip


LAUNCH = {
    "roles": "learner=1,collector=2",
    "topology": "mesh",
    "resources": ["a:cpu=1", "b:cpu=2"],
    "ding": True,
}
WORDS = ["--ding", "--topology", "mesh", "--resources", "a:cpu=1", "--resources", "b:cpu=2"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), ["--roles", "learner=1,collector=2", *WORDS]),
        (("--roles", "learner=1"), [*WORDS, "--roles", "learner=1"]),
        (("--parallel-workers=1",), [*WORDS, "--parallel-workers=1"]),
        (("--resources", "c:cpu=3"),
         ["--roles", "learner=1,collector=2", "--ding", "--topology", "mesh",
          "--resources", "c:cpu=3"]),
    ],
)  # fmt: skip
def test_a_run_is_started_with_the_options_that_it_had_except_for_those_that_are_given(
    given: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"program": "a.main", "launch": LAUNCH}))
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "step_000000000008.safetensors").touch()
    found = resume_words(tmp_path, given, [])
    assert sorted(found[: found.index("--main")]) == sorted(words)


def chain(**limits: Any) -> dict[str, Any]:
    return {"seed": 1, "chain": [{"TerminationChecker": limits}], "versions": {"torch": "1"}}


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (chain(max_env_step=5), chain(max_env_step=9), []),
        (chain(max_env_step=5), chain(max_env_step=None), []),
        (chain(max_env_step=5), {**chain(max_env_step=5), "versions": {}}, []),
        (chain(max_env_step=5), chain(max_env_step=4),
         ["chain.1.TerminationChecker.max_env_step: 5 -> 4"]),
        (chain(), {**chain(), "seed": 2}, ["seed: 1 -> 2"]),
        ({"policy": {"lr": (1, 2)}}, {"policy": {"lr": [1, 2]}}, []),
        ({"policy": {"lr": 1}}, {}, ["policy.lr: 1 -> None"]),
        ({"launch": {"roles": "a=1", "topology": "star"}}, {"launch": {"roles": "a=2"}},
         ["launch.roles: a=1 -> a=2"]),
    ],
)  # fmt: skip
def test_changes_are_listed_except_for_larger_budgets(
    before: Any, now: Any, changes: list[str]
) -> None:
    assert changed_settings(before, now) == changes
