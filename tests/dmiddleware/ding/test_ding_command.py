"""``ditask ding``, ``ditask --ding`` and ``ditask classic``: programs of DI-engine's style."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from dmiddleware.launch.early_imports import early_imports
from tests.dmiddleware.launch.ditask_process import DITASK, start

# With an env in a process of its own, which finds the old gym, too.
PROGRAM = """
    import os, sys
    import gym
    import beside
    from ding import __version__
    from dizoo.cartpole import NAME
    from dmiddleware.env import AsyncEnvManager

    def make():
        import gymnasium
        gym.make(NAME).close()
        return gymnasium.make("CartPole-v1")

    class Kept:
        pass

    if __name__ == "__main__":
        print("argv", sys.argv)
        print("beside", beside.__name__, os.path.samefile(sys.path[0], os.path.dirname(__file__)))
        env = gym.make(NAME)
        print("env", env.reset().shape, len(env.step(0)), __version__)
        with AsyncEnvManager([make]) as envs:
            print("envs", envs.env_num, sys.modules["__main__"].Kept is Kept)
        if "--fail" in sys.argv:
            raise ValueError("as asked")
"""

# Roles the reverse way: the launcher would have made node 1 the collector and node 2 the evaluator.
RUN = """
    import gym
    from ding import __version__
    from dmiddleware import Context, Task, middleware

    def main():
        env = gym.make("CartPole-v0")
        heard = set()
        with Task(Context()) as task:
            node_id = task.router.node_id
            task.add_role(["learner", "evaluator", "collector"][node_id])

            def work(role):
                @middleware(roles=[role])
                def part(ctx):
                    if ctx.total_step == 0:
                        print("part", role, "env", env.reset().shape, flush=True)
                        if role != "learner":
                            ctx.task.emit("stepped", role, only_remote=True)
                    if role == "learner" and len(heard) == 2:
                        ctx.task.stop("heard both")
                return part

            task.on("stepped", heard.add)
            for role in ("learner", "collector", "evaluator"):
                task.use(work(role))
            task.run()
        if node_id == 1:
            raise ValueError("nothing to evaluate")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return the folder of a checkout, with a program three folders below."""
    (tmp_path / "dizoo").mkdir()
    (tmp_path / "dizoo" / "cartpole.py").write_text('NAME = "CartPole-v0"\n')
    folder = tmp_path / "ding" / "example"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("")
    (folder / "dqn.py").write_text(textwrap.dedent(PROGRAM))
    (folder / "parallel.py").write_text(textwrap.dedent(RUN))
    return tmp_path


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [*DITASK, "ding", *words]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_program_runs_as_python_runs_it(checkout: Path) -> None:
    done = call(checkout, "ding/example/dqn.py", "--seed", "3", "--fail")
    assert done.stdout.splitlines() == [
        "argv ['ding/example/dqn.py', '--seed', '3', '--fail']",
        "beside beside True",
        "env (4,) 4 v0.5.3",
        "envs 1 True",
    ], done.stderr
    assert done.returncode == 1
    first, second, *_, last = done.stderr.splitlines()[-4:]
    assert first == "Traceback (most recent call last):"
    assert second.startswith(f'  File "{checkout}/ding/example/dqn.py", line ')
    assert last == "ValueError: as asked"


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_module_runs_as_python_runs_it(checkout: Path) -> None:
    (checkout / "ding" / "example" / "small.py").write_text(
        "import sys, gym\nprint(__name__, sys.argv[1:], gym.__name__)\n"
    )
    done = call(checkout, "-m", "ding.example.small", "-m", "serial")
    assert done.stdout == "__main__ ['-m', 'serial'] gym\n", done.stderr


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test run commands that change the process in this one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield
    from dmiddleware.ding import close_door

    close_door()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "found no file nowhere.py"),
        (["folder"], "folder is a folder"),
        (["config.yaml"], "config.yaml is not a program in Python: invalid syntax"),
        (["picture.png"], "picture.png is not a program in Python"),
        (["-m", "serial", "-c", "config.py"], "ditask classic -c FILE"),
        (["-m", "ding.policies"], "ding.policies of DI-engine is not here"),
        (["-m", "ding.nowhere.dqn"], "ding.nowhere of DI-engine is not here"),
    ],
)
def test_what_is_no_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("config.yaml").write_text("env: a b\n")
    Path("picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    result = CliRunner().invoke(ditask, ["ding", *words])
    assert result.exit_code == 1 and result.output.startswith("Error: ")
    assert message in result.output


@pytest.mark.usefixtures("untouched")
def test_a_missing_dizoo_is_explained(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import dizoo.classic_control\n")
    result = CliRunner().invoke(ditask, ["ding", str(program)])
    assert result.exit_code == 1
    assert "put the checkout on PYTHONPATH" in result.output


@pytest.mark.process
@pytest.mark.timeout(120)
def test_three_nodes_have_the_roles_that_the_program_gives_to_them(checkout: Path) -> None:
    # Node 2 has a variable of its own, so it is started; the others are forked.
    options = ("--ding", "--main", "ding.example.parallel.main", "--parallel-workers", "3")
    env = {"PYTHONWARNINGS": "ignore"}
    with start(checkout, *options, "--env", "2:A=1", env=env) as launcher:
        text, _ = launcher.communicate(timeout=100)
    parts = sorted(line for line in text.splitlines() if "] part " in line)
    assert parts == [
        "[node 0] part learner env (4,)",
        "[node 1] part evaluator env (4,)",
        "[node 2] part collector env (4,)",
    ], text
    assert launcher.returncode == 1
    failure = "the run failed: node 1 (evaluator) failed: ValueError: nothing to evaluate"
    assert failure in text.splitlines()[-1]


def test_a_checkout_of_di_engine_is_not_imported_early(checkout: Path) -> None:
    (checkout / "ding" / "__init__.py").write_text("import os\nos.environ['A'] = '1'\n")
    (checkout / "ding" / "policy.py").write_text("import torchvision\n")
    program = checkout / "ding" / "example" / "dqn.py"
    program.write_text("import torch, gym\nfrom ding.policy import DQNPolicy\n")
    names = early_imports("ding.example.dqn.main", checkout, ding=True)
    assert names == ["dmiddleware.ding", "ding.policy", "ding.policy.DQNPolicy", "gym", "torch"]
    program.write_text("import os, torch\nos.environ['A'] = '1'\n")
    assert early_imports("ding.example.dqn.main", checkout, ding=True) == []


@pytest.mark.usefixtures("untouched")
def test_a_config_gets_what_it_imports_from_di_engine(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkout / "config.py"
    config.write_text(
        "import gym\nfrom ding import __version__\nfrom dizoo.cartpole import NAME\n"
        "main_config = dict(exp_name=NAME, env={}, policy={})\n"
        "create_config = dict(env=dict(type='cartpole'), policy=dict(type=NAME))\n"
    )
    monkeypatch.chdir(checkout)
    result = CliRunner().invoke(ditask, ["classic", "-c", str(config)])
    # It was read: the error is about what it says.
    assert result.exit_code == 1 and "policy" in result.output, result.output
    assert "CartPole-v0" in result.output
    config.write_text("from ding.config import compile_cfg\n")
    result = CliRunner().invoke(ditask, ["classic", "-c", str(config)])
    assert result.exit_code == 1
    assert "ding.config.compile_cfg of DI-engine is not here" in result.output
