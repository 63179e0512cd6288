import itertools

import pytest
import torch
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import (
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from dmiddleware.data import as_tree
from dmiddleware.errors import StructureError
from dmiddleware.rl import (
    Bernoulli,
    Categorical,
    Gaussian,
    Hybrid,
    MultiCategorical,
    TanhGaussian,
)
from tests.variants import mostly_slow

LEADS = [(), (7,), (3, 7)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(), dtype=torch.float64)


def moments(lead):
    return randn(*lead, 3), randn(*lead, 3).abs() * 0.1 + 0.1


def gaussian_of(kind, lead=(7,)):
    return kind(*moments(lead))


MAKERS = {
    "categorical": lambda lead: Categorical(randn(*lead, 5)),
    "several": lambda lead: MultiCategorical(randn(*lead, 7), (2, 3, 2)),
    "even": lambda lead: MultiCategorical(randn(*lead, 6), (3, 3)),
    "bits": lambda lead: Bernoulli(randn(*lead, 4)),
    "gaussian": lambda lead: gaussian_of(Gaussian, lead),
    "tanh": lambda lead: gaussian_of(TanhGaussian, lead),
}


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_draws_modes_and_their_log_probabilities_have_the_leading_dimensions(make, lead):
    distribution = make(lead)
    for raw in (distribution.sample(seeded()), distribution.mode()):
        assert raw.shape[: len(lead)] == lead
        assert distribution.log_prob(raw).shape == lead
    assert distribution.entropy().shape == lead


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_generator_state_gives_the_same_draw(make):
    draws = [make((50,)).sample(seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_choices_and_bits_are_drawn_as_often_as_their_probabilities():
    share = torch.tensor([0.5, 0.3, 0.2])
    logit = share.log().expand(100_000, 3)
    pair = torch.cat([logit, torch.tensor([0.9, 0.1]).log().expand(100_000, 2)], -1)
    for raw in (Categorical(logit).sample(seeded()), MultiCategorical(pair, (3, 2)).sample()[:, 0]):
        found = torch.bincount(raw, minlength=3) / 100_000
        torch.testing.assert_close(found, share, atol=0.006, rtol=0)
    bits = Bernoulli((share / (1 - share)).log().expand(100_000, 3)).sample(seeded())
    torch.testing.assert_close(bits.float().mean(0), share, atol=0.006, rtol=0)


def test_gaussian_draws_have_the_right_moments():
    mu, sigma = torch.full((100_000, 1), 2.0), torch.full((100_000, 1), 0.5)
    raw = Gaussian(mu, sigma).sample(seeded())
    assert raw.mean().item() == pytest.approx(2.0, abs=0.01)
    assert raw.std().item() == pytest.approx(0.5, abs=0.01)
    squashed = TanhGaussian(mu, sigma).sample(seeded())
    torch.testing.assert_close(squashed, raw.tanh())


@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_the_log_probability_of_a_draw_is_that_of_its_value(kind):
    distribution = gaussian_of(kind)
    with torch.no_grad():
        raw = distribution.sample(seeded())
        again = distribution.sample(seeded(1))
        for one in (raw, again):
            torch.testing.assert_close(distribution.log_prob(one), distribution.log_prob(one * 1))


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_one_choice_agrees_with_torch(lead):
    logit = randn(*lead, 5)
    distribution, reference = Categorical(logit), TorchCategorical(logits=logit)
    raw = distribution.sample(seeded())
    assert raw.dtype == torch.int64
    torch.testing.assert_close(distribution.log_prob(raw), reference.log_prob(raw))
    torch.testing.assert_close(distribution.entropy(), reference.entropy())
    assert torch.equal(distribution.mode(), reference.mode)


@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 3), (4,), (1, 2)], ids=str)
def test_several_choices_agree_with_torch(sizes):
    logit = randn(6, sum(sizes))
    distribution = MultiCategorical(logit, sizes)
    parts = [TorchCategorical(logits=part) for part in logit.split(list(sizes), -1)]
    raw = distribution.sample(seeded())
    assert raw.shape == (6, len(sizes))
    log_prob = sum(part.log_prob(raw[:, k]) for k, part in enumerate(parts))
    torch.testing.assert_close(distribution.log_prob(raw), log_prob)
    torch.testing.assert_close(distribution.entropy(), sum(part.entropy() for part in parts))
    assert torch.equal(distribution.mode(), torch.stack([part.mode for part in parts], -1))


def test_several_choices_never_take_an_option_that_another_choice_has():
    raw = MultiCategorical(torch.zeros(5_000, 9), (2, 3, 4)).sample(seeded())
    assert raw.amax(0).tolist() == [1, 2, 3]
    assert raw.amin(0).tolist() == [0, 0, 0]


