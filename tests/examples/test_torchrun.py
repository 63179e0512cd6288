"""The first example under torchrun: several ranks, several agents, and ranks that are killed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import load_checkpoint
from tests.examples.torchrun_process import run_agents, why_not

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(170),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is possible"),
]

# The last rank kills itself in a known step, once, after the first snapshot.
PROGRAM = """
import os
import signal
import sys
from pathlib import Path

from examples import cartpole_dqn as example
from middleware import ExperimentSettings

name, kills = sys.argv[1], sys.argv[2] == "killed"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def kill_last_rank(ctx):
    if kills and rank == size - 1 and ctx.total_step == 14 and not Path("was-killed").exists():
        Path("was-killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

class Task(example.Task):
    def __enter__(self):
        return super().__enter__().use(kill_last_rank)

example.Task = Task
short = ExperimentSettings(n_fresh_episode=2)
example.main(seed=1, exp_name=name, max_env_step=size * 3200, experiment=short)
"""


def train(folder: Path, name: str, what: str, *agents: list[str]) -> dict[str, Any]:
    """Run the program, and return its outcome."""
    (folder / "program.py").write_text(PROGRAM)
    commands = [[*agent, "program.py", name, what] for agent in agents]
    printed = run_agents(folder, *commands, timeout_s=280)
    assert printed.count("fresh episodes of the best policy, after") == 1, printed
    run = folder / "runs" / name
    log = (run / "log.txt").read_text()
    return {
        "resumed": re.findall(r"resumed at step (\d+)", log),
        "snapshots": sorted(path.name for path in (run / "snapshots").glob("step_*")),
        "counters": json.loads((run / "final_ctx.json").read_text()),
        "model": load_checkpoint(run / "ckpt" / "final.safetensors")["model"],
    }


def check_equal(killed: dict[str, Any], whole: dict[str, Any]) -> None:
    """Check that the run was resumed, and has the result of the undisturbed one."""
    assert (killed["resumed"], whole["resumed"]) == (["9"], [])
    assert killed["snapshots"] == whole["snapshots"]
    assert killed["counters"] == whole["counters"]
    torch.testing.assert_close(killed["model"], whole["model"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(["--nproc-per-node", "1"], id="one rank", marks=SLOW),
        pytest.param(["--nproc-per-node", "2"], id="two ranks", marks=SLOW),
        pytest.param(
            ["--nproc-per-node", "2", "--rdzv-backend", "static", "--master-port", "29500"],
            id="static rendezvous",
            marks=SLOW,
        ),
    ],
)
def test_a_run_with_a_killed_rank_equals_an_undisturbed_run(
    tmp_path: Path, agent: list[str]
) -> None:
    agent = [*agent, "--max-restarts", "1"]
    whole = train(tmp_path, "whole", "undisturbed", agent)
    killed = train(tmp_path, "killed", "killed", agent)
    assert (tmp_path / "was-killed").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["killed", "whole"]
    check_equal(killed, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_with_a_killed_rank_equal_one_agent_without(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "undisturbed", ["--nproc-per-node", "4"])
    agent = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-id", "run"]
    killed = train(tmp_path, "killed", "killed", agent, agent)
    assert (tmp_path / "was-killed").exists()
    assert {name.split(".")[1] for name in killed["snapshots"]} == {
        *("safetensors", "rank-1", "rank-2", "rank-3")
    }
    check_equal(killed, whole)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_first_example_is_solved_by_four_ranks(tmp_path: Path) -> None:
    agent = ["--nproc-per-node", "4", "-m", "examples.cartpole_dqn"]
    printed = run_agents(tmp_path, agent, timeout_s=1200)
    (mean,) = re.findall(r"mean return ([\d.]+) over 100 fresh episodes", printed)
    assert float(mean) >= 475
