"""Returns and advantages against loops that read like the definitions."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data.n_step import n_step_returns
from dmiddleware.errors import StructureError
from dmiddleware.rl import (
    discounted_return,
    gae,
    lambda_return,
    nstep_return,
    take_rows,
)


class Rollout(NamedTuple):
    reward: torch.Tensor
    value: torch.Tensor
    next_value: torch.Tensor
    terminated: torch.Tensor
    done: torch.Tensor


@st.composite
def rollouts(draw) -> Rollout:
    n_steps = draw(st.integers(1, 40))
    trailing = draw(st.sampled_from([(), (1,), (3,), (2, 3), (300,)]))
    shape = (n_steps, *trailing)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    often = draw(st.sampled_from([0.0, 0.1, 0.5]))
    reward, value, next_value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    terminated = torch.rand(shape, generator=generator) < often
    truncated = torch.rand(shape, generator=generator) < often
    return Rollout(reward, value, next_value, terminated, terminated | truncated)


fractions = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


def columns(rollout: Rollout):
    """Yield every environment's own column, as lists of Python numbers."""
    n_steps = len(rollout.reward)
    flat = [part.reshape(n_steps, -1).T.tolist() for part in rollout]
    for one in zip(*flat, strict=True):
        yield Rollout(*one)


def as_columns(result: torch.Tensor) -> torch.Tensor:
    return result.reshape(len(result), -1).T.double()