def test_the_number_of_logits_must_be_that_of_the_options():
    with pytest.raises(StructureError, match=r"\[2, 3\] options need 5 logits, but there are 6"):
        MultiCategorical(torch.zeros(1, 6), (2, 3))


def test_bits_agree_with_torch():
    logit = randn(6, 4)
    distribution = Bernoulli(logit)
    reference = Independent(TorchBernoulli(logits=logit), 1)
    raw = distribution.sample(seeded())
    assert raw.dtype == torch.int8
    torch.testing.assert_close(distribution.log_prob(raw), reference.log_prob(raw.double()))
    torch.testing.assert_close(distribution.entropy(), reference.entropy())
    assert torch.equal(distribution.mode(), (logit > 0).to(torch.int8))


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_gaussians_agree_with_torch(lead, squash):
    distribution = gaussian_of(TanhGaussian if squash else Gaussian, lead)
    base = Independent(Normal(*moments(lead)), 1)
    reference = TransformedDistribution(base, TanhTransform()) if squash else base
    raw = distribution.sample(seeded())
    torch.testing.assert_close(distribution.log_prob(raw), reference.log_prob(raw))
    torch.testing.assert_close(distribution.log_prob(raw.clone()), reference.log_prob(raw))
    if not squash:
        torch.testing.assert_close(distribution.entropy(), reference.entropy())
    mode = base.mean.tanh() if squash else base.mean
    assert torch.equal(distribution.mode(), mode)


@pytest.mark.parametrize("sigma", mostly_slow([0.5, 0.05, 2.0], keep=1))
def test_the_entropy_of_a_squashed_gaussian_is_the_mean_of_minus_its_log_density(sigma):
    mu = torch.tensor([0.0, 0.7, -1.5], dtype=torch.float64).expand(50_000, 3)
    distribution = TanhGaussian(mu, torch.full_like(mu, sigma))
    estimate = -distribution.log_prob(distribution.sample(seeded())).mean()
    assert distribution.entropy()[0].item() == pytest.approx(estimate.item(), abs=0.02)


def test_the_density_of_a_saturated_draw_is_exact():
    mu = torch.full((1, 1), 30.0)
    distribution = TanhGaussian(mu, torch.ones(1, 1))
    raw = distribution.sample(seeded())
    assert raw.item() == 1.0
    assert distribution.log_prob(raw).item() > 40, "the slope of tanh is about exp(-60) there"
    assert torch.isfinite(distribution.log_prob(raw.clone())).all()


@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_gradients_flow_through_rsample_but_not_through_sample(kind):
    mu, sigma = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    distribution = kind(mu, sigma)
    drawn = distribution.rsample(seeded())
    (drawn.sum() + distribution.log_prob(drawn).sum()).backward()
    assert (mu.grad != 0).all()
    assert (sigma.grad != 0).all()
    assert not distribution.sample(seeded()).requires_grad


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_the_log_probability_of_a_sample_has_the_gradient_of_the_score(kind, has_grad):
    mu = torch.zeros(4, 2, requires_grad=True)
    distribution = kind(mu, torch.ones(4, 2))
    with torch.set_grad_enabled(has_grad):
        raw = distribution.sample(seeded())
    distribution.log_prob(raw).sum().backward()
    before = raw.atanh() if kind is TanhGaussian else raw
    torch.testing.assert_close(mu.grad, before, rtol=1e-4, atol=1e-5)


def hybrid(lead=(7,)):
    return Hybrid({name: MAKERS[name](lead) for name in ("bits", "categorical", "gaussian")})


def test_a_hybrid_sums_over_its_parts():
    distribution = hybrid()
    raw = distribution.sample(seeded())
    parts = distribution.parts
    log_prob = sum(part.log_prob(raw[name]) for name, part in parts.items())
    torch.testing.assert_close(distribution.log_prob(raw), log_prob)
    entropy = sum(part.entropy() for part in parts.values())
    torch.testing.assert_close(distribution.entropy(), entropy)
    assert torch.equal(distribution.mode()["bits"], parts["bits"].mode())


