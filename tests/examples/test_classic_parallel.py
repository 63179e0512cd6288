"""The example of the classic parallel mode: over the router, and over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import DITASK
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ROLES = "coordinator=1,learner=1,collector=2"
# ditask loads what is imported here once, and not in each node.
PROGRAM = """
import torch
import dmiddleware.classic
import dmiddleware.worker

from examples import classic_parallel

def main():
    classic_parallel.main(seed={seed}, exp_name="exp", communication={how!r}, stop_value={stop})

if __name__ == "__main__":
    main()
"""


def trained_return(tmp_path: Path, how: str, *, seed: int, stop: float, timeout_s: float) -> float:
    """Run the example in a folder; return the mean return that it prints."""
    (tmp_path / "program.py").write_text(PROGRAM.format(seed=seed, how=how, stop=stop))
    command = (
        [*DITASK, "--main", "program.main", "--roles", ROLES]
        if how == "router"
        else [sys.executable, "program.py"]
    )
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (mean,) = re.findall(r"solved: mean return ([\d.]+) over 100", done.stdout)
    return float(mean)


@pytest.mark.process
@pytest.mark.parametrize("how", ["router", pytest.param("flask_fs", marks=pytest.mark.slow)])
def test_the_example_learns_in_four_processes(tmp_path: Path, how: str) -> None:
    # An untrained policy balances the pole for about 10 to 20 steps. The training ends when an
    # evaluation reaches 45; so early, the policy of a moment later may be worse again.
    trained_return(tmp_path, how, seed=1, stop=45, timeout_s=110)
    assert list((tmp_path / "exp").glob("ckpt*/*.safetensors"))
    assert not list((tmp_path / "exp").glob("data/**/*.safetensors*"))


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("how", ["router", "flask_fs"])
def test_the_example_solves_cartpole(tmp_path: Path, how: str, seed: int) -> None:
    assert trained_return(tmp_path, how, seed=seed, stop=499, timeout_s=380) >= 475


KILLABLE = """
import os
from pathlib import Path

from dmiddleware.pipeline import current_node
from examples import classic_parallel

def main():
    node = current_node().node_id
    Path(f"pid-{{node}}").write_text(str(os.getpid()))
    classic_parallel.main(seed={seed}, exp_name="exp", stop_value=499)
"""
COORDINATOR, LEARNER, COLLECTOR = 0, 1, 2


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_example_is_solved_although_each_role_is_killed(tmp_path: Path, seed: int) -> None:
    (tmp_path / "program.py").write_text(KILLABLE.format(seed=seed))
    log = tmp_path / "log"
    command = [*DITASK, "--main", "program.main", "--roles", ROLES, "--on-failure", "restart"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=env) as run,
    ):
        try:
            for role in (COLLECTOR, COORDINATOR, LEARNER):
                before = n_checkpoints(tmp_path)
                wait_until(
                    lambda n=before: n_checkpoints(tmp_path) > n or run.poll() is not None,
                    "a checkpoint",
                    deadline_s=120.0,
                )
                assert run.poll() is None, log.read_text()
                os.kill(int((tmp_path / f"pid-{role}").read_text()), signal.SIGKILL)
            code = run.wait(480)
        finally:
            run.kill()
    text = log.read_text()
    assert code == 0, text
    (mean,) = re.findall(r"solved: mean return ([\d.]+) over 100", text)
    assert float(mean) >= 475
    assert not list((tmp_path / "exp").glob("data/**/*.safetensors*"))
    assert not (tmp_path / "exp" / "coordinator.safetensors").exists()


def n_checkpoints(folder: Path) -> int:
    """Return how many checkpoints the learners have written."""
    return len(list((folder / "exp").glob("ckpt*/*.safetensors")))
