"""The walk of a transition: ``python -m tests.transition_walk``.

Prints the functions of the project that a step of a DQN chain calls once it runs evenly, by file in
the order of the first call: from the collector, which steps the environments, through the buffer to
the update. ``--count`` prints only how many there are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rl import Schedule
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    MetricsLogger,
    OffPolicyLearner,
    OnlineRLContext,
    RunFolder,
    StepCollector,
)

__all__ = ["walk"]

ROOT = Path(__file__).resolve().parents[1]
_WARM_UP, _WATCHED = 40, 40


def walk(folder: Path) -> dict[str, list[str]]:
    """Return the functions that the steps of a chain call, by file.

    Args:
        folder: for the files of the run.
    """
    called: dict[tuple[str, str], None] = {}
    steps = iter(range(_WARM_UP + _WATCHED))

    def see(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((f"{ROOT}/dmiddleware", f"{ROOT}/middleware")):
            name = frame.f_code.co_qualname
            if not name.endswith(("<lambda>", "comp>", "genexpr>")):
                called.setdefault((str(Path(file).relative_to(ROOT)), name))

    def start(_: Any) -> None:
        if next(steps) >= _WARM_UP:
            sys.setprofile(see)

    def end(_: Any) -> None:
        sys.setprofile(None)

    with RunFolder.create("walk", root=folder) as run, Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=8, seed=0)
        eps = Schedule.linear(1.0, 0.05, decay=1_000)
        policy = DQNPolicy.for_env(envs, seed=0, batch_size=32, eps=eps)
        buffer = TensorBuffer(10_000, seed=0)
        logger = MetricsLogger(run)
        task.use(EpsGreedyHandler(policy)).use(start)
        task.use(StepCollector(policy, envs, n_sample=64)).use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=4)).use(end)
        task.use(logger).run(max_step=_WARM_UP + _WATCHED)
    files: dict[str, list[str]] = {}
    for file, name in called:
        files.setdefault(file, []).append(name)
    return files


def main() -> None:
    """Print the walk."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        files = walk(Path(folder))
    if "--count" not in sys.argv:
        for file, names in files.items():
            print(file, *(f"    {name}" for name in names), sep="\n")
    print(f"{sum(map(len, files.values()))} functions in {len(files)} files")


if __name__ == "__main__":
    main()
