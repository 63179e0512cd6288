"""A run that is stopped and resumed equals one that was never stopped."""

from __future__ import annotations

import functools
import logging
import random
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware import Task, kept
from dmiddleware.data import PrioritySampler, TensorBuffer, load_checkpoint, save_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import (
    ChainError,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointWriteError,
    ConfigError,
    RunFolderError,
)
from dmiddleware.files.state_blocks import blocks_of
from dmiddleware.pipeline import SkipRest
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rl import Schedule
from dmiddleware.testing import Cluster, FakeClock
from dmiddleware.worker import BaseLearner
from middleware import (
    BaseMiddleware,
    CkptSaver,
    ContextExchanger,
    ModelExchanger,
    OfflineRLContext,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    interaction_evaluator,
    termination_checker,
)
from middleware.classic import LearnerRun
from tests.dmiddleware.data.blocks import digest, shrink_blocks
from tests.middleware.nodes import run_nodes

N_STEPS = 24
ROOT = Path(__file__).parents[3]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small buffers have several blocks, as buffers of many rows have."""
    shrink_blocks(monkeypatch)


class DQNRun:
    """Prioritized replay with n-step returns, evaluations, and noise from the libraries."""

    def __init__(self, folder: Path, **options: Any) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.policy = DQNPolicy(
            {
                "seed": 0,
                "priority": True,
                "n_step": 3,
                "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]},
                "batch_size": 8,
                "target_update_freq": 7,
                "learning_rate": Schedule.cosine(1e-2, 1e-4, by="progress"),
                "eps": Schedule.exponential(1.0, 0.05, decay=10, by="update"),
            }
        )
        self.noise: list[float] = []
        self.evaluations: list[float] = []
        collect_env = make_env_manager("CartPole-v1", env_num=3, seed=4)
        eval_env = make_env_manager("CartPole-v1", env_num=2, seed=5)
        sampler = PrioritySampler(beta=Schedule.linear(0.4, 1.0, decay=100))
        self.buffer = TensorBuffer(90, n_step=3, sampler=sampler, seed=6)
        self.learner = BaseLearner(policy=self.policy.learn_mode, exp_name=str(folder))
        self.snapshots = SnapshotSaver(folder, **options)
        self.task = Task(OnlineRLContext(), seed=0)
        self.task.use(self.snapshots).use(termination_checker(max_env_step=6 * N_STEPS + 1))
        self.task.use(eps_greedy_handler(self.policy))
        self.task.use(StepCollector(self.policy.collect_mode, collect_env, n_sample=6))
        self.task.use(data_pusher(self.buffer))
        run = LearnerRun(self.learner)
        self.task.use(run).use(OffPolicyLearner(run, self.buffer, update_per_collect=2))
        self.task.use(
            interaction_evaluator(self.policy.eval_mode, eval_env, n_episode=2, every_train_iter=10)
        )
        self.task.use(self.note)

    def note(self, ctx: Any) -> None:
        self.noise.append(random.random() + np.random.rand() + torch.rand(()).item())
        if ctx.eval_value is not None:
            self.evaluations.append(ctx.eval_value)

    def outcome(self) -> Any:
        return (
            digest(self.policy.learn_mode.state_dict()),
            digest(self.buffer.state_dict()),
            digest(self.task.ctx.state_dict()),
        )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("stopped_after", [1, 8, 17])
def test_a_resumed_run_equals_one_that_was_never_stopped(
    tmp_path: Path, stopped_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)
    whole = DQNRun(tmp_path / "whole")
    with whole.task:
        whole.task.run(max_step=N_STEPS)
        expected = whole.outcome()
    stopped = DQNRun(tmp_path / "run")
    with stopped.task:
        for _ in range(stopped_after):  # most blocks are from earlier snapshots
            stopped.task.run(max_step=1)
            stopped.snapshots.save(stopped.task)
    resumed = DQNRun(tmp_path / "run")
    with resumed.task:
        assert resumed.snapshots.resume(resumed.task)
        resumed.task.run(max_step=N_STEPS - stopped_after)
        assert resumed.outcome() == expected
    assert stopped.noise + resumed.noise == whole.noise
    assert stopped.evaluations + resumed.evaluations == whole.evaluations


def test_a_run_resumes_from_a_mapped_file_and_leaves_it_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of gigabytes take no second copy in memory; here all tensors count as large."""
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)
    outcomes = []
    for large in (10**9, 0):
        monkeypatch.setattr("middleware.record.snapshot._LARGE", large)
        stopped = DQNRun(tmp_path / str(large))
        with stopped.task:
            stopped.task.run(max_step=8)
            path = stopped.snapshots.save(stopped.task)
        before = path.read_bytes()
        resumed = DQNRun(tmp_path / str(large))
        with resumed.task:
            assert resumed.snapshots.resume(resumed.task)
            resumed.task.run(max_step=8)
            outcomes.append(resumed.outcome())
        assert path.read_bytes() == before
    assert outcomes[0] == outcomes[1]


