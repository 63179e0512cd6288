import pytest
import torch
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from dmiddleware.rl import (
    categorical_entropy,
    categorical_log_prob,
    categorical_sample,
    gaussian_entropy,
    gaussian_log_prob,
    gaussian_sample,
    mask_logit,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("lead", [(), (7,), (3, 7)], ids=str)
def test_categorical_agrees_with_torch_for_any_leading_dimensions(lead):
    logit = torch.randn(*lead, 5, generator=seeded())
    action, log_prob = categorical_sample(logit, generator=seeded())
    reference = Categorical(logits=logit)
    assert action.shape == log_prob.shape == lead
    assert action.dtype == torch.int64
    torch.testing.assert_close(log_prob, reference.log_prob(action))
    torch.testing.assert_close(categorical_log_prob(logit, action), reference.log_prob(action))
    torch.testing.assert_close(categorical_entropy(logit), reference.entropy())


def test_categorical_draws_each_action_as_often_as_its_probability():
    logit = torch.tensor([0.5, 0.3, 0.2]).log().expand(100_000, 3)
    action, _ = categorical_sample(logit, generator=seeded())
    shares = torch.bincount(action, minlength=3) / len(action)
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.006, rtol=0)


def test_the_same_generator_state_draws_the_same_actions():
    logit = torch.randn(50, 4)
    mu, sigma = torch.randn(50, 2), torch.ones(50, 2)
    for draw in (
        lambda seed: categorical_sample(logit, generator=seeded(seed)).action,
        lambda seed: gaussian_sample(mu, sigma, generator=seeded(seed)).action,
    ):
        assert torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))


def test_a_masked_action_is_never_drawn_and_the_rest_is_renormalised():
    logit = torch.zeros(10_000, 3)
    mask = torch.tensor([True, False, True]).expand(10_000, 3)
    action, log_prob = categorical_sample(logit, generator=seeded(), mask=mask)
    assert set(action.tolist()) == {0, 2}
    torch.testing.assert_close(log_prob.exp(), torch.full((10_000,), 0.5))


def test_entropy_and_its_gradient_stay_finite_under_a_mask():
    logit = torch.zeros(1, 3, requires_grad=True)
    entropy = categorical_entropy(mask_logit(logit, torch.tensor([[True, False, True]])))
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert torch.isfinite(logit.grad).all()


def test_drawing_from_a_nan_logit_raises():
    with pytest.raises(RuntimeError, match="nan"):
        categorical_sample(torch.tensor([[0.0, torch.nan]]))


def normal(
    mu: torch.Tensor, sigma: torch.Tensor, *, squash: bool
) -> torch.distributions.Distribution:
    base = Independent(Normal(mu, sigma), 1)
    return TransformedDistribution(base, TanhTransform()) if squash else base


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("lead", [(), (7,), (3, 7)], ids=str)
def test_gaussian_agrees_with_torch_for_any_leading_dimensions(lead, squash):
    mu = torch.randn(*lead, 3, generator=seeded(), dtype=torch.float64)
    sigma = torch.rand(*lead, 3, generator=seeded(), dtype=torch.float64) * 0.5 + 0.1
    action, log_prob = gaussian_sample(mu, sigma, generator=seeded(), squash=squash)
    reference = normal(mu, sigma, squash=squash).log_prob(action)
    assert action.shape == (*lead, 3)
    assert log_prob.shape == lead
    torch.testing.assert_close(log_prob, reference)
    torch.testing.assert_close(gaussian_log_prob(mu, sigma, action, squash=squash), reference)


def test_gaussian_entropy_agrees_with_torch():
    sigma = torch.rand(4, 3) + 0.1
    reference = Independent(Normal(torch.zeros(4, 3), sigma), 1).entropy()
    torch.testing.assert_close(gaussian_entropy(sigma), reference)


def test_gaussian_draws_have_the_right_moments():
    mu, sigma = torch.full((100_000, 1), 2.0), torch.full((100_000, 1), 0.5)
    action, _ = gaussian_sample(mu, sigma, generator=seeded())
    assert action.mean().item() == pytest.approx(2.0, abs=0.01)
    assert action.std().item() == pytest.approx(0.5, abs=0.01)


def test_squashed_actions_stay_within_their_bounds_with_finite_densities():
    mu = torch.tensor([[-30.0, 0.0, 30.0]])
    action, log_prob = gaussian_sample(mu, torch.ones(1, 3), generator=seeded(), squash=True)
    assert action.abs().max() <= 1.0
    assert torch.isfinite(log_prob).all()
    bounds = torch.tensor([[-1.0, 0.0, 1.0]])
    assert torch.isfinite(gaussian_log_prob(mu, torch.ones(1, 3), bounds, squash=True)).all()


def test_gradients_flow_through_a_gaussian_draw():
    mu = torch.zeros(1, 2, requires_grad=True)
    log_sigma = torch.zeros(1, 2, requires_grad=True)
    gaussian_sample(mu, log_sigma.exp(), generator=seeded()).action.sum().backward()
    assert mu.grad.tolist() == [[1.0, 1.0]]
    assert log_sigma.grad.abs().min() > 0
