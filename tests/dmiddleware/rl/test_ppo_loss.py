import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import StructureError
from dmiddleware.rl import ppo_policy_loss, ppo_value_loss

numbers = st.floats(-3.0, 3.0, width=32)
samples = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(rows=samples, dual_clip=st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_equals_equation_7_sample_by_sample(rows, dual_clip):
    new, old, adv = torch.tensor(rows, dtype=torch.float64).unbind(1)
    result = ppo_policy_loss(new, old, adv, clip_ratio=0.2, dual_clip=dual_clip)
    total = kl = clipped = 0.0
    for new_lp, old_lp, a in rows:
        ratio = math.exp(new_lp - old_lp)
        objective = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        total -= objective
        kl += ratio - 1 - (new_lp - old_lp)
        clipped += abs(ratio - 1) > 0.2
    assert result.loss.item() == pytest.approx(total / len(rows), abs=1e-9)
    assert result.approx_kl.item() == pytest.approx(kl / len(rows), abs=1e-9)
    assert result.clip_fraction.item() == pytest.approx(clipped / len(rows))


def gradient_of_policy_loss(*, ratio: float, adv: float, **options) -> float:
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    ppo_policy_loss(log_prob, torch.zeros(1), torch.tensor([adv]), **options).loss.backward()
    return log_prob.grad.item()


def test_a_good_action_made_likely_enough_is_pushed_no_further():
    assert gradient_of_policy_loss(ratio=1.3, adv=1.0) == 0.0
    assert gradient_of_policy_loss(ratio=1.1, adv=1.0) == pytest.approx(-1.1)


def test_a_good_action_made_unlikely_is_still_pulled_back():
    assert gradient_of_policy_loss(ratio=0.5, adv=1.0) == pytest.approx(-0.5)


def test_a_bad_action_made_unlikely_enough_is_pushed_no_further():
    assert gradient_of_policy_loss(ratio=0.7, adv=-1.0) == 0.0


def test_dual_clip_stops_the_gradient_of_a_bad_action_that_became_very_likely():
    assert gradient_of_policy_loss(ratio=10.0, adv=-1.0) == pytest.approx(10.0)
    assert gradient_of_policy_loss(ratio=10.0, adv=-1.0, dual_clip=3.0) == 0.0


def test_weights_multiply_the_samples():
    adv = torch.tensor([1.0, 5.0])
    result = ppo_policy_loss(torch.zeros(2), torch.zeros(2), adv, weight=torch.tensor([2.0, 0.0]))
    assert result.loss.item() == -1.0


def test_policy_statistics_have_no_gradient():
    log_prob = torch.zeros(2, requires_grad=True)
    result = ppo_policy_loss(log_prob, torch.zeros(2), torch.ones(2))
    assert result.loss.requires_grad
    assert not result.approx_kl.requires_grad
    assert not result.clip_fraction.requires_grad


def test_invalid_clip_options_are_rejected():
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match=r"clip_ratio must be positive, got 0\.0"):
        ppo_policy_loss(zero, zero, zero, clip_ratio=0.0)
    with pytest.raises(ValueError, match=r"dual_clip must be above 1, got 1\.0"):
        ppo_policy_loss(zero, zero, zero, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"clip_range must be positive, got -1\.0"):
        ppo_value_loss(zero, zero, old_value=zero, clip_range=-1.0)
    with pytest.raises(ValueError, match="clip_range needs old_value"):
        ppo_value_loss(zero, zero, clip_range=0.2)


@settings(deadline=None, max_examples=60)
@given(rows=samples, clip_range=st.sampled_from([None, 0.5]))
def test_value_loss_is_half_the_mean_of_the_larger_error(rows, clip_range):
    value, old, ret = torch.tensor(rows, dtype=torch.float64).unbind(1)
    loss = ppo_value_loss(value, ret, old_value=old, clip_range=clip_range)
    total = 0.0
    for v, o, r in rows:
        errors = [(v - r) ** 2]
        if clip_range is not None:
            errors.append((o + min(max(v - o, -clip_range), clip_range) - r) ** 2)
        total += 0.5 * max(errors)
    assert loss.item() == pytest.approx(total / len(rows), abs=1e-9)


