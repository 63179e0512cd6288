import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import OfflineDataset
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, ConfigError, NotEnoughData, StructureError
from dmiddleware.pipeline import Task
from dmiddleware.policy import BCPolicy, DQNPolicy
from middleware import (
    OfflineRLContext,
    OnlineRLContext,
    Role,
    nstep_reward_enhancer,
    offline_data_saver,
    termination_checker,
)
from middleware.collect import StepCollector
from middleware.learn import OfflineLearner
from middleware.record.snapshot import SnapshotSaver
from tests.middleware.offline_rows import MODEL, collector_of_two, ten_rows


@pytest.fixture
def collector() -> StepCollector:
    return collector_of_two()


def test_saved_data_can_be_read(run_steps: Any, collector: StepCollector, tmp_path: Path) -> None:
    path = tmp_path / "data" / "expert.safetensors"
    saver = offline_data_saver(path, metadata={"env": "CartPole-v1"})
    ctx = run_steps(collector, saver, n_steps=3)
    assert ctx.logged["data/rows"] == 30
    with OfflineDataset(path) as dataset:
        assert len(dataset) == 30
        assert dataset.metadata == {"env": "CartPole-v1"}
        assert {"obs", "action", "reward", "logit"} <= set(dataset.leaves)


def test_columns_may_be_chosen(run_steps: Any, collector: StepCollector, tmp_path: Path) -> None:
    path = tmp_path / "expert.safetensors"
    run_steps(collector, offline_data_saver(path, columns=["obs", "action", "done"]))
    with OfflineDataset(path) as dataset:
        assert set(dataset.leaves) == {"obs", "action", "done"}


def test_task_stops_when_there_is_enough(collector: StepCollector, tmp_path: Path) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(collector).use(offline_data_saver(tmp_path / "x.safetensors", max_rows=25))
        task.run(max_step=100)
        assert task.ctx.env_step == 30
        assert task.stop_reason == "collected 30 rows (max_rows is 25)"


def test_rows_are_saved_after_an_error_too(
    run_steps: Any, collector: StepCollector, tmp_path: Path
) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        if ctx.env_step == 20:
            raise RuntimeError("no")

    path = tmp_path / "x.safetensors"
    with pytest.raises(RuntimeError, match="no"):
        run_steps(collector, offline_data_saver(path), fail, n_steps=5)
    with OfflineDataset(path) as dataset:
        assert len(dataset) == 20


def test_a_resumed_run_saves_what_was_collected_before_too(
    tmp_path: Path,
) -> None:
    def begin(folder: str) -> tuple[Task[Any], SnapshotSaver]:
        path = tmp_path / folder
        torch.manual_seed(0)
        policy = DQNPolicy({"seed": 0, "model": MODEL})
        snapshots = SnapshotSaver(path, parts={"policy": policy.learn_mode})
        saver = offline_data_saver(path / "data.safetensors", max_rows=60)
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        collector = StepCollector(policy.collect_mode, envs, n_sample=10)
        return Task(OnlineRLContext()).use(collector).use(saver).use(snapshots), snapshots

    whole, _ = begin("whole")
    with whole:
        whole.run()
    stopped, snapshots = begin("run")
    with stopped:
        stopped.run(max_step=2)
        snapshots.save(stopped)
        stopped.run(max_step=1)
    resumed, snapshots = begin("run")
    with resumed:
        assert snapshots.resume(resumed)
        resumed.run()
        assert resumed.ctx.env_step == 60
    with (
        OfflineDataset(tmp_path / "whole" / "data.safetensors") as expected,
        OfflineDataset(tmp_path / "run" / "data.safetensors") as dataset,
    ):
        assert len(dataset) == 60
        for name, column in expected.rows(slice(None)).items():
            found = dataset.rows(slice(None))[name]
            if name == "episode_id":  # unique in each run, so only the episodes' order is equal
                found, column = (
                    one.unique_consecutive(return_inverse=True)[1] for one in (found, column)
                )
            assert torch.equal(found, column)


def test_task_that_collected_nothing_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with Task(OnlineRLContext()) as task:
        task.use(offline_data_saver(path))
    assert not path.exists()


def test_missing_column_is_named(run_steps: Any, collector: StepCollector, tmp_path: Path) -> None:
    saver = offline_data_saver(tmp_path / "x.safetensors", columns=["obs", "values", "done"])
    with pytest.raises(StructureError, match="no column values; they have: action"):
        run_steps(collector, saver)


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_rows must be an integer ≥ 1 or None, got 0"):
        offline_data_saver(tmp_path / "x", max_rows=0)
    with pytest.raises(ValueError, match="columns must be names that include 'done'"):
        offline_data_saver(tmp_path / "x", columns=["obs"])


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    with OfflineDataset(ten_rows(tmp_path)) as opened:
        yield opened