def test_exploration_continues_in_a_process_with_a_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)

    def outcome(folder: str, *, n_steps: int, resume: bool = False) -> str:
        def program() -> str:
            run = DQNRun(tmp_path / folder)
            with run.task:
                assert run.snapshots.resume(run.task) == resume
                run.task.run(max_step=n_steps)
                run.snapshots.save(run.task)
                return digest(run.buffer.state_dict())

        with Cluster(program, n=1) as cluster:
            (result,) = cluster.run().values()
        return str(result)

    whole = outcome("whole", n_steps=6)
    outcome("run", n_steps=3)
    assert outcome("run", n_steps=3, resume=True) == whole


def test_ppo_resumes_to_the_same_parameters(tmp_path: Path) -> None:
    def build(folder: Path) -> tuple[Task[Any], SnapshotSaver, PPOPolicy]:
        torch.manual_seed(0)
        policy = PPOPolicy(
            {
                "seed": 0,
                "obs_norm": True,
                "value_norm": True,
                "batch_size": 8,
                "epoch_per_collect": 2,
                "recompute_advantage": True,
                "learning_rate": Schedule.linear(1e-2, 0.0, decay=192),
                "clip_ratio": Schedule.exponential(0.3, 0.1, decay=20, by="update"),
                "entropy_weight": Schedule.cosine(0.1, 0.0, by="progress"),
                "model": {"obs_shape": 4, "action_shape": 2},
            }
        )
        envs = make_env_manager("CartPole-v1", env_num=2, seed=1)
        snapshots = SnapshotSaver(folder)
        task = Task(OnlineRLContext(), seed=0)
        task.use(StepCollector(policy.collect_mode, envs, n_sample=32))
        task.use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy.learn_mode)).use(snapshots)
        task.use(termination_checker(max_env_step=193))
        return task, snapshots, policy

    whole, _, expected = build(tmp_path / "whole")
    with whole:
        whole.run(max_step=6)
    stopped, snapshots, _ = build(tmp_path / "run")
    with stopped:
        stopped.run(max_step=2)
        snapshots.save(stopped)
    resumed, snapshots, policy = build(tmp_path / "run")
    with resumed:
        assert snapshots.resume(resumed)
        resumed.run(max_step=4)
    assert digest(policy.learn_mode.state_dict()) == digest(expected.learn_mode.state_dict())


def test_snapshots_are_saved_at_an_interval_and_the_newest_are_kept(tmp_path: Path) -> None:
    run = DQNRun(tmp_path, every_train_iter=10, keep=2)
    with run.task:
        run.task.run(max_step=20)
    steps = [int(path.stem.removeprefix("step_")) for path in run.snapshots.paths]
    assert len(steps) == 2 and steps[0] - steps[1] == 5


