"""Two replay buffers in one draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import MixedReplay, PrioritySampler, ReplayBuffer, TensorBuffer, as_tree
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError
from dmiddleware.policy import SQLPolicy
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import Batch


def rows(n: int, mark: float, **columns: Any) -> Batch:
    """Return an episode of rows whose observations are a mark."""
    obs = torch.full((n, 2), mark)
    return as_tree(
        {
            "obs": obs,
            "next_obs": obs,
            "action": torch.arange(n) % 2,
            "reward": torch.full((n,), 7.0),
            "terminated": torch.arange(n) == n - 1,
            "truncated": torch.zeros(n, dtype=torch.bool),
            "done": torch.arange(n) == n - 1,
            "episode_id": torch.zeros(n, dtype=torch.int64),
            **columns,
        }
    )


def mixed(shown: Batch | ReplayBuffer, **options: Any) -> MixedReplay:
    buffer = MixedReplay(TensorBuffer(100, seed=0), shown, **options)
    buffer.push(rows(50, 0.0))
    return buffer


def draw(buffer: MixedReplay, n: int, **counts: float) -> Batch:
    """Return one sample."""
    counters = Counters(**counts) if counts else None
    return buffer.sample_ahead(n, at_most=1, counters=counters)[0]


@pytest.mark.parametrize(
    ("share", "n_shown"), [(0.5, 8), (0.25, 4), (0.01, 1), (0.99, 15), (0.0, 0), (1.0, 16)]
)
def test_a_share_of_each_sample_are_demonstrations(share: float, n_shown: int) -> None:
    sample = draw(mixed(rows(20, 1.0), share=share), 16)
    assert sample["is_expert"].sum() == n_shown
    assert torch.equal(sample["obs"][:, 0], sample["is_expert"].float())
    assert (sample["reward"] == 7.0).all()


def test_only_demonstrations_have_a_reward_in_sqil() -> None:
    sample = draw(mixed(rows(20, 1.0), reward="sqil"), 16)
    assert torch.equal(sample["reward"], sample["is_expert"].float())


def test_demonstrations_have_the_n_step_returns_of_the_policy() -> None:
    buffer = MixedReplay(TensorBuffer(100, seed=0), rows(20, 1.0), reward="sqil")
    buffer.bind(n_step=3, discount=0.5, burn_in=None, start_columns=())
    buffer.push(rows(50, 0.0))
    sample = draw(buffer, 40)
    shown = sample["is_expert"]
    assert set(sample["reward"][shown].tolist()) <= {1.0, 1.5, 1.75}
    assert 1.75 in sample["reward"][shown].tolist()
    assert (sample["reward"][~shown] == 0.0).all()
    by_reward = {1.0: 0.5, 1.5: 0.25, 1.75: 0.125}
    expected = [by_reward[reward] for reward in sample["reward"][shown].tolist()]
    assert sample["discount"][shown].tolist() == expected


def test_a_run_that_is_resumed_draws_the_same_from_both() -> None:
    buffer = mixed(
        rows(20, 1.0, obs=torch.rand(20, 2)), share=Schedule.linear(0.9, 0.1, decay=10, by="update")
    )
    draw(buffer, 8, update=5)
    state = buffer.state_dict()
    drawn = draw(buffer, 8)
    other = mixed(rows(20, 2.0), share=Schedule.linear(0.9, 0.1, decay=10, by="update"))
    other.load_state_dict(state)
    again = draw(other, 8)
    assert drawn["is_expert"].sum() == 4
    assert torch.equal(again["obs"], drawn["obs"])
    assert torch.equal(again["index"], drawn["index"])
    with pytest.raises(CheckpointMismatch, match="MixedReplay"):
        other.load_state_dict(state["own"])


def test_several_batches_may_be_drawn_ahead() -> None:
    drawn = mixed(rows(20, 1.0)).sample_ahead(8, at_most=3)
    assert [batch["is_expert"].sum() for batch in drawn] == [4] * len(drawn)
    assert len(drawn) == 3
    only_shown = mixed(rows(20, 1.0), share=1.0).sample_ahead(8, at_most=3)
    assert all(batch["is_expert"].all() for batch in only_shown)


def test_columns_that_one_side_lacks_are_left_out() -> None:
    buffer = MixedReplay(TensorBuffer(100, seed=0), rows(20, 1.0, step=torch.zeros(20)))
    buffer.push(rows(50, 0.0, logit=torch.zeros(50, 2)))
    assert {"logit", "step"}.isdisjoint(draw(buffer, 8).keys())


def test_a_chain_learns_offline_first_and_then_online() -> None:
    """The share is 1 until the 10th update; nothing of the own rows is needed before."""
    share = Schedule.piecewise([(0, 1.0), (10, 1.0), (11, 0.25)], by="update")
    buffer = MixedReplay(TensorBuffer(100, seed=0), rows(20, 1.0), share=share)
    assert len(buffer) == 20
    assert draw(buffer, 8, update=10)["is_expert"].all()
    with pytest.raises(NotEnoughData):
        draw(buffer, 8, update=11)
    assert len(buffer) == 0
    buffer.push(rows(50, 0.0))
    assert len(buffer) == 50
    assert draw(buffer, 8, update=11)["is_expert"].sum() == 2
    assert buffer.schedules == {"share": share}


def test_priorities_return_to_the_buffer_from_which_a_row_was_drawn() -> None:
    own = TensorBuffer(100, sampler=PrioritySampler(alpha=1.0, beta=1.0), seed=0)
    shown = TensorBuffer(20, sampler=PrioritySampler(alpha=1.0, beta=1.0), seed=1)
    shown.push(rows(20, 1.0))
    buffer = MixedReplay(own, shown)
    buffer.push(rows(50, 0.0))
    assert buffer.lacks_priorities
    index = torch.arange(-20, 50)
    only = torch.zeros(70)
    only[[3, 20 + 8]] = 1.0  # row 16 of the demonstrations, whose index is -17, and own row 8
    assert buffer.update_priority(index, only) == 70
    assert not buffer.lacks_priorities
    sample = draw(buffer, 8)
    assert sample["index"].tolist() == [8] * 4 + [-17] * 4
    assert shown.sample(1)["index"].tolist() == [16]


def test_rows_without_weights_count_fully_beside_weighted_ones() -> None:
    own = TensorBuffer(100, sampler=PrioritySampler(alpha=1.0, beta=1.0), seed=0)
    buffer = MixedReplay(own, rows(20, 1.0))
    buffer.push(rows(50, 0.0))
    buffer.update_priority(torch.arange(50), torch.arange(1.0, 51.0))
    sample = draw(buffer, 8)
    assert (sample["weight"][sample["is_expert"]] == 1.0).all()
    assert (sample["weight"][~sample["is_expert"]] < 1.0).any()
    assert buffer.update_priority(sample["index"], torch.ones(8)) == 4


def test_demonstrations_may_have_priorities_beside_rows_without_them() -> None:
    shown = TensorBuffer(20, sampler=PrioritySampler(alpha=1.0, beta=1.0), seed=1)
    shown.push(rows(20, 1.0))
    buffer = mixed(shown)
    sample = draw(buffer, 8)
    assert (sample["weight"][~sample["is_expert"]] == 1.0).all()
    assert buffer.update_priority(sample["index"], torch.full((8,), 9.0)) == 4
    assert (draw(buffer, 8)["weight"][-4:] < 1.0).any()


@pytest.mark.parametrize(
    ("column", "shown", "own"),
    [
        ("obs", torch.full((20, 2), 0.5), torch.zeros(50, 2, dtype=torch.uint8)),
        ("obs", torch.full((20, 2), 300), torch.zeros(50, 2, dtype=torch.uint8)),
        ("action", torch.full((20,), 0.25), torch.zeros(50, dtype=torch.int64)),
        ("action", torch.full((20,), torch.nan), torch.zeros(50, dtype=torch.int64)),
        ("terminated", torch.full((20,), 0.5), torch.zeros(50, dtype=torch.bool)),
    ],
)
def test_a_value_that_a_column_of_integers_cannot_hold_is_refused(column, shown, own) -> None:
    buffer = MixedReplay(TensorBuffer(100, seed=0), rows(20, 1.0, **{column: shown}))
    buffer.push(rows(50, 0.0, **{column: own}))
    with pytest.raises(StructureError, match=rf"{column} .* has the value {shown.flatten()[0]}"):
        draw(buffer, 8)


def test_numbers_of_another_dtype_are_converted() -> None:
    flags = {"action": torch.ones(20, dtype=torch.float64), "terminated": torch.ones(20)}
    sample = draw(mixed(rows(20, 1.0, reward=torch.arange(20), **flags)), 8)
    assert sample["action"].dtype == torch.int64
    assert sample["terminated"].dtype == torch.bool
    assert sample["reward"].dtype == torch.float32
    assert sample["terminated"][-4:].all()


def test_sequences_come_from_both() -> None:
    own = TensorBuffer(100, unroll_len=4, seed=0)
    buffer = MixedReplay(own, rows(20, 1.0, state=torch.ones(20, 3)))
    buffer.bind(n_step=1, discount=0.9, burn_in=2, start_columns=("state",))
    buffer.push(rows(50, 0.0, state=torch.zeros(50, 3)))
    sample = draw(buffer, 8)
    assert sample["obs"].shape == (6, 8, 2)
    assert sample["state"].shape == (8, 3)
    assert sample["index"].shape == (8,)
    assert torch.equal(sample["state"][:, 0], sample["is_expert"][0].float())
    assert torch.equal(sample["obs"][..., 0], sample["is_expert"].float())


def test_what_cannot_work_is_refused() -> None:
    shown, own = rows(20, 1.0), TensorBuffer(100)
    with pytest.raises(StructureError, match="next_obs"):
        mixed(as_tree({"obs": torch.zeros(3, 2), "action": torch.zeros(3)}))
    with pytest.raises(ConfigError, match="share"):
        mixed(shown, share=1.5)
    with pytest.raises(ConfigError, match="is empty"):
        MixedReplay(own, TensorBuffer(10))
    with pytest.raises(ConfigError, match="is the other one"):
        MixedReplay(own, own)
    with pytest.raises(ConfigError, match="own must be a buffer"):
        MixedReplay(shown, shown)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch of rows, .*as_tree.*, or a buffer"):
        MixedReplay(own, {"obs": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no rows"):
        mixed(rows(0, 1.0))
    filled = TensorBuffer(20)
    filled.push(shown)
    with pytest.raises(ConfigError, match="unroll_len=4 and None"):
        MixedReplay(TensorBuffer(100, unroll_len=4), filled)
    with pytest.raises(ConfigError, match="give rows"):
        MixedReplay(own, filled, reward="sqil")
    with pytest.raises(ConfigError, match=r"takes 25 demonstrations.* 20"):
        draw(mixed(shown), 50)
    with pytest.raises(StructureError, match="obs"):
        draw(mixed(rows(20, 1.0, obs=torch.zeros(20, 3))), 8)


def test_a_policy_learns_what_is_shown() -> None:
    """The expert always takes action 1, and the policy took both."""
    policy = SQLPolicy(
        {"model": {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [8]}, "seed": 0,
         "learning_rate": 0.01, "target_update_freq": 10, "discount": 0.9}
    )  # fmt: skip
    shown = rows(20, 0.0, action=torch.ones(20, dtype=torch.int64))
    buffer = mixed(shown, reward="sqil")
    for _ in range(150):
        policy.learn_mode.forward(draw(buffer, 32))
    drawn = policy.collect_mode.forward(torch.zeros(200, 2))["action"]
    assert drawn.float().mean() > 0.9