def test_value_loss_weights_the_samples():
    value = torch.tensor([2.0, 7.0])
    loss = ppo_value_loss(value, torch.zeros(2), weight=torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(0.5 * 4.0 / 2)


def approx_kl(log_prob, old_log_prob):
    return ppo_policy_loss(log_prob, old_log_prob, torch.zeros_like(log_prob)).approx_kl


def test_approx_kl_is_the_estimator_k3_not_the_log_ratio():
    new, old = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
    wanted = [math.e - 1 - 1, 1 / math.e - 1 + 1]
    assert approx_kl(new, old).item() == pytest.approx(sum(wanted) / 2)


def test_approx_kl_is_zero_for_the_same_policy_and_never_negative():
    log_prob = torch.randn(50)
    assert approx_kl(log_prob, log_prob).item() == 0.0
    for seed in range(5):
        other = torch.randn(50, generator=torch.Generator().manual_seed(seed))
        assert approx_kl(log_prob, other).item() >= 0.0


def test_approx_kl_estimates_the_divergence_of_two_gaussians():
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.3, 1.2)
    noise = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    estimate = approx_kl(new.log_prob(noise), old.log_prob(noise))
    exact = torch.distributions.kl_divergence(old, new)
    assert estimate.item() == pytest.approx(exact.item(), rel=0.02)


@pytest.mark.parametrize("name", ["old_log_prob", "adv", "weight"])
def test_a_policy_column_with_a_trailing_one_is_rejected_not_broadcast(name):
    columns = {"log_prob": torch.zeros(4), "old_log_prob": torch.zeros(4), "adv": torch.ones(4)}
    with pytest.raises(StructureError, match=rf"{name} has shape \(4, 1\).*\(4,\)"):
        ppo_policy_loss(**{**columns, name: torch.ones(4, 1)})


@pytest.mark.parametrize("name", ["ret", "old_value", "weight"])
def test_a_value_column_with_a_trailing_one_is_rejected_not_broadcast(name):
    columns = {"value": torch.zeros(4), "ret": torch.ones(4), name: torch.ones(4, 1)}
    with pytest.raises(StructureError, match=rf"{name} has shape \(4, 1\).*\(4,\)"):
        ppo_value_loss(**columns)


@settings(deadline=None, max_examples=60)
@given(
    rows=samples,
    weights=st.lists(st.floats(0.0, 5.0, width=32), min_size=8, max_size=8),
    scale=st.sampled_from([0.01, 1.0, 2.0, 300.0]),
)
def test_estimates_are_weighted_means_at_every_scale_of_the_weights(rows, weights, scale):
    new, old, adv = torch.tensor(rows, dtype=torch.float64).unbind(1)
    weight = scale * torch.tensor(weights[: len(rows)], dtype=torch.float64)
    result = ppo_policy_loss(new, old, adv, weight=weight)
    kl = clipped = 0.0
    total = sum(weights[: len(rows)])
    for (new_lp, old_lp, _), w in zip(rows, weights, strict=False):
        ratio = math.exp(new_lp - old_lp)
        kl += w / total * (ratio - 1 - (new_lp - old_lp)) if total else 0.0
        clipped += w / total * (abs(ratio - 1) > 0.2) if total else 0.0
    assert result.approx_kl.item() == pytest.approx(kl, abs=1e-9)
    assert result.clip_fraction.item() == pytest.approx(clipped, abs=1e-9)


def test_a_mask_as_weights_leaves_rows_out_of_the_estimates():
    new, old = torch.tensor([0.0, 1.0, -3.0]), torch.zeros(3)
    kept = torch.tensor([True, True, False])
    masked = ppo_policy_loss(new, old, torch.ones(3), weight=kept)
    alone = ppo_policy_loss(new[:2], old[:2], torch.ones(2))
    assert masked.approx_kl.item() == pytest.approx(alone.approx_kl.item())
    assert masked.clip_fraction.item() == 0.5