class Slow:
    """A part whose state takes a while to save."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def state_dict(self) -> dict[str, Any]:
        self._clock.advance(self._seconds)
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("save_s", "saved_at"),
    [(0.0, [1, 3, 5, 7, 9]), (0.5, [1, 5, 9]), (1000.0, [1])],
)
def test_without_an_interval_snapshots_are_saved_unless_they_cost_too_much(
    tmp_path: Path, save_s: float, saved_at: list[int]
) -> None:
    clock = FakeClock()
    snapshots = SnapshotSaver(tmp_path, keep=9, parts={"slow": Slow(clock, save_s)})

    def collect(ctx: OnlineRLContext) -> None:
        clock.advance(10.0)
        ctx.env_step += 1000

    with Task(OnlineRLContext(), clock=clock) as task:
        task.use(collect).use(snapshots).run(max_step=11)
        assert [_step(path) for path in reversed(snapshots.paths)] == saved_at


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def test_without_an_interval_a_run_on_recorded_data_saves_by_updates(tmp_path: Path) -> None:
    snapshots = SnapshotSaver(tmp_path, keep=9)

    def learn(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 600

    with Task(OfflineRLContext(), clock=FakeClock()) as task:
        task.use(learn).use(snapshots).run(max_step=5)
        assert [_step(path) for path in reversed(snapshots.paths)] == [1, 3, 4]


def test_a_run_that_is_stopped_leaves_a_snapshot(tmp_path: Path) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        run.task.use(lambda ctx: ctx.task.stop("enough") if ctx.total_step == 4 else None)
        run.task.run()
    assert len(run.snapshots.paths) == 1
    again = DQNRun(tmp_path)
    with again.task:
        again.task.use(lambda ctx: None)
        assert again.snapshots.resume(again.task)
        assert again.task.ctx.total_step == run.task.ctx.total_step
        assert again.task.ctx.train_iter == run.task.ctx.train_iter > 0


def stop_late(ctx: Any) -> Iterator[None]:
    yield
    if ctx.total_step == 2:
        ctx.task.stop("a signal that comes when all others are done with the step")


def stop_and_skip(ctx: Any) -> None:
    if ctx.total_step == 2:
        ctx.task.stop("a signal that comes while data is waited for")
        raise SkipRest


@pytest.mark.parametrize("stopper", [stop_late, stop_and_skip])
def test_a_stop_at_any_point_leaves_a_snapshot(tmp_path: Path, stopper: Any) -> None:
    snapshots = SnapshotSaver(tmp_path)
    with Task(OnlineRLContext()) as task:
        task.use(stopper).use(snapshots).run()
    assert [path.stem for path in snapshots.paths] == ["step_000000000002"]


def test_without_a_snapshot_nothing_is_resumed(tmp_path: Path) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        assert not run.snapshots.resume(run.task)
        run.task.run(max_step=1)


@pytest.mark.parametrize("damage", ["cut", "bit", "other"])
def test_a_damaged_snapshot_is_rejected_and_the_one_before_it_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = DQNRun(tmp_path, every_train_iter=10)
    with run.task:
        run.task.run(max_step=20)
    newest, before = run.snapshots.paths
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[-100] ^= 1
        newest.write_bytes(content)
    else:
        save_checkpoint(newest, {"model": {}})
    again = DQNRun(tmp_path)
    with again.task, caplog.at_level(logging.WARNING):
        with pytest.raises(CheckpointDamaged):
            again.snapshots.resume(again.task, newest)
        assert again.snapshots.resume(again.task)
        assert again.task.ctx.total_step == int(before.stem.removeprefix("step_"))
    assert newest.name in caplog.text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def remove_blocks(path: Path) -> None:
    for name in blocks_of(path):
        (path.parent / name).unlink(missing_ok=True)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip_a_bit,
        link_to_nothing,
        make_a_folder,
        remove_blocks,
        lambda path: path.write_bytes(b""),
        lambda path: save_checkpoint(path, {"model": {}}),
        lambda path: torch.save({"task": 1}, path),
    ],
)
def test_a_run_none_of_whose_snapshots_can_be_read_does_not_start(
    tmp_path: Path, damage: Any
) -> None:
    run = DQNRun(tmp_path, every_train_iter=10)
    with run.task:
        run.task.run(max_step=20)
    assert len(run.snapshots.paths) == 2
    for path in run.snapshots.paths:
        damage(path)
    again = DQNRun(tmp_path)
    with again.task:
        with pytest.raises(RunFolderError, match="no snapshot that can be read") as caught:
            again.snapshots.resume(again.task)
        assert again.task.ctx.total_step == 0
    for path in run.snapshots.paths:
        assert path.name in str(caught.value)
        assert path.is_symlink() or path.exists()


def blocks_in(folder: Path) -> dict[Path, int]:
    """Return the files of blocks below a folder, with the times when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("snapshots/*/*.safetensors")}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("damage", ["bit", "gone"])
