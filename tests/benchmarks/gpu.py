"""Measure training on a GPU in at most 8 minutes: ``python -m tests.benchmarks.gpu FOLDER``.

Prints a table in Markdown, and writes it to FOLDER/gpu.md after each row, so a machine that is
there for a short time yields a part of it. ``--small`` tries everything on the CPU, with few envs
and without the compiler's backend, in about a minute; without CUDA it is the only choice. Each task
has a process and a deadline of its own. ``--only`` names the tasks to run.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import DMiddlewareError
from dmiddleware.policy import PPOPolicy, SACPolicy, TD3Policy
from middleware import (
    DataPusher,
    GAEEstimator,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    StepCollector,
)

MODES: Final[dict[str, dict[str, Any]]] = {
    "eager": {},
    "compiled": {"compile": True},
    "graphs": {"compile": "graphs"},
    "graphs, bfloat16": {"compile": "graphs", "autocast": "bfloat16"},
}
DEADLINE_S: Final = 95.0
"""Of the process of a task, with all its rows; five of them are less than 8 minutes."""
_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setting:
    """A task: what it trains, and the rate that LeanRL published for an H100.

    Attributes:
        title: as in the table.
        build: makes the chain: whether it is small, and options of the policy, to the middleware
            and the env steps of one step of the chain.
        n_warm: steps of the chain before those that count: they fill the buffer, compile, capture.
        published: env steps a second; None: there are none.
    """

    title: str
    build: Callable[[bool, dict[str, Any]], tuple[list[Any], int]]
    n_warm: int
    published: int | None = None


def cartpole(env_num: int) -> Callable[[bool, dict[str, Any]], tuple[list[Any], int]]:
    """Return what builds PPO on CartPole in torch: 16 steps, 4 epochs of 4 minibatches."""

    def build(small: bool, options: dict[str, Any]) -> tuple[list[Any], int]:
        n = env_num // 64 if small else env_num
        device = "cpu" if small else "cuda"
        env = "dmiddleware.zoo.tensor_envs:CartPole"
        envs = make_env_manager(env, env_num=n, env_kwargs={"device": device}, seed=0)
        batch = {"batch_size": 4 * n, "epoch_per_collect": 4}
        policy = PPOPolicy.for_env(envs, cuda=not small, seed=0, **batch, **options)
        return _on_policy(policy, envs, 16 * n)

    return build


def pong(small: bool, options: dict[str, Any]) -> tuple[list[Any], int]:
    """Build PPO on Pong: 8 envs, 128 steps, 4 epochs of 4 minibatches."""
    n_steps = 16 if small else 128
    envs = make_env_manager("Pong-v5", env_num=8, backend="envpool", seed=0)
    batch = {"batch_size": 2 * n_steps, "epoch_per_collect": 4}
    policy = PPOPolicy.for_env(envs, cuda=not small, seed=0, **batch, **options)
    return _on_policy(policy, envs, 8 * n_steps)


def half_cheetah(kind: Any) -> Callable[[bool, dict[str, Any]], tuple[list[Any], int]]:
    """Return what builds SAC or TD3 on HalfCheetah: one env, one update of 256 rows a step."""

    def build(small: bool, options: dict[str, Any]) -> tuple[list[Any], int]:
        envs = make_env_manager("HalfCheetah-v4", env_num=1, backend="envpool", seed=0)
        n_rows = 32 if small else 256
        policy = kind.for_env(envs, cuda=not small, seed=0, batch_size=n_rows, **options)
        buffer = TensorBuffer(100_000, seed=0)
        learner = OffPolicyLearner(policy, buffer, update_per_collect=1)
        return [StepCollector(policy, envs, n_sample=1), DataPusher(buffer), learner], 1

    return build


def _on_policy(policy: Any, envs: Any, n_sample: int) -> tuple[list[Any], int]:
    collector = StepCollector(policy, envs, n_sample=n_sample)
    return [collector, GAEEstimator(policy), OnPolicyLearner(policy)], n_sample


SETTINGS: Final = {
    "cartpole-4096": Setting("PPO, 4,096 torch CartPole", cartpole(4096), 4),
    "cartpole-65536": Setting("PPO, 65,536 torch CartPole", cartpole(65_536), 4),
    "sac": Setting("SAC, HalfCheetah-v4 in EnvPool", half_cheetah(SACPolicy), 400, 725),
    "td3": Setting("TD3, HalfCheetah-v4 in EnvPool", half_cheetah(TD3Policy), 400, 936),
    "pong": Setting("PPO, Pong in EnvPool", pong, 4, 6809),
}


def rate(setting: Setting, options: dict[str, Any], *, small: bool) -> float:
    """Return the env steps a second of training."""
    parts, n_steps = setting.build(small, options)
    seconds = 0.2 if small else 5.0
    with Task(OnlineRLContext(), seed=0) as task:
        for part in parts:
            task.use(part)
        task.run(min(setting.n_warm, 50) if small else setting.n_warm)
        _wait(small)
        start, n_made = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            task.run(1)
            n_made += 1
        _wait(small)
        return n_made * n_steps / (time.perf_counter() - start)


def _wait(small: bool) -> None:
    if not small:
        torch.cuda.synchronize()


def print_rows(setting: Setting, *, small: bool, modes: list[str]) -> None:
    """Print a line of JSON for each way to run a task."""
    for mode in modes:
        outcome: dict[str, Any] = {"mode": mode}
        try:
            outcome["rate"] = rate(setting, MODES[mode], small=small)
        except (DMiddlewareError, RuntimeError, ValueError, ImportError, OSError) as error:
            outcome["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        print(json.dumps(outcome), flush=True)


def measured(name: str, *, small: bool, modes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task that its process prints before its deadline."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--only", name, "--child"]
    command += ["--modes", *modes, *(["--small"] if small else [])]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        deadline.cancel()


def table(rows: list[tuple[str, str, dict[str, Any]]], *, small: bool) -> str:
    """Return the table in Markdown."""
    device = platform.processor() or "CPU" if small else torch.cuda.get_device_name()
    note = ", small: only whether it runs" if small else ""
    lines = [
        f"Env steps a second, with updates; torch {torch.__version__}, {device}{note}.",
        "",
        "| task | mode | env steps/s | LeanRL on an H100, published |",
        "| --- | --- | --- | --- |",
    ]
    for name, mode, outcome in rows:
        published = SETTINGS[name].published
        shown = f"{outcome['rate']:,.0f}" if "rate" in outcome else outcome["error"]
        beside = "-" if published is None else f"{published:,}"
        lines.append(f"| {SETTINGS[name].title} | {mode} | {shown} | {beside} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="for gpu.md")
    parser.add_argument("--small", action="store_true", help="short runs on the CPU")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    small: bool = arguments.small
    if not small and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; add --small to try it on the CPU")
    torch.set_num_threads(1)
    if arguments.child:
        if small:  # the compiler's own backend would take minutes
            setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # noqa: B010
        print_rows(SETTINGS[arguments.only[0]], small=small, modes=arguments.modes)
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for name in arguments.only:
        left = list(arguments.modes)
        for outcome in measured(name, small=small, modes=left):
            rows.append((name, outcome["mode"], outcome))
            (arguments.folder / "gpu.md").write_text(table(rows, small=small))
        made = {mode for task, mode, _ in rows if task == name}
        late = {"error": f"not within {DEADLINE_S:.0f} s"}
        rows += [(name, mode, late) for mode in left if mode not in made]
    text = table(rows, small=small)
    (arguments.folder / "gpu.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
