"""Showing what a checkpoint holds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from dmiddleware.data import TensorBuffer, save_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.launch.cli import ditask
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from dmiddleware.tree import as_tree
from middleware import CkptSaver, OnlineRLContext, RunFolder, SnapshotSaver


def shown(path: Path) -> Result:
    return CliRunner().invoke(ditask, ["inspect", str(path)])


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        ({"w": torch.zeros(2, 3)}, ["w float32 [2, 3]"]),
        ({"a": {"b": [np.zeros(4, np.int64), 1.5]}}, ["a.b.0 int64 [4]", "a.b.1 float 1.5"]),
        ({"betas": (0.9, 0.999), "none": {}}, ["betas tuple (0.9, 0.999)", "none dict {}"]),
        ({"items": as_tree({"values": torch.ones(2)})}, ["items.values float32 [2]"]),
        ({"text": "x" * 99}, [f"text str '{'x' * 58}…"]),
        (torch.zeros(()), ["float32 []"]),
        (
            {"few": [{"a": np.zeros(4), "n": 0}] * 3},
            [f"few.{at}.{line}" for at in range(3) for line in ("a float64 [4]", "n int 0")],
        ),
        (
            {
                "many": [
                    *({"a": np.zeros(4), "n": at, "k": "x"} for at in range(7)),
                    {"a": np.zeros(3), "n": 7, "k": "x"},
                ]
            },
            [
                "many.*.a float64 7 x [4], 224 bytes",
                "many.*.n int 8 values, the first 0",
                "many.*.k str 8 x 'x'",
                "many.7.a float64 [3]",
            ],
        ),
        ({}, ["dict {}"]),
    ],
)
def test_each_value_has_a_line(tmp_path: Path, state: object, lines: list[str]) -> None:
    save_checkpoint(tmp_path / "state.safetensors", state)
    result = shown(tmp_path / "state.safetensors")
    assert result.exit_code == 0, result.output
    assert [" ".join(line.split()) for line in result.output.splitlines()[1:]] == lines


def test_the_title_counts_arrays_and_numbers(tmp_path: Path) -> None:
    buffer = TensorBuffer(8)
    rows = {"obs": torch.zeros(4, 1, 3), "reward": torch.zeros(4, 1)}
    ends = {"done": torch.zeros(4, 1, dtype=torch.bool)}
    buffer.push(as_tree({**rows, **ends, "terminated": ends["done"], "truncated": ends["done"]}))
    save_checkpoint(tmp_path / "buffer.safetensors", {"buffer": buffer.state_dict()})
    text = shown(tmp_path / "buffer.safetensors").output
    assert (
        "arrays of" in text
        and "; the file has " in text
        and f"{(tmp_path / 'buffer.safetensors').stat().st_size:,}" in text
    )
    assert "buffer." in text


def test_a_file_of_a_run_has_a_summary_on_top(tmp_path: Path) -> None:
    policy = DQNPolicy.for_env(make_env_manager("CartPole-v1", env_num=1), seed=0)
    run = RunFolder.create("short", root=tmp_path)

    def count(ctx: OnlineRLContext) -> None:
        ctx.env_step, ctx.train_iter, ctx.eval_value = 1_500, 320, 9.5

    with Task(seed=0) as task:
        task.use(count).use(CkptSaver(policy, run)).use(SnapshotSaver(run, every_env_step=500))
        task.run(max_step=1)
    n_parameters = sum(each.numel() for each in policy.model.parameters())
    head = shown(run.best_ckpt).output.partition("\n\n")[0]
    assert [re.split("  +", line) for line in head.splitlines()] == [
        ["checkpoint", "of DQNPolicy"],
        ["observations", "Box [4] float32"],
        ["actions", "Discrete(2)"],
        ["network", f"{n_parameters:,} parameters"],
        ["updates", "320"],
        ["env steps", "1,500"],
        ["evaluation", "mean return 9.5"],
        ["to act", f"load_policy({str(run.best_ckpt)!r})"],
    ]
    assert "evaluation" not in shown(run.ckpt_dir / "final.safetensors").output.partition("\n\n")[0]
    (snapshot, *_) = sorted((run.path / "snapshots").glob("*.safetensors"), reverse=True)
    head = shown(snapshot).output.partition("\n\n")[0]
    assert "of a run, in step 0 of its task" in head and "1,500" in head
    assert f"ditask resume {run.path}" in head
    # A learner of a named part saves to a folder of its own.
    (snapshot.parent / "red").mkdir()
    of_part = snapshot.rename(snapshot.parent / "red" / snapshot.name)
    assert f"ditask resume {run.path}" in shown(of_part).output.partition("\n\n")[0]


@pytest.mark.parametrize(
    "state",
    [
        {"policy": {"class": "a.B", "observation_space": 3, "action_space": None}, "model": {}},
        {"task": {"context": {"values": {"env_step": "x"}}}, "parts": {}},
        {"policy": {"class": "B"}, "model": {"w": 1}, "last_eval_value": float("nan")},
    ],
)
def test_a_summary_leaves_out_what_it_cannot_read(state: object, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "state.safetensors", state)
    result = shown(tmp_path / "state.safetensors")
    assert result.exit_code == 0, result.output
    assert "\n\n" in result.output


def test_a_file_that_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint at all")
    result = shown(tmp_path / "notes.txt")
    assert result.exit_code == 1
    assert "Traceback" not in result.output and "notes.txt" in result.output
    assert shown(tmp_path / "missing").exit_code == 2