def literal_gae(env: Rollout, discount: float, gae_lambda: float) -> list[float]:
    adv = [0.0] * len(env.reward)
    for start in range(len(adv)):
        weight = 1.0
        for t in range(start, len(adv)):
            future = 0.0 if env.terminated[t] else env.next_value[t]
            adv[start] += weight * (env.reward[t] + discount * future - env.value[t])
            weight *= discount * gae_lambda
            if env.done[t]:
                break
    return adv


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), discount=fractions, gae_lambda=fractions)
def test_gae_equals_the_sum_of_equation_16(rollout, discount, gae_lambda):
    adv, ret = gae(*rollout, discount=discount, gae_lambda=gae_lambda)
    expected = [literal_gae(env, discount, gae_lambda) for env in columns(rollout)]
    torch.testing.assert_close(as_columns(adv), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(ret, adv + rollout.value)


def gae_of_two_steps(*, terminated: bool, done: bool) -> list[float]:
    """GAE where the first of two steps ends as told, with all numbers easy to follow."""
    result = gae(
        reward=torch.tensor([1.0, 10.0]),
        value=torch.tensor([0.5, 2.0]),
        next_value=torch.tensor([4.0, 8.0]),
        terminated=torch.tensor([terminated, False]),
        done=torch.tensor([done, False]),
        discount=0.5,
        gae_lambda=0.5,
    )
    return result.adv.tolist()


def test_gae_within_an_episode_adds_the_next_residual():
    later = 10.0 + 0.5 * 8.0 - 2.0
    assert gae_of_two_steps(terminated=False, done=False) == [2.5 + 0.25 * later, later]


def test_gae_at_a_truncation_bootstraps_but_cuts_the_sum():
    assert gae_of_two_steps(terminated=False, done=True) == [1.0 + 0.5 * 4.0 - 0.5, 12.0]


def test_gae_at_a_termination_neither_bootstraps_nor_continues():
    assert gae_of_two_steps(terminated=True, done=True) == [1.0 - 0.5, 12.0]


def test_gae_does_not_read_the_next_value_of_a_terminated_step():
    one = torch.ones(1)
    ended = torch.ones(1, dtype=torch.bool)
    adv, _ = gae(one, one, one * torch.nan, ended, ended, discount=0.9, gae_lambda=0.9)
    assert adv.item() == 0.0


def test_gae_of_a_batch_equals_gae_of_each_environment_alone():
    generator = torch.Generator().manual_seed(3)
    reward, value, next_value = torch.randn(3, 50, 6, generator=generator)
    terminated = torch.rand(50, 6, generator=generator) < 0.1
    done = terminated | (torch.rand(50, 6, generator=generator) < 0.1)
    together = gae(reward, value, next_value, terminated, done, discount=0.99, gae_lambda=0.95).adv
    for e in range(6):
        alone = gae(
            reward[:, e],
            value[:, e],
            next_value[:, e],
            terminated[:, e],
            done[:, e],
            discount=0.99,
            gae_lambda=0.95,
        ).adv
        assert torch.equal(together[:, e], alone)


def test_gae_gives_float32_for_float32_and_no_gradient():
    value = torch.randn(4, 2, requires_grad=True)
    no = torch.zeros(4, 2, dtype=torch.bool)
    adv, ret = gae(torch.randn(4, 2), value, value, no, no, discount=0.9, gae_lambda=0.9)
    assert adv.dtype == ret.dtype == torch.float32
    assert not adv.requires_grad
    assert not ret.requires_grad


def test_gae_leaves_its_inputs_as_they_are():
    value = torch.ones(3)
    masks = torch.tensor([False, True, False])
    gae(value, value, value, masks, masks, discount=0.9, gae_lambda=0.9)
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert masks.tolist() == [False, True, False]


def literal_nstep(env: Rollout, n: int, discount: float) -> list[tuple[float, float, int, bool]]:
    rows = []
    for start in range(len(env.reward)):
        total, weight, t = 0.0, 1.0, start
        while True:
            total += weight * env.reward[t]
            weight *= discount
            if env.done[t] or t == len(env.reward) - 1 or t - start + 1 == n:
                break
            t += 1
        rows.append((total, weight, t, env.terminated[t]))
    return rows


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), n=st.integers(1, 9), discount=fractions)
def test_nstep_equals_walking_ahead(rollout, n, discount):
    result = nstep_return(rollout.reward, rollout.terminated, rollout.done, n=n, discount=discount)
    expected = [literal_nstep(env, n, discount) for env in columns(rollout)]
    for place, part in enumerate(result):
        wanted = torch.tensor([[row[place] for row in env] for env in expected]).double()
        torch.testing.assert_close(as_columns(part), wanted)


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), n=st.integers(1, 9), discount=fractions)
def test_nstep_returns_of_trajectories_equal_those_of_linked_rows(rollout, n, discount):
    result = nstep_return(rollout.reward, rollout.terminated, rollout.done, n=n, discount=discount)
    shape = rollout.reward.shape
    n_rows, width = rollout.reward.numel(), max(rollout.reward[0].numel(), 1)
    reward, done = rollout.reward.flatten().numpy(), rollout.done.flatten().numpy()

    def successor(row):
        return np.where((row + width < n_rows) & ~done[row], row + width, -1)

    window = n_step_returns(
        np.arange(n_rows), successor, lambda row: reward[row], n_step=n, discount=discount
    )
    assert (window.last // width).reshape(shape).tolist() == result.bootstrap_row.tolist()
    np.testing.assert_allclose(window.ret.reshape(shape), result.reward, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(window.discount.reshape(shape), result.discount, rtol=1e-6)


def nstep_of_four(*, end_at_1: str) -> tuple[list[float], list[float], list[int], list[bool]]:
    ended = torch.tensor([False, True, False, False])
    terminated = ended if end_at_1 == "terminated" else torch.zeros(4, dtype=torch.bool)
    result = nstep_return(torch.tensor([1.0, 2, 4, 8]), terminated, ended, n=3, discount=0.5)
    return tuple(part.tolist() for part in result)


def test_nstep_stops_at_a_termination_without_bootstrap():
    reward, discount, row, terminated = nstep_of_four(end_at_1="terminated")
    assert reward == [1 + 0.5 * 2, 2.0, 4 + 0.5 * 8, 8.0]
    assert discount == [0.25, 0.5, 0.25, 0.5]
    assert row == [1, 1, 3, 3]
    assert terminated == [True, True, False, False]


def test_nstep_stops_at_a_truncation_and_bootstraps_there():
    reward, discount, row, terminated = nstep_of_four(end_at_1="truncated")
    assert reward == [1 + 0.5 * 2, 2.0, 4 + 0.5 * 8, 8.0]
    assert discount == [0.25, 0.5, 0.25, 0.5]
    assert row == [1, 1, 3, 3]
    assert terminated == [False, False, False, False]


def test_one_step_return_is_the_reward_itself():
    reward = torch.randn(5, 2)
    masks = torch.zeros(5, 2, dtype=torch.bool)
    result = nstep_return(reward, masks, masks, n=1, discount=0.9)
    assert torch.equal(result.reward, reward)
    assert result.bootstrap_row[:, 0].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(result.discount, torch.full((5, 2), 0.9))


def test_take_rows_fetches_the_observation_to_bootstrap_from():
    next_obs = torch.arange(4 * 2 * 3).reshape(4, 2, 3)
    row = torch.tensor([[1, 3], [1, 3], [2, 2], [3, 3]])
    taken = take_rows(next_obs, row)
    for t in range(4):
        for e in range(2):
            assert torch.equal(taken[t, e], next_obs[row[t, e], e])


def test_take_rows_keeps_environments_apart():
    column = torch.randn(5, 2, 3, 4)
    row = torch.randint(5, (5, 2, 3))
    taken = take_rows(column, row)
    for t, i, j in torch.cartesian_prod(torch.arange(5), torch.arange(2), torch.arange(3)):
        assert torch.equal(taken[t, i, j], column[row[t, i, j], i, j])


def test_take_rows_of_a_single_environment_indexes_time():
    column = torch.randn(4, 3)
    assert torch.equal(take_rows(column, torch.tensor([3, 3, 0, 1])), column[[3, 3, 0, 1]])


def literal_return(env: Rollout, discount: float, *, bootstrap: bool) -> list[float]:
    returns = []
    last = len(env.reward) - 1
    for start in range(last + 1):
        total, weight = 0.0, 1.0
        for t in range(start, last + 1):
            total += weight * env.reward[t]
            weight *= discount
            if env.done[t] or t == last:
                if bootstrap and not env.terminated[t]:
                    total += weight * env.next_value[t]
                break
        returns.append(total)
    return returns


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), discount=fractions, bootstrap=st.booleans())
def test_discounted_return_equals_summing_to_the_end(rollout, discount, bootstrap):
    result = discounted_return(
        rollout.reward,
        rollout.terminated,
        rollout.done,
        discount=discount,
        next_value=rollout.next_value if bootstrap else None,
    )
    expected = [literal_return(env, discount, bootstrap=bootstrap) for env in columns(rollout)]
    torch.testing.assert_close(as_columns(result), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("terminated", "wanted"),
    [(True, [1 + 0.5 * 2, 2.0]), (False, [1 + 0.5 * (2 + 0.5 * 6), 2 + 0.5 * 6])],
    ids=["terminated", "truncated"],
)
def test_discounted_return_bootstraps_at_a_truncation_only(terminated, wanted):
    result = discounted_return(
        torch.tensor([1.0, 2.0]),
        torch.tensor([False, terminated]),
        torch.tensor([False, True]),
        discount=0.5,
        next_value=torch.tensor([100.0, 6.0]),
    )
    assert result.tolist() == wanted


