"""The key of a run: only its nodes receive it, and no environment shows it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from dmiddleware.launch.plan import NodeConfig, NodePlan, RunPlan
from tests.dmiddleware.launch.ditask_process import start, write_key
from tests.variants import mostly_slow

PROGRAM = """
    import json, multiprocessing, os, subprocess, sys
    from pathlib import Path
    import gymnasium as gym
    import numpy as np
    from dmiddleware import Context, Task, middleware
    from dmiddleware.env import make_env_manager

    def look():
        seen = Path("/proc/self/environ").read_bytes().decode().split(chr(0))
        return [name + "=" + value for name, value in os.environ.items()] + seen

    def write(name):
        Path(f"{name}.{os.getpid()}.json").write_text(json.dumps(look()))

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            write("env")
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, True, {}

    def main():
        write("node")
        with make_env_manager(Env, env_num=1, mode="async") as envs:
            envs.reset()
        code = "import program; program.write('child')"
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "."})
        process = multiprocessing.get_context("spawn").Process(target=write, args=("spawned",))
        process.start()
        process.join()
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                if not Path("failed").exists():
                    Path("failed").touch()
                    raise ValueError("the first start fails")
                task.emit("restarted", only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                task.wait_for("restarted", 100.0)
                task.stop("all done")

            task.use(collect).use(learn).run()
"""
SECRETS = {"DITASK_KEY": "the-key-of-this-run." * 3}


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize("has_file", mostly_slow([False, True], keep=1), ids=["variable", "file"])
def test_no_process_of_the_run_has_the_key_in_its_environment(
    tmp_path: Path, has_file: bool
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    options = ["--main", "program.main", "--roles", "learner=1,collector=1", "--protocol", "tcp"]
    if has_file:
        options += ["--key-file", str(write_key(tmp_path / "run.key"))]
    with start(tmp_path, *options, "--on-failure", "restart", env=SECRETS) as launcher:
        text, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, text
    seen = {path: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    # Two nodes, of which one is restarted.
    for name in ("node", "env", "child", "spawned"):
        assert len([path for path in seen if path.name.startswith(name)]) == 3
    for path, values in seen.items():
        assert any(value.startswith("DITASK_MARKS=") for value in values), path
        for secret in (*SECRETS.values(), "0123456789" * 4):
            assert not any(secret in value for value in values), path
    written = [text, *(path.read_text() for path in tmp_path.glob("logs/*/*"))]
    assert not any(secret in one for one in written for secret in SECRETS.values())


def test_the_text_of_a_configuration_does_not_contain_the_key() -> None:
    run = RunPlan(nodes=(NodePlan(0),), key_hex="6b6b")
    for one in (run, NodeConfig(run=run, main="a.b", package=".")):
        assert "6b6b" not in repr(one)
