import dataclasses
from typing import Any

import pytest

from dmiddleware.data import PrioritySampler
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from middleware import OnlineRLContext, Role
from middleware.classic import multistep_trainer, offpolicy_data_fetcher, trainer
from tests.middleware.classic.fresh_rows import fresh
from tests.middleware.small_dqn import SMALL, filled


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(SMALL)


def test_trainer_learns_from_what_was_fetched(run_steps: Any, dqn: DQNPolicy) -> None:
    ctx = run_steps(
        offpolicy_data_fetcher(filled(), batch_size=16), trainer(dqn.learn_mode), n_steps=3
    )
    assert ctx.train_iter == 3
    assert ctx.train_data["obs"].shape == (16, 4)
    assert ctx.train_output["total_loss"] > 0


def test_trainer_waits_while_the_buffer_fills(run_steps: Any, dqn: DQNPolicy) -> None:
    fetcher = offpolicy_data_fetcher(filled(20), batch_size=16, learn_start=21)
    ctx = run_steps(fetcher, trainer(dqn.learn_mode))
    assert (ctx.train_iter, ctx.train_data, ctx.train_output) == (0, None, None)


def test_fetcher_writes_priorities_to_the_buffer(run_steps: Any, dqn: DQNPolicy) -> None:
    buffer = filled(4, sampler=PrioritySampler(alpha=1.0))
    ctx = run_steps(
        offpolicy_data_fetcher(buffer, batch_size=4), trainer(dqn.learn_mode), n_steps=20
    )
    assert len(buffer.sample(4)["weight"].unique()) > 1
    assert "priority" not in ctx.train_output


def test_fetcher_takes_samples_of_a_deque_buffer(run_steps: Any, dqn: DQNPolicy) -> None:
    ctx = run_steps(offpolicy_data_fetcher(fresh(64), batch_size=16), trainer(dqn.learn_mode))
    assert ctx.train_data["obs"].shape == (16, 4)
    assert ctx.train_iter == 1


def test_fetcher_passes_the_iteration_to_the_buffer(run_steps: Any, dqn: DQNPolicy) -> None:
    fetcher = offpolicy_data_fetcher(fresh(64), batch_size=16)
    assert run_steps(fetcher, trainer(dqn.learn_mode), n_steps=2).train_iter == 2


def test_fetcher_asks_for_a_trainer(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(offpolicy_data_fetcher(filled(), batch_size=4))
        with pytest.raises(ValueError, match=r"reads ctx\.train_output"):
            task.run(max_step=1)


def test_fetcher_rejects_a_start_that_is_never_reached() -> None:
    with pytest.raises(ValueError, match=r"at most the buffer's size \(1000\).*; got 1001"):
        offpolicy_data_fetcher(filled(), batch_size=8, learn_start=1001)


def test_fetcher_rejects_a_start_below_the_batch_size() -> None:
    with pytest.raises(ValueError, match=r"learn_start must be at least batch_size \(8\), got 7"):
        offpolicy_data_fetcher(filled(), batch_size=8, learn_start=7)


def test_multistep_trainer_counts_every_update_of_a_forward(run_steps: Any, dqn: DQNPolicy) -> None:
    mode = dqn.learn_mode

    def several(batch: Any) -> list[dict[str, Any]]:
        return [mode.forward(batch) for _ in range(3)]

    ctx = run_steps(
        offpolicy_data_fetcher(filled(), batch_size=16),
        multistep_trainer(dataclasses.replace(mode, forward=several)),
        n_steps=2,
    )
    assert ctx.train_iter == 6
    assert len(ctx.train_output) == 3


@pytest.mark.parametrize("n_outputs", [0, 2])
def test_trainer_rejects_a_forward_that_makes_several_updates(
    run_steps: Any, dqn: DQNPolicy, n_outputs: int
) -> None:
    mode = dataclasses.replace(
        dqn.learn_mode, forward=lambda batch: [{"total_loss": 0.0}] * n_outputs
    )
    with pytest.raises(PolicyOutputError, match=rf"{n_outputs} outputs.*MultistepTrainer"):
        run_steps(offpolicy_data_fetcher(filled(), batch_size=16), trainer(mode))


def test_trainer_skips_a_step_without_enough_usable_rows(run_steps: Any, dqn: DQNPolicy) -> None:
    fetcher = offpolicy_data_fetcher(fresh(64), batch_size=16)
    ctx = run_steps(fetcher, trainer(dqn), ctx=OnlineRLContext(train_iter=20))
    assert ctx.train_iter == 20
    assert ctx.train_data is None


def test_argument_that_is_not_a_buffer_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be a TensorBuffer"):
        offpolicy_data_fetcher([], batch_size=16)  # type: ignore[arg-type]


def test_trainers_are_active_in_the_role_learner(dqn: DQNPolicy) -> None:
    mode = dqn.learn_mode
    fetcher = offpolicy_data_fetcher(filled(), batch_size=1)
    for one in (trainer(mode), multistep_trainer(mode), fetcher):
        assert one.roles == (Role.LEARNER,)  # type: ignore[union-attr]