def literal_lambda(env: Rollout, discount: float, trace_decay: float) -> list[float]:
    """Equation 12.3: the n-step returns weighted by (1 - l) l^(n-1), the last by what is left."""
    returns = []
    last = len(env.reward) - 1
    for start in range(last + 1):
        total, weight, summed, discounting = 0.0, 1.0, 0.0, 1.0
        for t in range(start, last + 1):
            summed += discounting * env.reward[t]
            discounting *= discount
            nstep = summed + (0.0 if env.terminated[t] else discounting * env.next_value[t])
            if env.done[t] or t == last:
                total += weight * nstep
                break
            total += weight * (1.0 - trace_decay) * nstep
            weight *= trace_decay
        returns.append(total)
    return returns


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), discount=fractions, trace_decay=fractions)
def test_returns_of_gae_mix_all_nstep_returns_when_values_agree(rollout, discount, trace_decay):
    next_value = torch.cat((rollout.value[1:], rollout.next_value[-1:]))
    result = gae(
        rollout.reward,
        rollout.value,
        next_value,
        rollout.terminated,
        rollout.done,
        discount=discount,
        gae_lambda=trace_decay,
    ).ret
    same = rollout._replace(next_value=next_value)
    expected = [literal_lambda(env, discount, trace_decay) for env in columns(same)]
    torch.testing.assert_close(as_columns(result), torch.tensor(expected, dtype=torch.float64))


