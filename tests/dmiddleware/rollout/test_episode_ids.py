"""Rows of different episodes are never linked, even if several collectors made them."""

from __future__ import annotations

import pytest
import torch

from dmiddleware.data import TensorBuffer, cat
from dmiddleware.pipeline import Task
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from middleware import OnlineRLContext, StepCollector

LENGTHS = [(5,), (3, 7), (4, 2, 9)]


@pytest.fixture
def buffer():
    return TensorBuffer(5000, n_step=3, discount=0.5, seed=0)


def count_wrong_links(buffer):
    """Count the rows whose n-step successor is not ``n`` steps later in the same episode."""
    rows = buffer.sample(buffer.count())
    n_steps = -torch.log2(rows["discount"])
    expected = rows["obs"].clone()
    expected[:, 2] += n_steps
    return int((rows["next_obs"] != expected).any(-1).sum())


def test_rows_of_two_collectors_are_not_linked(counting_envs, batched_policy, buffer):
    collectors = [
        RolloutCollector(batched_policy, counting_envs(LENGTHS, first_index=first))
        for first in (0, 10)
    ]
    for _ in range(100):
        for collector in collectors:
            buffer.push(collector.collect(6))
    assert count_wrong_links(buffer) == 0


def test_rows_of_two_collectors_of_one_chain_are_not_linked(counting_envs, batched_policy, buffer):
    with Task(ctx=OnlineRLContext()) as task:
        for first in (0, 10):
            envs = counting_envs(LENGTHS, first_index=first)
            task.use(StepCollector(batched_policy, envs, n_sample=6))
            task.use(lambda ctx: buffer.push(ctx.trajectories))
        task.run(max_step=100)
    assert count_wrong_links(buffer) == 0


@pytest.mark.parametrize("shares_envs", [True, False])
@pytest.mark.parametrize("n_warm_up", [6, 25, 60])
def test_rows_of_a_warm_up_are_not_linked_to_those_of_the_run(
    counting_envs, batched_policy, buffer, n_warm_up, shares_envs
):
    envs = counting_envs([(9,), (8,), (7,)])
    buffer.push(RolloutCollector(batched_policy, envs).collect(n_warm_up))
    if not shares_envs:
        envs = counting_envs([(9,), (8,), (7,)], first_index=10)
    with Task(ctx=OnlineRLContext()) as task:
        task.use(StepCollector(batched_policy, envs, n_sample=6))
        task.use(lambda ctx: buffer.push(ctx.trajectories))
        task.run(max_step=50)
    assert count_wrong_links(buffer) == 0


def test_rows_of_a_new_run_are_not_linked_to_those_of_a_restored_buffer(
    counting_envs, batched_policy, buffer
):
    buffer.push(RolloutCollector(batched_policy, counting_envs(LENGTHS)).collect(6))
    restored = TensorBuffer(5000, n_step=3, discount=0.5, seed=0)
    restored.load_state_dict(buffer.state_dict())
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS, first_index=10))
    for _ in range(20):
        restored.push(collector.collect(6))
    assert count_wrong_links(restored) == 0


@pytest.mark.parametrize("mode", ["sync", "NextStep", "SameStep", "Disabled"])
def test_rows_before_and_after_an_evaluation_in_the_same_envs_are_not_linked(
    counting_envs, lockstep_envs, batched_policy, buffer, mode
):
    envs = counting_envs(LENGTHS) if mode == "sync" else lockstep_envs(LENGTHS, mode)
    collector = RolloutCollector(batched_policy, envs)
    for n_collected in range(1, 40):
        buffer.push(collector.collect(n_collected))
        evaluate_episodes(batched_policy, envs, 3)
    assert count_wrong_links(buffer) == 0


def test_episodes_start_again_once_others_have_stepped_or_reset_the_envs(
    counting_envs, batched_policy
):
    envs = counting_envs([(9,), (9,)])
    collector = RolloutCollector(batched_policy, envs)
    batches = [collector.collect(4)]
    envs.step(envs.sample_actions())
    batches.append(collector.collect(4))
    envs.reset([1])
    batches.append(collector.collect(4))
    for batch in batches:
        assert batch["obs"][..., 2].tolist() == [[0, 0], [1, 1]]
        assert batch["memory"].tolist() == [[1, 1], [2, 2]]
    assert len(cat(batches)["episode_id"].unique()) == 6


def test_rows_that_wait_are_dropped_and_counted_once_others_have_stepped_the_envs(
    counting_envs, batched_policy
):
    envs = counting_envs([(9,), (9,)])
    collector = RolloutCollector(batched_policy, envs)
    with pytest.raises(ArithmeticError):
        collector.collect(8, policy_kwargs={"fail_at": 3})
    assert (collector.waiting_steps, collector.dropped_steps) == (6, 0)
    evaluate_episodes(batched_policy, envs, 2)
    assert collector.collect(2)["obs"][0, :, 2].tolist() == [0, 0]
    assert (collector.waiting_steps, collector.dropped_steps) == (0, 6)


def test_ids_are_never_negative_and_continue_in_a_restored_collector(counting_envs, batched_policy):
    collector = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    assert (collector.collect(60)["episode_id"] >= 0).all()
    other = RolloutCollector(batched_policy, counting_envs(LENGTHS))
    other.load_state_dict(collector.state_dict())
    assert torch.equal(other.collect(60)["episode_id"], collector.collect(60)["episode_id"])
