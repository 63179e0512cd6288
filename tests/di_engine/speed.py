"""The loop of ``ding/example/dqn.py`` here and in DI-engine: env steps a second of CPU time.

DI-engine needs an environment of its own: NumPy 1.26 and gym 0.25.1. Its Python is the argument
``--di-engine PYTHON``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.di_engine.rows import Row

__all__ = ["MEASURED", "run"]

_TURNS: Final = 3
_STEPS: Final = 300
_MARK: Final = "STEPS-A-SECOND "
_BAR: Final = 5.0

MEASURED: Final = f"""
import json, runpy, sys, time
HERE = sys.argv[1] == "here"
if HERE:
    import dmiddleware.ding
from ding.framework import task
from ding.framework.middleware import StepCollector, eps_greedy_handler
from ding.framework.middleware import data_pusher, OffPolicyLearner
from ding.framework.context import OnlineRLContext
from ding.config import compile_config
from ding.data import DequeBuffer
from ding.envs import BaseEnvManagerV2, DingEnvWrapper
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import set_pkg_seed
import gym
from dizoo.classic_control.cartpole.config.cartpole_dqn_config import main_config, create_config

cfg = compile_config(main_config, create_cfg=create_config, auto=True, save_cfg=False)
marks = []

def clock(ctx):
    marks.append((time.process_time(), ctx.env_step))

with task.start(ctx=OnlineRLContext()):
    env = BaseEnvManagerV2(
        env_fn=[lambda: DingEnvWrapper(gym.make("CartPole-v0"))] * cfg.env.collector_env_num,
        cfg=cfg.env.manager,
    )
    set_pkg_seed(0, use_cuda=False)
    model = DQN(**cfg.policy.model)
    buffer_ = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
    policy = DQNPolicy(cfg.policy, model=model)
    task.use(eps_greedy_handler(cfg))
    task.use(StepCollector(cfg, policy.collect_mode, env))
    task.use(data_pusher(cfg, buffer_))
    task.use(OffPolicyLearner(cfg, policy.learn_mode, buffer_))
    task.use(clock)
    task.run(max_step={_STEPS})
start, end = marks[50], marks[-1]
print("{_MARK}" + json.dumps((end[1] - start[1]) / (end[0] - start[0])))
"""
"""The example's chain without what only evaluates and saves, timed from its 50th step on."""


def run(checkout: Path, di_engine: Path) -> Row:
    """Return a row with the ratio of the medians; it fails below the bar."""
    here, there = [], []
    for _ in range(_TURNS):
        here.append(_measure(checkout, Path(sys.executable), "here"))
        there.append(_measure(checkout, di_engine, "there"))
    ratio = statistics.median(here) / statistics.median(there)
    text = (
        f"{ratio:.1f} x: {statistics.median(here):.0f} env steps a CPU second here "
        f"({', '.join(f'{value:.0f}' for value in here)}), {statistics.median(there):.0f} in "
        f"DI-engine 0.5.3 ({', '.join(f'{value:.0f}' for value in there)})"
    )
    return Row("ding/example/dqn.py", "speed", "runs" if ratio >= _BAR else "fails", text)


def _measure(checkout: Path, python: Path, where: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.py")
        file.write_text(MEASURED, encoding="utf-8")
        # DI-engine there is the installed one: the checkout needs packages that it does not pin.
        paths = [str(checkout), str(Path.cwd())] if where == "here" else []
        ended = subprocess.run(
            [str(python), str(file), where],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    line = next(line for line in ended.stdout.splitlines() if line.startswith(_MARK))
    return float(json.loads(line.removeprefix(_MARK)))


if __name__ == "__main__":
    print(run(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()))