def test_a_damaged_block_leaves_the_snapshot_before_it(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        for _ in range(7):
            run.task.run(max_step=3)
            run.snapshots.save(run.task)
    newest, before = run.snapshots.paths
    used, others = (set(blocks_of(path)) for path in (newest, before))
    assert used.isdisjoint(others) and len(used) > 8
    for name in used:  # each of them is enough, so they are tried together
        path = tmp_path / "snapshots" / name
        if damage == "gone":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    again = DQNRun(tmp_path)
    with again.task, caplog.at_level(logging.WARNING):
        assert again.snapshots.resume(again.task)
        assert again.task.ctx.total_step == int(before.stem.removeprefix("step_"))
        again.task.run(max_step=3)
        saved = again.snapshots.save(again.task)
    assert newest.name in caplog.text
    assert set(blocks_of(saved)).isdisjoint(others)
    load_checkpoint(saved)
    load_checkpoint(before)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_snapshot_writes_only_what_has_changed_and_leaves_no_other_files(
    tmp_path: Path, keep: int
) -> None:
    buffer = TensorBuffer(800, n_step=3, discount=0.9, seed=0)
    rows = {"x": torch.arange(800), "reward": torch.zeros(800), "episode_id": torch.arange(800)}
    rows["done"] = torch.ones(800, dtype=torch.bool)
    snapshots = SnapshotSaver(tmp_path, keep=keep, parts={"buffer": buffer})
    with Task(OnlineRLContext()).use(snapshots) as task:
        buffer.push(rows)
        written = []
        for number in range(6):
            task.run(max_step=1)
            before = blocks_in(tmp_path)
            snapshots.save(task)
            after = blocks_in(tmp_path)
            written.append(sum(before.get(path) != at for path, at in after.items()))
            paths = snapshots.paths
            assert len(paths) == min(keep, number + 1)
            used = {tmp_path / "snapshots" / name for path in paths for name in blocks_of(path)}
            assert after.keys() == used
            new = {name: column[:50] for name, column in rows.items()}
            buffer.push({**new, "x": new["x"] + 1000 * number})
            for path in paths:
                load_checkpoint(path)
    # The eight blocks of columns, and one of links, all of which are equal.
    assert written[0] == 9 and max(written[3:]) <= 6
    assert written[1] <= 3 if keep == 1 else written[1] >= 9


@pytest.mark.process
def test_of_a_process_that_is_killed_at_any_moment_a_whole_snapshot_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.middleware.saving_program", str(tmp_path), "8", "5"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [int(word) for word in done.stdout.split()]
    assert len(steps) >= 6 and steps[-1] >= 6 and steps == sorted(steps)


def test_a_snapshot_of_more_devices_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators = [torch.Generator().manual_seed(device).get_state() for device in range(3)]
    restored: dict[int, torch.Tensor] = {}

    def set_state(state: torch.Tensor, device: int) -> None:
        if device >= torch.cuda.device_count():
            raise RuntimeError(f"invalid device ordinal {device}")
        restored[device] = state

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: generators)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    snapshots = SnapshotSaver(tmp_path)
    with Task(OnlineRLContext()) as task:
        task.use(snapshots).run(max_step=1)
        snapshots.save(task)
        assert snapshots.resume(task)
    assert list(restored) == [0, 1]
    assert all(torch.equal(restored[device], generators[device]) for device in restored)


def test_a_run_resumed_from_an_older_snapshot_replaces_the_later_ones(tmp_path: Path) -> None:
    def begin(keep: int) -> tuple[Task[Any], SnapshotSaver]:
        snapshots = SnapshotSaver(tmp_path, keep=keep)
        return Task(OnlineRLContext()).use(snapshots), snapshots

    task, snapshots = begin(keep=3)
    with task:
        for _ in range(4):
            task.run(max_step=2)
            snapshots.save(task)
    steps = [int(path.stem.removeprefix("step_")) for path in snapshots.paths]
    assert steps == [7, 5, 3]
    task, snapshots = begin(keep=2)
    with task:
        assert snapshots.resume(task, snapshots.paths[-1])
        task.run(max_step=1)
        saved = snapshots.save(task)
    assert [int(path.stem.removeprefix("step_")) for path in snapshots.paths] == [4, 3]
    task, snapshots = begin(keep=1)
    with task:
        assert snapshots.resume(task) and task.ctx.total_step == 4
        snapshots.save(task)
    assert snapshots.paths == [saved]