def every_function(reward, terminated, done, *, discount=0.9, gae_lambda=0.9):
    """Yield each function with the columns given, ready to be called."""
    value = torch.zeros_like(reward)
    yield lambda: gae(
        reward, value, value, terminated, done, discount=discount, gae_lambda=gae_lambda
    )
    yield lambda: nstep_return(reward, terminated, done, n=2, discount=discount)
    yield lambda: discounted_return(reward, terminated, done, discount=discount)


def test_no_time_step_is_rejected():
    nothing = torch.zeros(0, 3)
    for call in every_function(nothing, nothing.bool(), nothing.bool()):
        with pytest.raises(StructureError, match=r"at least one time step, got shape \(0, 3\)"):
            call()


def test_a_lone_number_is_rejected():
    with pytest.raises(StructureError, match=r"got shape \(\)"):
        discounted_return(torch.tensor(1.0), torch.tensor(True), torch.tensor(True), discount=1.0)


def test_columns_of_another_shape_are_rejected_by_name():
    reward = torch.zeros(4, 2)
    for call in every_function(reward, torch.zeros(4, 2).bool(), torch.zeros(4, 1).bool()):
        with pytest.raises(StructureError, match=r"done has shape \(4, 1\) and reward \(4, 2\)"):
            call()


def test_a_value_with_a_trailing_one_is_rejected_not_broadcast():
    reward, masks = torch.zeros(4), torch.zeros(4).bool()
    with pytest.raises(StructureError, match=r"value has shape \(4, 1\)"):
        gae(reward, reward.unsqueeze(1), reward, masks, masks, discount=0.9, gae_lambda=0.9)


def test_masks_that_are_not_bool_are_rejected():
    reward = torch.zeros(4)
    for call in every_function(reward, torch.zeros(4), torch.zeros(4)):
        with pytest.raises(StructureError, match=r"terminated must be of dtype bool.*\.bool\(\)"):
            call()


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_a_discount_outside_its_range_is_rejected(discount):
    reward, masks = torch.zeros(4), torch.zeros(4).bool()
    for call in every_function(reward, masks, masks, discount=discount):
        with pytest.raises(ValueError, match=r"discount must be in \[0, 1\], got"):
            call()


def test_a_lambda_outside_its_range_is_rejected():
    reward, masks = torch.zeros(4), torch.zeros(4).bool()
    with pytest.raises(ValueError, match=r"gae_lambda must be in \[0, 1\], got 2"):
        gae(reward, reward, reward, masks, masks, discount=0.9, gae_lambda=2.0)


def test_n_below_one_is_rejected():
    reward, masks = torch.zeros(4), torch.zeros(4).bool()
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        nstep_return(reward, masks, masks, n=0, discount=0.9)


def test_columns_may_be_views_of_other_memory():
    reward = torch.randn(3, 20).T
    masks = (torch.rand(3, 20) < 0.2).T
    assert not reward.is_contiguous()
    scattered = every_function(reward, masks, masks)
    dense = every_function(reward.contiguous(), masks.contiguous(), masks.contiguous())
    for one, other in zip(scattered, dense, strict=True):
        torch.testing.assert_close(one(), other(), rtol=0, atol=0)


def test_no_environment_gives_no_numbers():
    nothing = torch.zeros(4, 0)
    for call in every_function(nothing, nothing.bool(), nothing.bool()):
        result = call()
        for part in result if isinstance(result, tuple) else (result,):
            assert part.shape == (4, 0)


