import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import CheckpointMismatch, NonFiniteData, StructureError
from dmiddleware.rl import RewardNormalizer, RunningMeanStd


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    shape=st.sampled_from([(), (3,), (2, 3)]),
    offset=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_statistics_of_batches_equal_those_of_everything_at_once(sizes, shape, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    stats = RunningMeanStd(shape)
    batches = [torch.randn(n, *shape, generator=generator) + offset for n in sizes]
    for batch in batches:
        stats.update(batch)
    everything = torch.cat(batches).double().numpy()
    assert stats.count == len(everything)
    if len(everything):
        np.testing.assert_allclose(stats.mean.numpy(), everything.mean(0), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(stats.var.numpy(), everything.var(0), rtol=1e-6, atol=1e-9)


def test_leading_dimensions_are_all_items():
    batch = torch.randn(5, 4, 3)
    flat, nested = RunningMeanStd((3,)), RunningMeanStd((3,))
    flat.update(batch.reshape(20, 3))
    nested.update(batch)
    assert torch.equal(flat.mean, nested.mean)
    assert nested.count == 20


def test_normalized_items_have_mean_zero_and_deviation_one():
    batch = torch.randn(10_000, 2) * torch.tensor([3.0, 0.1]) + 50.0
    stats = RunningMeanStd((2,))
    stats.update(batch)
    scaled = stats.normalize(batch)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(scaled.std(0), torch.ones(2), atol=1e-3, rtol=0)


def test_normalizing_clips_and_leaves_its_input_alone():
    stats = RunningMeanStd(())
    stats.update(torch.tensor([-1.0, 1.0]))
    batch = torch.tensor([100.0, -100.0, 0.5])
    assert stats.normalize(batch, clip=5.0).tolist() == [5.0, -5.0, 0.5]
    assert stats.normalize(batch, clip=None).tolist() == [100.0, -100.0, 0.5]
    assert batch.tolist() == [100.0, -100.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
def test_items_of_any_dtype_are_accepted(dtype):
    stats = RunningMeanStd(())
    stats.update(torch.tensor([0, 2], dtype=dtype))
    scaled = stats.normalize(torch.tensor([0, 1, 2], dtype=dtype))
    assert scaled.tolist() == [-1.0, 0.0, 1.0]
    assert scaled.dtype == torch.float32


def test_flags_count_as_zeros_and_ones():
    stats = RunningMeanStd((2,))
    stats.update(torch.tensor([[True, False], [False, False]]))
    assert stats.normalize(torch.tensor([True, False])).tolist() == [1.0, 0.0]


def test_large_float64_observations_keep_their_precision_until_the_mean_is_subtracted():
    batch = torch.tensor([1e9, 1e9 + 1.0], dtype=torch.float64)
    stats = RunningMeanStd(())
    stats.update(batch)
    torch.testing.assert_close(stats.normalize(batch), torch.tensor([-1.0, 1.0]))


def test_denormalizing_undoes_normalizing():
    batch = torch.randn(100, 2) * 7.0 + 3.0
    stats = RunningMeanStd((2,))
    stats.update(batch)
    restored = stats.denormalize(stats.normalize(batch, clip=None))
    torch.testing.assert_close(restored, batch)


def test_before_the_first_update_nothing_is_scaled():
    batch = torch.tensor([0.5, -2.0])
    torch.testing.assert_close(RunningMeanStd(()).normalize(batch), batch)


def test_a_constant_item_is_normalized_to_zero():
    stats = RunningMeanStd((2,))
    stats.update(torch.full((10, 2), 4.0))
    assert stats.normalize(torch.full((1, 2), 4.0)).tolist() == [[0.0, 0.0]]


def test_items_of_another_shape_are_rejected():
    with pytest.raises(
        StructureError, match=r"shape \(5, 4\) does not end in the item shape \(3,\)"
    ):
        RunningMeanStd((3,)).update(torch.zeros(5, 4))
    with pytest.raises(
        StructureError, match=r"shape \(3,\) does not end in the item shape \(2, 3\)"
    ):
        RunningMeanStd((2, 3)).update(torch.zeros(3))


def test_eps_must_be_positive():
    with pytest.raises(ValueError, match="eps must be a positive number, got 0"):
        RunningMeanStd((), eps=0)


def test_restored_statistics_continue_as_if_never_saved():
    first, second, probe = torch.randn(3, 8, 2)
    stats = RunningMeanStd((2,))
    stats.update(first)
    other = RunningMeanStd((2,))
    other.load_state_dict(stats.state_dict())
    assert torch.equal(stats.normalize(probe), other.normalize(probe))
    for one in (stats, other):
        one.update(second)
    assert torch.equal(stats.normalize(probe), other.normalize(probe))
    assert stats.count == other.count


def test_saved_statistics_do_not_change_with_later_updates():
    stats = RunningMeanStd(())
    stats.update(torch.tensor([1.0, 3.0]))
    saved = stats.state_dict()
    stats.update(torch.tensor([100.0]))
    assert saved["mean"].item() == 2.0
    other = RunningMeanStd(())
    other.load_state_dict(saved)
    other.update(torch.tensor([100.0]))
    assert saved["mean"].item() == 2.0


def test_statistics_of_another_shape_are_not_loaded():
    with pytest.raises(
        CheckpointMismatch, match=r"shape \(2,\), this normalizer is for shape \(3,\)"
    ):
        RunningMeanStd((3,)).load_state_dict(RunningMeanStd((2,)).state_dict())


def literal_returns(reward: torch.Tensor, done: torch.Tensor, discount: float) -> list[float]:
    seen, running = [], [0.0] * reward.shape[1]
    for t in range(reward.shape[0]):
        for e in range(reward.shape[1]):
            running[e] = discount * running[e] + reward[t, e].item()
            seen.append(running[e])
            if done[t, e]:
                running[e] = 0.0
    return seen


def episode_ids(done):
    """Number the episodes of all lanes."""
    ids = torch.zeros(done.shape, dtype=torch.int64)
    ids[1:] = done[:-1].cumsum(0)
    return ids * done.shape[1] + torch.arange(done.shape[1])


@settings(deadline=None, max_examples=40)
@given(
    n_steps=st.integers(1, 20),
    n_envs=st.sampled_from([1, 3, 300]),
    cut=st.integers(0, 20),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_rewards_are_scaled_by_the_deviation_of_returns_however_they_arrive(
    n_steps, n_envs, cut, discount, seed
):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(n_steps, n_envs, generator=generator)
    done = torch.rand(n_steps, n_envs, generator=generator) < 0.2
    expected = np.std(literal_returns(reward, done, discount))

    ids = episode_ids(done)
    by_step, by_block = (RewardNormalizer(discount=discount) for _ in range(2))
    for t in range(n_steps):
        by_step.update(reward[t : t + 1], done[t : t + 1], ids[t : t + 1])
    by_block.update(reward[:cut], done[:cut], ids[:cut])
    by_block.update(reward[cut:], done[cut:], ids[cut:])
    for normalizer in (by_step, by_block):
        assert normalizer.std == pytest.approx(expected, rel=1e-6, abs=2e-4)


def test_scaled_rewards_keep_their_sign_and_are_clipped():
    normalizer = RewardNormalizer(discount=0.0, clip=3.0)
    normalizer.update(
        torch.tensor([[-1.0, 1.0]]), torch.tensor([[False, False]]), torch.tensor([[1, 2]])
    )
    reward = torch.tensor([[2.0, -50.0]])
    scaled = normalizer.normalize(reward)
    torch.testing.assert_close(scaled, torch.tensor([[2.0, -3.0]]))
    assert scaled.dtype == torch.float32
    assert reward.tolist() == [[2.0, -50.0]]


def test_batches_of_several_collectors_may_come_in_any_order():
    reward, done = torch.randn(6, 5), torch.rand(6, 5) < 0.3
    ids = episode_ids(done)
    together, mixed, joined = (RewardNormalizer(discount=0.9) for _ in range(3))
    together.update(reward, done, ids)
    for rows, lanes in (
        (slice(3), slice(2)),
        (slice(3), slice(2, 5)),
        (slice(3, 6), slice(2, 5)),
        (slice(3, 6), slice(2)),
    ):
        mixed.update(reward[rows, lanes], done[rows, lanes], ids[rows, lanes])
    assert mixed.std == pytest.approx(together.std)
    flat = [column.T.reshape(-1, 1) for column in (reward, done, ids)]
    joined.update(*flat)
    assert joined.std == pytest.approx(together.std), "lanes joined one after the other"


def test_an_episode_that_a_failing_env_cut_starts_a_new_return():
    reward = torch.ones(4, 1)
    done = torch.zeros(4, 1, dtype=torch.bool)
    cut, whole = (RewardNormalizer(discount=1.0) for _ in range(2))
    cut.update(reward, done, torch.tensor([[1], [1], [2], [2]]))
    whole.update(reward, done, torch.tensor([[1], [1], [1], [1]]))
    assert cut.std == pytest.approx(np.std([1, 2, 1, 2]))
    assert whole.std == pytest.approx(np.std([1, 2, 3, 4]))


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((2, 3), (2, 4)), ((2, 2, 2), (2, 2, 2))])
def test_rewards_that_are_not_time_by_environment_are_rejected(shapes):
    reward, done = torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.bool)
    with pytest.raises(StructureError, match=r"must all be \[T, E\]"):
        RewardNormalizer(discount=0.9).update(reward, done, done.long())


def test_a_restored_reward_normalizer_continues_unfinished_episodes():
    reward, done = torch.randn(6, 2), torch.zeros(6, 2, dtype=torch.bool)
    ids = torch.tensor([[4, 5]]).expand(6, 2)
    whole, cut = (RewardNormalizer(discount=0.9) for _ in range(2))
    whole.update(reward, done, ids)
    cut.update(reward[:3], done[:3], ids[:3])
    resumed = RewardNormalizer(discount=0.9)
    resumed.load_state_dict(cut.state_dict())
    resumed.update(reward[3:], done[3:], ids[3:])
    assert resumed.std == pytest.approx(whole.std)


def test_a_discount_outside_its_range_is_rejected():
    with pytest.raises(ValueError, match=r"discount must be a number from 0 to 1, got 1\.5"):
        RewardNormalizer(discount=1.5)


ODD = [float("nan"), float("inf"), -float("inf"), 1e300]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n_before", [0, 5])
def test_one_bad_value_never_ruins_the_statistics(shape, n_before, value):
    stats = RunningMeanStd(shape)
    stats.update(torch.arange(float(n_before)).reshape(-1, *[1] * len(shape)).expand(-1, *shape))
    before = stats.state_dict()
    batch = torch.zeros(4, *shape, dtype=torch.float64)
    batch.view(-1)[-1] = value
    with pytest.raises(NonFiniteData):
        stats.update(batch)
    after = stats.state_dict()
    assert after["count"] == before["count"]
    assert torch.equal(after["mean"], before["mean"])
    assert torch.equal(after["var"], before["var"])
    stats.update(torch.zeros(4, *shape))
    assert stats.mean.isfinite().all()


@pytest.mark.parametrize("value", ODD[:3])
def test_one_bad_reward_never_ruins_the_returns(value):
    normalizer = RewardNormalizer(discount=0.9)
    ids, done = torch.tensor([[0, 1]] * 3), torch.zeros(3, 2, dtype=torch.bool)
    normalizer.update(torch.rand(3, 2), done, ids)
    before = normalizer.state_dict()
    bad = torch.rand(3, 2)
    bad[1, 1] = value
    with pytest.raises(NonFiniteData, match=r"\[1, 1\]"):
        normalizer.update(bad, done, ids)
    after = normalizer.state_dict()
    assert torch.equal(after["running"], before["running"])
    assert after["return_stats"]["count"] == before["return_stats"]["count"]
