"""Programs that train while their module is imported are refused, and never train twice."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PARTS = """
    import os
    from pathlib import Path
    import gymnasium as gym
    import numpy as np
    from dmiddleware import Context, Task
    from dmiddleware.env import make_env_manager

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, True, {}

    def train(env_fn=None, max_step=2):
        Path(f"trained.{os.getpid()}").touch()
        with Task(Context()) as task:
            if env_fn is not None:
                with make_env_manager(env_fn, env_num=2, mode="async", max_retry=0) as envs:
                    envs.reset()
            task.use(lambda ctx: print("step", flush=True)).run(max_step=max_step)
"""
AT_IMPORT = """
    from parts import *

    def main():
        train()

    main()  # here
"""
IN_ANOTHER_MODULE = """
    import training

    def main():
        training.main()
"""
WITH_ENVS = """
    from parts import *

    class Mine(Env):
        pass

    def main():
        train(Mine)

    main()  # here
"""
LATER = """
    from parts import *

    task = Task(Context())
    task.check()

    def main():
        task.use(lambda ctx: print("step", flush=True)).run(max_step=2)
        task.close()
        import training
"""
MADE_BY_NAME = """
    from parts import *

    gym.register("Mine-v0", lambda: Env(), max_episode_steps=5)
    train()  # here

    def main():
        pass
"""


def write(folder: Path, **modules: str) -> None:
    for name, text in {"parts": PARTS, **modules}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


def line_of(text: str) -> int:
    lines = textwrap.dedent(text).splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith("# here"))
    return number


def ditask(folder: Path, *options: str) -> tuple[int, str]:
    with start(folder, "--main", "program.main", *options) as launcher:
        text, _ = launcher.communicate(timeout=100)
    return launcher.returncode, text


@pytest.mark.parametrize(
    ("workers", "policy"),
    mostly_slow(itertools.product(["1", "2"], ["abort", "restart"]), keep=[3]),
)
def test_a_module_that_trains_when_it_is_imported_is_refused(
    tmp_path: Path, workers: str, policy: str
) -> None:
    write(tmp_path, program=AT_IMPORT)
    options = ("--parallel-workers", workers, "--on-failure", policy)
    code, text = ditask(tmp_path, *options)
    assert code == 1, text
    where = f"{tmp_path / 'program.py'}:{line_of(AT_IMPORT)}"
    assert f"{where} runs a task while its module is imported" in text
    assert "__main__" in text.splitlines()[-1]
    assert "[node 0] step" not in text


def test_a_module_that_the_main_module_imports_is_refused(tmp_path: Path) -> None:
    write(tmp_path, program=IN_ANOTHER_MODULE, training=AT_IMPORT)
    code, text = ditask(tmp_path, "--parallel-workers", "2")
    assert code == 1, text
    assert f"training.py:{line_of(AT_IMPORT)} runs a task while" in text
    assert "step" not in text.replace("step,", "")


def test_a_task_may_be_built_at_import_and_a_module_imported_by_the_program(tmp_path: Path) -> None:
    write(tmp_path, program=LATER.replace("task.check()", ""), training=AT_IMPORT)
    code, text = ditask(tmp_path)
    assert code == 0, text
    assert text.count("[node 0] step\n") == 4


def test_a_process_of_envs_does_not_train(tmp_path: Path) -> None:
    write(tmp_path, program=WITH_ENVS)
    # Imported, the module is a program of one process.
    command = [sys.executable, "-c", "import program"]
    done = subprocess.run(
        command, cwd=tmp_path, text=True, stderr=subprocess.PIPE, timeout=100, check=False
    )
    assert done.returncode == 1
    where = f"program.py:{line_of(WITH_ENVS)}"
    assert f"{where} starts processes of envs while its module is imported" in done.stderr
    # In the process of the first env, it has asked for others before it would have trained.
    assert len(list(tmp_path.glob("trained.*"))) <= 3


@pytest.mark.slow
def test_a_process_of_envs_that_imports_a_training_by_name_does_not_train(tmp_path: Path) -> None:
    write(tmp_path, named=MADE_BY_NAME)
    program = "from parts import *\ntrain(lambda: gym.make('named:Mine-v0'))\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert (
        f"named.py:{line_of(MADE_BY_NAME)} runs a task while its module is imported" in done.stderr
    )
    assert "step" not in done.stdout


@pytest.mark.slow
def test_a_spawned_process_does_not_train(tmp_path: Path) -> None:
    program = """
        import multiprocessing
        from parts import *

        def work():
            print("worked", flush=True)

        train()
        process = multiprocessing.get_context("spawn").Process(target=work)
        process.start()
        process.join()
        print("exit code", process.exitcode, flush=True)
    """
    write(tmp_path, program=program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=100,
        env={**os.environ},
        check=False,
    )
    assert done.stdout.splitlines() == ["step", "step", "exit code 1"], done.stderr
    assert "program.py:8 runs a task while its module is imported" in done.stderr