def test_n_beyond_the_data_sums_what_there_is():
    reward, masks = torch.ones(3), torch.zeros(3, dtype=torch.bool)
    result = nstep_return(reward, masks, masks, n=100, discount=1.0)
    assert result.reward.tolist() == [3.0, 2.0, 1.0]
    assert result.bootstrap_row.tolist() == [2, 2, 2]


def test_a_single_step_is_enough():
    reward, no = torch.tensor([2.0]), torch.tensor([False])
    value, next_value = torch.tensor([1.0]), torch.tensor([10.0])
    masks = {"terminated": no, "done": no}
    assert gae(reward, value, next_value, **masks, discount=0.5, gae_lambda=0.9).adv.tolist() == [6]
    assert nstep_return(reward, **masks, n=3, discount=0.5).discount.tolist() == [0.5]
    assert discounted_return(reward, **masks, discount=0.5).tolist() == [2.0]


def test_integer_rewards_count_as_floats():
    reward, masks = torch.tensor([1, 2, 3]), torch.zeros(3).bool()
    value = torch.tensor([0.5, 0.25, 2.0])

    def results(reward):
        kwargs = {"discount": 0.9}
        yield nstep_return(reward, masks, masks, n=2, **kwargs).reward
        yield discounted_return(reward, masks, masks, **kwargs)
        yield discounted_return(reward, masks, masks, next_value=value, **kwargs)
        yield gae(reward, value, value, masks, masks, gae_lambda=0.7, **kwargs).adv

    for ours, theirs in zip(results(reward), results(reward.float()), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [8, 1000])
def test_all_returns_are_the_same_on_a_gpu(width):
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(64, width, generator=generator)
    terminated = torch.rand(64, width, generator=generator) < 0.05
    done = terminated | (torch.rand(64, width, generator=generator) < 0.05)
    here = every_function(reward, terminated, done)
    there = every_function(reward.cuda(), terminated.cuda(), done.cuda())
    for on_cpu, on_gpu in zip(here, there, strict=True):
        torch.testing.assert_close(on_cpu(), on_gpu(), check_device=False)


def literal_lambda_return(env: Rollout, discount: float, trace_decay: float) -> list[float]:
    """Return the weighted mean of the n-step returns of each row (equation 12.3 of the book)."""
    returns = []
    for start in range(len(env.reward)):
        total, power, weight, mean = 0.0, 1.0, 1.0, 0.0
        for t in range(start, len(env.reward)):
            total += power * env.reward[t]
            power *= discount
            nstep = total + (0.0 if env.terminated[t] else power * env.next_value[t])
            if env.done[t] or t == len(env.reward) - 1:
                mean += weight * nstep
                break
            mean += weight * (1.0 - trace_decay) * nstep
            weight *= trace_decay
        returns.append(mean)
    return returns


@settings(deadline=None, max_examples=60)
@given(rollout=rollouts(), discount=fractions, trace_decay=fractions)
def test_a_lambda_return_is_the_weighted_mean_of_the_nstep_returns(rollout, discount, trace_decay):
    reward, _, *others = rollout
    got = lambda_return(reward, *others, discount=discount, trace_decay=trace_decay)
    expected = [literal_lambda_return(env, discount, trace_decay) for env in columns(rollout)]
    torch.testing.assert_close(as_columns(got), torch.tensor(expected, dtype=torch.float64))


def test_a_lambda_return_does_not_read_the_next_value_of_a_terminated_step():
    ended = torch.ones(1, dtype=torch.bool)
    one = torch.ones(1)
    got = lambda_return(one, one * torch.nan, ended, ended, discount=0.9, trace_decay=0.9)
    assert got.tolist() == [1.0]


def test_a_lambda_return_refuses_what_is_not_a_fraction():
    one, no = torch.ones(1), torch.zeros(1, dtype=torch.bool)
    with pytest.raises(ValueError, match="trace_decay"):
        lambda_return(one, one, no, no, discount=0.9, trace_decay=1.5)