def test_divergences_agree_with_torch():
    logits, (mu, nu) = randn(2, 6, 5), randn(2, 6, 5)
    sigma, tau = randn(2, 6, 5).exp()
    bits = [Independent(TorchBernoulli(logits=logit), 1) for logit in logits]
    normals = [Independent(Normal(*moments), 1) for moments in ((mu, sigma), (nu, 2 * tau))]
    of_parts = zip(*(logit.split([2, 3], -1) for logit in logits), strict=True)
    parts = [kl_divergence(*map(categorical, both)) for both in of_parts]
    wanted = {
        "one choice": kl_divergence(*map(categorical, logits)),
        "several": sum(parts),
        "bits": kl_divergence(*bits),
        "gaussian": kl_divergence(*normals),
    }
    gaussians = Gaussian(mu, sigma), Gaussian(nu, 2 * tau)
    pairs = {
        "one choice": [Categorical(logit) for logit in logits],
        "several": [MultiCategorical(logit, (2, 3)) for logit in logits],
        "bits": [Bernoulli(logit) for logit in logits],
        "gaussian": gaussians,
    }
    for name, (here, there) in pairs.items():
        torch.testing.assert_close(here.kl_divergence(there), wanted[name])
        assert here.kl_divergence(here).abs().max() < 1e-12
    squashed = TanhGaussian(mu, sigma).kl_divergence(TanhGaussian(nu, 2 * tau))
    torch.testing.assert_close(squashed, wanted["gaussian"])
    here, there = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    torch.testing.assert_close(Hybrid(here).kl_divergence(Hybrid(there)), sum(wanted.values()))


def categorical(logit):
    return TorchCategorical(logits=logit)


def test_a_hybrid_rejects_an_action_of_other_parts():
    with pytest.raises(StructureError, match="has the parts bits, but the distribution has"):
        hybrid().log_prob(as_tree({"bits": torch.zeros(7, 4)}))


MASKED = {
    "one choice": (lambda logit, mask: Categorical(logit, mask), [[True, False, True, False]]),
    "several": (
        lambda logit, mask: MultiCategorical(logit, (2, 2), mask),
        [[True, False, True, True], [True, True, False, True]],
    ),
    "uneven": (
        lambda logit, mask: MultiCategorical(logit, (1, 3), mask),
        [[True, False, True, False]],
    ),
    "bits": (lambda logit, mask: Bernoulli(logit, mask), [[True, False, True, False], [False] * 4]),
}


def allowed_actions(name, mask):
    if name == "one choice":
        return [a for a in range(4) if mask[a]]
    if name == "bits":
        options = [(0, 1) if bit else (0,) for bit in mask]
    else:
        cut = 1 if name == "uneven" else 2
        parts = mask[:cut], mask[cut:]
        options = [[a for a, ok in enumerate(part) if ok] for part in parts]
    return [list(one) for one in itertools.product(*options)]


@pytest.mark.parametrize("name", MASKED)
def test_masked_actions_have_no_probability_and_the_rest_is_renormalized(name):
    make, masks = MASKED[name]
    for mask in masks:
        distribution = make(randn(1, 4), torch.tensor([mask]))
        known = allowed_actions(name, mask)
        total = sum(distribution.log_prob(torch.tensor([raw])).exp() for raw in known)
        assert total.item() == pytest.approx(1.0)
        many = make(randn(1, 4).expand(2_000, 4), torch.tensor(mask).expand(2_000, 4))
        drawn = many.sample(seeded()).tolist()
        assert all(raw in known for raw in drawn)
        assert len({str(raw) for raw in drawn}) == len(known)
        assert many.mode()[0].tolist() in known


@pytest.mark.parametrize("name", MASKED)
def test_entropies_and_gradients_stay_finite_under_a_mask(name):
    make, masks = MASKED[name]
    for mask in masks:
        logit = torch.randn(3, 4, generator=seeded()).requires_grad_()
        distribution = make(logit, torch.tensor(mask).expand(3, 4))
        raw = distribution.sample(seeded())
        divergence = make(randn(3, 4), torch.tensor(mask).expand(3, 4)).kl_divergence(distribution)
        summed = distribution.entropy() + distribution.log_prob(raw) + divergence
        summed.sum().backward()
        assert torch.isfinite(summed).all()
        assert torch.isfinite(logit.grad).all()


def test_a_choice_without_an_allowed_option_is_not_masked():
    logit = randn(2, 4)
    mask = torch.tensor([[False] * 4, [False, False, True, False]])
    free = Categorical(logit)
    assert torch.equal(Categorical(logit, mask).logit[0], logit[0])
    assert Categorical(logit, mask).mode()[1].item() == 2
    several = MultiCategorical(logit, (2, 2), mask)
    torch.testing.assert_close(several.choices.logit[:, 0], logit[:, :2])
    assert several.mode()[1, 1].item() == 0
    assert torch.equal(free.logit, logit)


def test_drawing_from_a_nan_logit_raises():
    with pytest.raises(RuntimeError, match="nan"):
        Categorical(torch.tensor([[0.0, torch.nan]])).sample()
