"""Named parts of a chain in processes that ditask starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmiddleware import load_policy
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
            "learner=1,learner:blue=1,collector=2,evaluator:red=1",
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
    result = json.loads((run / "result.json").read_text())
    red = result["parts"]["red"]
    assert red["train_iter"] > 0
    assert len(red["evaluations"]) >= 2
    assert red["n_episode"] == 2
    # The blue one learns elsewhere, or here too.
    assert ("blue" in result["parts"]) == ("learner:blue" not in roles)
    for name in ("red", "blue"):
        assert load_policy(run, name=name)
    assert (run / "ckpt" / "red" / "best.safetensors").exists()
