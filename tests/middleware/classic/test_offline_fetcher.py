from pathlib import Path
from typing import Any

import pytest

from dmiddleware.data import OfflineDataset
from dmiddleware.errors import ChainError, ConfigError, NotEnoughData
from dmiddleware.pipeline import Task
from dmiddleware.policy import BCPolicy, DQNPolicy
from middleware import (
    OfflineRLContext,
    Role,
    nstep_reward_enhancer,
    offline_data_saver,
    termination_checker,
)
from middleware.classic import offline_data_fetcher, trainer
from tests.middleware.offline_rows import MODEL, collector_of_two, ten_rows


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    with OfflineDataset(ten_rows(tmp_path)) as opened:
        yield opened


def fetched(dataset: OfflineDataset, n_steps: int, *, seed: int = 0, state: Any = None) -> Any:
    seen = []

    def note(ctx: OfflineRLContext) -> None:
        seen.append(ctx.train_data["row"].tolist())

    with Task(OfflineRLContext(), seed=seed) as task:
        task.use(offline_data_fetcher(dataset, batch_size=5)).use(note)
        if state is not None:
            task.load_state_dict(state)
        task.run(max_step=n_steps)
        return seen, task.ctx, task.state_dict()


def test_every_epoch_sees_all_rows_in_a_new_order(dataset: OfflineDataset) -> None:
    seen, ctx, _ = fetched(dataset, 4)
    epochs = [seen[0] + seen[1], seen[2] + seen[3]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert ctx.train_epoch == 2
    assert ctx.trained_env_step == 20


def test_order_follows_the_seed_of_the_task(dataset: OfflineDataset) -> None:
    assert fetched(dataset, 2, seed=1)[0] == fetched(dataset, 2, seed=1)[0]
    assert fetched(dataset, 2, seed=1)[0] != fetched(dataset, 2, seed=2)[0]


def test_resumed_run_continues_with_the_same_minibatches(
    dataset: OfflineDataset,
) -> None:
    whole, _, _ = fetched(dataset, 7)
    begin, _, state = fetched(dataset, 3)
    rest, ctx, _ = fetched(dataset, 4, state=state)
    assert begin + rest == whole
    assert ctx.trained_env_step == 35


def test_cloning_learns_from_a_dataset(dataset: OfflineDataset) -> None:
    policy = BCPolicy({"seed": 0, "learning_rate": 0.05, "model": MODEL})
    accuracy = []

    def note(ctx: OfflineRLContext) -> None:
        accuracy.append(ctx.train_output["accuracy"])

    with Task(OfflineRLContext()) as task:
        task.use(offline_data_fetcher(dataset, batch_size=5)).use(trainer(policy.learn_mode))
        task.use(note).use(termination_checker(max_train_epoch=60))
        task.run()
        assert task.ctx.train_iter == 120
    assert sum(accuracy[-10:]) == 10.0


@pytest.mark.parametrize("nstep", [1, 3])
@pytest.mark.parametrize("saves_n_step", [False, True])
def test_a_policy_for_n_step_returns_needs_them_in_the_dataset(
    run_steps: Any, tmp_path: Path, nstep: int, saves_n_step: bool
) -> None:
    policy = DQNPolicy({"n_step": nstep, "model": MODEL})
    path = tmp_path / "rows.safetensors"
    enhancers = [nstep_reward_enhancer(policy)] if saves_n_step else []
    run_steps(collector_of_two(), *enhancers, offline_data_saver(path))
    with OfflineDataset(path) as dataset:
        chain = [offline_data_fetcher(dataset, batch_size=5), trainer(policy)]
        if nstep == 1 or saves_n_step:
            assert run_steps(*chain, ctx=OfflineRLContext()).train_iter == 1
            return
        with pytest.raises(ChainError, match=r"n_step=3, but nothing .* computes n-step returns"):
            run_steps(*chain, ctx=OfflineRLContext())


def test_dataset_smaller_than_a_minibatch_is_rejected(dataset: OfflineDataset) -> None:
    with pytest.raises(NotEnoughData, match="no minibatch of 11 is full"):
        offline_data_fetcher(dataset, batch_size=11)


def test_argument_that_is_not_a_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="got"):
        offline_data_fetcher("runs/x", batch_size=8)  # type: ignore[arg-type]


def test_a_fetcher_is_active_in_the_role_learner(dataset: OfflineDataset) -> None:
    assert offline_data_fetcher(dataset, batch_size=1).roles == (Role.LEARNER,)