def learned(dataset: OfflineDataset, n_steps: int, *, seed: int = 0, state: Any = None) -> Any:
    seen: list[list[int]] = []

    def forward(batch: Any) -> dict[str, float]:
        seen.append(batch["row"].tolist())
        return {"total_loss": 0.0}

    policy = BCPolicy({"seed": 0, "model": MODEL, "batch_size": 5})
    mode = dataclasses.replace(policy.learn_mode, forward=forward)
    with Task(OfflineRLContext(), seed=seed) as task:
        task.use(OfflineLearner(mode, dataset))
        if state is not None:
            task.load_state_dict(state)
        task.run(max_step=n_steps)
        return seen, task.ctx, task.state_dict()


def test_every_epoch_learns_from_all_rows_in_a_new_order(dataset: OfflineDataset) -> None:
    seen, ctx, _ = learned(dataset, 4)
    epochs = [seen[0] + seen[1], seen[2] + seen[3]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert (ctx.train_epoch, ctx.train_iter, ctx.trained_env_step) == (2, 4, 20)


def test_order_follows_the_seed_of_the_task(dataset: OfflineDataset) -> None:
    assert learned(dataset, 2, seed=1)[0] == learned(dataset, 2, seed=1)[0]
    assert learned(dataset, 2, seed=1)[0] != learned(dataset, 2, seed=2)[0]


def test_resumed_run_continues_with_the_same_minibatches(dataset: OfflineDataset) -> None:
    whole, _, _ = learned(dataset, 7)
    begin, _, state = learned(dataset, 3)
    rest, ctx, _ = learned(dataset, 4, state=state)
    assert begin + rest == whole
    assert ctx.trained_env_step == 35


def test_cloning_learns_from_a_dataset(dataset: OfflineDataset) -> None:
    learn = {"learning_rate": 0.05, "batch_size": 5}
    policy = BCPolicy({"seed": 0, **learn, "model": MODEL})
    accuracy = []

    def note(ctx: OfflineRLContext) -> None:
        accuracy.extend(output["accuracy"] for output in ctx.train_output)

    with Task(OfflineRLContext()) as task:
        task.use(OfflineLearner(policy, dataset)).use(note)
        task.use(termination_checker(max_train_epoch=60))
        task.run()
        assert task.ctx.train_iter == 120
    assert sum(accuracy[-10:]) == 10.0


@pytest.mark.parametrize("nstep", [1, 3])
@pytest.mark.parametrize("saves_n_step", [False, True])
def test_a_policy_for_n_step_returns_needs_them_in_the_dataset(
    run_steps: Any, collector: StepCollector, tmp_path: Path, nstep: int, saves_n_step: bool
) -> None:
    policy = DQNPolicy({"n_step": nstep, "model": MODEL, "batch_size": 5})
    path = tmp_path / "rows.safetensors"
    enhancers = [nstep_reward_enhancer(policy)] if saves_n_step else []
    run_steps(collector, *enhancers, offline_data_saver(path))
    with OfflineDataset(path) as dataset:
        learner = OfflineLearner(policy, dataset)
        if nstep == 1 or saves_n_step:
            assert run_steps(learner, ctx=OfflineRLContext()).train_iter == 1
            return
        with pytest.raises(ChainError, match=r"n_step=3, but nothing .* computes n-step returns"):
            run_steps(learner, ctx=OfflineRLContext())


def test_dataset_smaller_than_a_minibatch_is_rejected(dataset: OfflineDataset) -> None:
    policy = BCPolicy({"seed": 0, "model": MODEL, "batch_size": 11})
    with pytest.raises(NotEnoughData, match="no minibatch of 11 is full"):
        OfflineLearner(policy, dataset)


def test_argument_that_is_not_a_dataset_is_rejected() -> None:
    policy = BCPolicy({"seed": 0, "model": MODEL})
    with pytest.raises(ConfigError, match=r"got 'rows\.safetensors'"):
        OfflineLearner(policy, "rows.safetensors")  # type: ignore[arg-type]


def test_offline_middleware_are_active_in_their_roles(
    dataset: OfflineDataset, tmp_path: Path
) -> None:
    policy = BCPolicy({"seed": 0, "model": MODEL, "batch_size": 1})
    learner = OfflineLearner(policy, dataset)
    assert learner.roles == (Role.LEARNER,)
    assert offline_data_saver(tmp_path / "x").roles == (Role.COLLECTOR,)