def test_a_snapshot_of_other_parts_or_of_another_chain_is_rejected(tmp_path: Path) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        run.task.run(max_step=2)
        run.snapshots.save(run.task)
    fewer = DQNRun(tmp_path)
    with fewer.task:
        saver = SnapshotSaver(tmp_path, parts={"learner": fewer.learner})
        with pytest.raises(CheckpointMismatch, match=r"DataPusher\.buffer, .*, but this chain has"):
            saver.resume(fewer.task)
    other = DQNRun(tmp_path)
    with RunFolder.create("other", root=tmp_path) as folder, other.task:
        other.task.use(CkptSaver(other.policy.learn_mode, folder))
        with pytest.raises(CheckpointMismatch, match="CkptSaver"):
            other.snapshots.resume(other.task)


def test_a_snapshot_that_cannot_be_written_leaves_those_before_it(tmp_path: Path) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        run.task.run(max_step=2)
        kept = run.snapshots.save(run.task)
        run.task.run(max_step=1)
        target = tmp_path / "snapshots" / f"step_{run.task.ctx.total_step:012d}.safetensors"
        target.mkdir()  # no file can take its place
        with pytest.raises(CheckpointWriteError):
            run.snapshots.save(run.task)
        target.rmdir()
        assert run.snapshots.paths == [kept]


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        SnapshotSaver(tmp_path, keep=0)
    with pytest.raises(ValueError, match="every_train_iter"):
        SnapshotSaver(tmp_path, every_train_iter=0)


@dataclass
class KeepingContext(OnlineRLContext):
    """A context with kept fields of several types."""

    seen: set[int] = kept(default_factory=set)
    counts: Counter[str] = kept(default_factory=Counter)
    lists: defaultdict[str, list[int]] = kept(default_factory=lambda: defaultdict(list))
    best: np.float32 = kept(np.float32(0))


def test_kept_fields_of_several_types_come_back_as_they_were(tmp_path: Path) -> None:
    def keep(ctx: KeepingContext) -> None:
        ctx.seen.add(ctx.total_step)
        ctx.counts["steps"] += 1
        ctx.lists["steps"].append(ctx.total_step)
        ctx.best = np.float32(0.1)

    def build() -> tuple[Task[KeepingContext], SnapshotSaver]:
        snapshots = SnapshotSaver(tmp_path)
        return Task(KeepingContext()).use(keep).use(snapshots), snapshots

    task, snapshots = build()
    with task:
        task.run(max_step=2)
        snapshots.save(task)
    task, snapshots = build()
    with task:
        assert snapshots.resume(task)
        task.run(max_step=1)
        ctx = task.ctx
        assert ctx.seen == {0, 1, 2}
        assert type(ctx.counts) is Counter
        assert ctx.counts == {"steps": 3}
        assert type(ctx.lists) is defaultdict
        assert ctx.lists["new"] == []
        assert type(ctx.best) is np.float32


def test_field_that_cannot_be_saved_is_rejected_before_the_first_step(tmp_path: Path) -> None:
    ctx = OnlineRLContext()
    ctx.writer = object()  # type: ignore[attr-defined]
    ctx.keep("writer")
    with Task(ctx) as task, pytest.raises(ChainError, match=r"the context.*writer"):
        task.use(SnapshotSaver(tmp_path)).run(max_step=1)


class Notes:
    """A middleware with a state of its user's choice, which may exist only after the set-up."""

    def __init__(self, notes: Any, *, needs_setup: bool) -> None:
        self._given = notes
        if not needs_setup:
            self.notes = notes

    def setup(self, task: Task[Any]) -> None:
        self.notes = self._given

    def __call__(self, ctx: Any) -> None:
        pass

    def state_dict(self) -> Any:
        return {"notes": self.notes}

    def load_state_dict(self, state: Any) -> None:
        self.notes = state["notes"]


