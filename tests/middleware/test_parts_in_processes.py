"""Named parts of a chain in processes that ditask starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dmiddleware import load_policy
from dmiddleware.launch.cli import ditask as commands
from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.parametrize(
    "roles",
    mostly_slow(
        [
            "learner:red=1,learner:blue=1,collector=1,evaluator=1",
            "learner=1,collector:red=1,collector:blue=1,evaluator=1",
            "learner=1,learner:blue=1,collector=2,evaluator:red=1,evaluator:blue=1",
        ],
        keep=[0],
    ),
)
def test_two_policies_learn_in_one_run_of_several_processes(tmp_path: Path, roles: str) -> None:
    program = "tests.middleware.parts_program.main"
    with start(tmp_path, "--package", str(ROOT), "--main", program, "--roles", roles) as ditask:
        output, _ = ditask.communicate(timeout=120)
    assert ditask.returncode == 0, output
    assert "has reached stop_value 0" in output
    run = tmp_path / "runs" / "parts"
    result = outcome(run)
    red = result["parts"]["red"]
    assert red["train_iter"] > 0
    assert len(red["evaluations"]) >= 2
    assert red["n_episode"] == 2
    # The blue one learns elsewhere, or here too.
    is_alone = "learner:blue" in roles
    assert ("blue" in result["parts"]) != is_alone
    assert list((run / "snapshots").glob("step_*"))
    assert list((run / "snapshots").glob("blue/step_*")) or not is_alone
    if is_alone:
        result = outcome(run, node=1)
        assert result["parts"].keys() == {"blue"}
    assert result["parts"]["blue"]["n_episode"] == 2
    for name in ("red", "blue"):
        assert load_policy(run, name=name)
    assert (run / "ckpt" / "red" / "best.safetensors").exists()
    if not roles.startswith("learner=1,learner:blue"):
        return
    checkpoint = str(run / "ckpt" / "blue" / "final.safetensors")
    assert CliRunner().invoke(commands, ["export", checkpoint, "--format", "torch"]).exit_code == 0
    assert "2 fresh episodes" in (run / "export" / "blue" / "README.md").read_text()
    with start(tmp_path, "resume", "runs/parts") as ditask:
        output, _ = ditask.communicate(timeout=120)
    assert ditask.returncode == 0, output
    resumed = {**outcome(run)["parts"], **outcome(run, node=1)["parts"]}
    for name, before in {"red": red, **result["parts"]}.items():
        assert resumed[name]["train_iter"] >= before["train_iter"] > 0


def outcome(run: Path, *, node: int = 0) -> Any:
    """Return the result that a node has written."""
    return json.loads((run / f"result{f'.node-{node}' if node else ''}.json").read_text())