def test_middleware_whose_state_cannot_be_saved_is_rejected_before_the_first_step(
    tmp_path: Path,
) -> None:
    notes = Notes({"file": [object()]}, needs_setup=False)
    with (
        Task() as task,
        pytest.raises(ChainError, match=r"middleware Notes: state\['notes'\]\['file'\]\[0\]"),
    ):
        task.use(SnapshotSaver(tmp_path)).use(notes).run(max_step=1)


def test_state_that_exists_only_after_setup_is_checked_in_the_first_step(tmp_path: Path) -> None:
    notes = Notes({"file": [object()]}, needs_setup=True)
    with Task() as task:
        task.use(notes).use(SnapshotSaver(tmp_path))
        with pytest.raises(ConfigError, match=r"middleware Notes: state\['notes'\]\['file'\]\[0\]"):
            task.run(max_step=1)


def test_part_without_a_state_is_rejected_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'counter'"):
        SnapshotSaver(tmp_path, parts={"counter": object()})


def test_a_snapshot_takes_no_copy_of_the_rows_of_a_buffer(tmp_path: Path) -> None:
    buffer = TensorBuffer(1000, seed=0)
    buffer.push({"x": torch.zeros(1000, 3000)})
    snapshots = SnapshotSaver(tmp_path, parts={"buffer": buffer})
    with Task(OnlineRLContext()) as task:
        task.use(snapshots)
        tracemalloc.start()
        try:
            task.check()
            snapshots.save(task)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 0.2 * buffer.nbytes


def test_buffer_policy_and_envs_are_saved_without_being_named(tmp_path: Path) -> None:
    run = DQNRun(tmp_path)
    with run.task:
        run.task.run(max_step=3)
        path = run.snapshots.save(run.task)
    assert sorted(load_checkpoint(path)["parts"]) == [
        "DataPusher.buffer",
        "InteractionEvaluator.env_manager",
        "OffPolicyLearner.learner",
    ]


class Counts(BaseMiddleware[Any]):
    """A middleware of one role, with a state and a part of its own."""

    def __init__(self, role: str) -> None:
        self.roles = (role,)
        self.n = 0
        self.part = Component()
        self.snapshot_parts = {"part": self.part}

    def setup(self, task: Task[Any]) -> None: ...

    def __call__(self, ctx: Any) -> None:
        self.n += 1
        self.part.n += 10

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


class Component:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


class Collects(Counts): ...


class Learns(Counts): ...


class Evaluates(Counts): ...


class Labels(Counts): ...


KINDS = {"collector": Collects, "learner": Learns, "evaluator": Evaluates, "labeller": Labels}
LAYOUTS = [
    (),
    ("learner",),
    ("learner", "collector"),
    ("evaluator", "learner"),
    ("learner", "labeller"),
]


def layout(
    folder: Path, roles: tuple[str, ...], kinds: dict[str, Any] = KINDS
) -> tuple[Task[Any], SnapshotSaver, dict[str, Counts]]:
    """Return the task of a process with these roles; each role has two middleware of one class."""
    chain = {f"{role} {k}": kind(role) for role, kind in kinds.items() for k in range(2)}
    snapshots = SnapshotSaver(folder)
    task = Task(roles=roles)
    for one in chain.values():
        task.use(one)
    return task.use(snapshots), snapshots, chain


@pytest.mark.parametrize("resumed", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_snapshot_can_be_resumed_by_a_process_with_other_roles(
    tmp_path: Path, saved: tuple[str, ...], resumed: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    task, snapshots, _ = layout(tmp_path, saved)
    with task:
        task.run(max_step=3)
        snapshots.save(task)
    task, snapshots, chain = layout(tmp_path, resumed)
    with task, caplog.at_level(logging.WARNING):
        assert snapshots.resume(task)
        task.run(max_step=1)
    for name, one in chain.items():
        role = name.split()[0]
        before = 3 if not saved or role in saved else 0
        expected = before + 1 if not resumed or role in resumed else 0
        assert (one.n, one.part.n) == (expected, 10 * expected), name
    assert task.ctx.total_step == 3
    assert ("other roles" in caplog.text) == (set(saved) != set(resumed))


@pytest.mark.parametrize("roles", [((), ("learner",)), (("learner",), ()), ((), ())])
@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({**KINDS, "learner": Labels}, r"it lacks Labels|Learns\.part"),
        ({"learner": Learns}, "Collects|Evaluates"),
    ],
)
def test_a_chain_with_other_middleware_is_refused_whatever_the_roles(
    tmp_path: Path, kinds: dict[str, Any], message: str, roles: Any
) -> None:
    saved, resumed = roles
    task, snapshots, _ = layout(tmp_path, saved)
    with task:
        task.run(max_step=1)
        snapshots.save(task)
    task, snapshots, _ = layout(tmp_path, resumed, kinds)
    if saved == ("learner",) and kinds == {"learner": Learns}:
        with task:  # it has all that was saved
            assert snapshots.resume(task)
        return
    with task, pytest.raises(CheckpointMismatch, match=message):
        snapshots.resume(task)


def test_the_error_names_both_chains_and_the_command_for_other_roles(tmp_path: Path) -> None:
    class Before(Notes): ...

    class After(Notes): ...

    for kind, roles in ((Before, ["learner"]), (After, [])):
        snapshots = SnapshotSaver(tmp_path)
        with Task(roles=roles) as task:
            notes = kind({}, needs_setup=False)
            task.use(notes, roles=["learner"]).use(snapshots)
            if kind is Before:
                task.run(max_step=1)
                snapshots.save(task)
                continue
            with pytest.raises(CheckpointMismatch) as raised:
                snapshots.resume(task)
    assert "if Before was renamed to After, use the old name" in str(raised.value)
    assert "ditask, as in --roles learner=1" in "".join(raised.value.__notes__)


def test_middleware_in_another_order_are_restored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class First(Counts): ...

    class Second(Counts): ...

    first, second = First("learner"), Second("learner")
    for order in ((first, second), (second, first)):
        snapshots = SnapshotSaver(tmp_path)
        with Task() as task, caplog.at_level(logging.WARNING):
            task.use(order[0]).use(order[1]).use(snapshots)
            resumed = snapshots.resume(task)
            task.run(max_step=1)
            snapshots.save(task)
    assert resumed and (first.n, second.n) == (2, 2)
    assert "then: First, Second; now: Second, First" in caplog.text


def train_together(
    task: Task[Any], folder: Path, *, max_train_iter: int, every_train_iter: int | None = None
) -> tuple[bool, int, int]:
    """Train as one of several nodes, or alone; return where it began and ended."""
    policy = DQNPolicy(
        {
            "seed": 0,
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
            "batch_size": 8,
            "eps": Schedule.linear(1.0, 0.05, decay=100),
        }
    )
    buffer = TensorBuffer(500, seed=0)
    snapshots = SnapshotSaver(folder, every_train_iter=every_train_iter)
    task.use(ContextExchanger()).use(ModelExchanger(policy))
    task.use(eps_greedy_handler(policy))
    task.use(StepCollector(policy, make_env_manager("CartPole-v1", env_num=2, seed=0), n_sample=8))
    task.use(data_pusher(buffer))
    task.use(OffPolicyLearner(policy, buffer, update_per_collect=2))
    envs = make_env_manager("CartPole-v1", env_num=2, seed=1)
    task.use(interaction_evaluator(policy, envs, n_episode=2, every_train_iter=4)).use(snapshots)
    task.use(termination_checker(max_train_iter=max_train_iter))
    resumed = snapshots.resume(task)
    begin = task.ctx.train_iter
    task.run()
    return resumed, begin, task.ctx.train_iter


@pytest.mark.parametrize("n_collectors", [1, 2])
def test_runs_of_one_and_of_several_processes_resume_each_other(
    tmp_path: Path, n_collectors: int
) -> None:
    def together(limit: int, n: int) -> Any:
        (tmp_path / f"{limit}").mkdir()
        program = functools.partial(train_together, folder=tmp_path / "run", max_train_iter=limit)
        roles = "learner", *["collector"] * n, "evaluator"
        return run_nodes(tmp_path / f"{limit}", *((role, program) for role in roles))[0]

    def alone(limit: int) -> Any:
        with Task(seed=0) as task:
            return train_together(task, tmp_path / "run", max_train_iter=limit)

    assert together(8, n_collectors) == (False, 0, 8)
    assert alone(16) == (True, 8, 16)
    assert together(24, 3 - n_collectors) == (True, 16, 24)
    assert together(32, n_collectors) == (True, 24, 32)
