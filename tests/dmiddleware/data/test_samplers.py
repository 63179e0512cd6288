import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import Eligible, PrioritySampler, TensorBuffer, UniformSampler, as_tree
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.schedule import Schedule


def rows(first, n):
    return as_tree({"x": torch.arange(first, first + n), "done": torch.zeros(n, dtype=torch.bool)})


def chi_square(counts, probabilities):
    """Pearson's statistic, relative to its mean: near 1 if the counts follow the probabilities."""
    expected = probabilities * counts.sum()
    used = expected > 0
    assert (counts[~used] == 0).all()
    return ((counts - expected)[used] ** 2 / expected[used]).sum() / (used.sum() - 1)


def drawn(buffer, n, times):
    index = np.concatenate([buffer.sample(n)["index"].numpy() for _ in range(times)])
    return np.bincount(index, minlength=int(buffer.index[-1]) + 1)


def test_a_uniform_sampler_draws_every_row_equally_often():
    buffer = TensorBuffer(50, seed=0)
    buffer.push(rows(0, 80))
    counts = drawn(buffer, 50, 400)
    assert (counts[:30] == 0).all()
    assert 0.5 < chi_square(counts[30:], np.full(50, 1 / 50)) < 1.6


def test_a_uniform_sampler_without_replacement_never_repeats_a_row():
    buffer = TensorBuffer(50, sampler=UniformSampler(replace=False), seed=0)
    buffer.push(rows(0, 80))
    assert sorted(buffer.sample(50).x.tolist()) == list(range(30, 80))
    counts = sum(np.bincount(buffer.sample(20).x, minlength=80) for _ in range(600))
    assert counts.max() < 600
    assert chi_square(counts[30:], np.full(50, 1 / 50)) < 1.6


def test_without_replacement_a_range_that_is_too_small_is_rejected():
    sampler = UniformSampler(replace=False)
    eligible = Eligible(0, 6, 6, 8, accept=lambda index: index % 2 == 0)
    index, _ = sampler.draw(3, eligible, np.random.default_rng(0))
    assert sorted(index) == [0, 2, 4]
    with pytest.raises(NotEnoughData, match="4 different rows, but only 3"):
        sampler.draw(4, eligible, np.random.default_rng(0))


def test_a_priority_sampler_draws_in_proportion_to_priority_to_the_alpha():
    buffer = TensorBuffer(40, sampler=PrioritySampler(alpha=0.6), seed=0)
    buffer.push(rows(0, 65))
    priority = np.random.default_rng(1).exponential(size=40) * 3
    buffer.update_priority(np.arange(25, 65), priority)
    mass = (priority + 1e-6) ** 0.6
    # Stratified draws scatter less than independent ones, so single draws are tested too.
    counts = drawn(buffer, 1, 3000)
    assert 0.4 < chi_square(counts[25:], mass / mass.sum()) < 1.6
    counts = drawn(buffer, 32, 400)
    assert chi_square(counts[25:], mass / mass.sum()) < 1.6


def test_a_part_of_the_rows_is_drawn_in_the_same_proportion():
    sampler = PrioritySampler(alpha=1.0)
    buffer = TensorBuffer(40, sampler=sampler, seed=0)
    buffer.push(rows(0, 65))
    priority = np.random.default_rng(1).exponential(size=65)
    buffer.update_priority(np.arange(65), priority)
    eligible = Eligible(25, 40, 65, 40, accept=lambda i: i % 7 == 0)
    generator = np.random.default_rng(0)
    index = [sampler.draw(10, eligible, generator)[0] for _ in range(800)]
    counts = np.bincount(np.concatenate(index), minlength=65)
    mass = np.where((np.arange(65) >= 25) & (np.arange(65) % 7 == 0), priority, 0)
    assert chi_square(counts, mass / mass.sum()) < 1.7


def test_weights_correct_the_bias_relative_to_the_largest_of_the_batch():
    buffer = TensorBuffer(8, sampler=PrioritySampler(alpha=0.5, beta=0.7), seed=0)
    buffer.push(rows(0, 8))
    priority = np.arange(1.0, 9.0)
    buffer.update_priority(np.arange(8), priority)
    batch = buffer.sample(8)
    probability = (priority + 1e-6) ** 0.5
    probability /= probability.sum()
    weight = (8 * probability[batch["index"]]) ** -0.7
    assert np.allclose(batch.weight, weight / weight.max(), rtol=1e-6)
    assert batch.weight.dtype == torch.float32


def test_beta_by_env_step_follows_the_rows_pushed():
    sampler = PrioritySampler(beta=Schedule.linear(0.4, 1.0, decay=10))
    buffer = TensorBuffer(4, sampler=sampler, seed=0)
    buffer.push(rows(0, 5))
    assert sampler.beta == pytest.approx(0.7)
    sampler.beta = 0.5
    buffer.push(rows(5, 2))
    assert sampler.beta == pytest.approx(0.6)
    other = PrioritySampler(beta=Schedule.linear(0.4, 1.0, decay=10))
    TensorBuffer(4, sampler=other, seed=0).load_state_dict(buffer.state_dict())
    assert other.beta == sampler.beta


def test_beta_by_progress_needs_the_progress():
    sampler = PrioritySampler(beta=Schedule.linear(0.4, 1.0, by="progress"))
    buffer = TensorBuffer(4, sampler=sampler, seed=0)
    buffer.push(rows(0, 4))
    with pytest.raises(ConfigError, match="by progress needs that counter"):
        buffer.sample(2)
    sampler.progress = 0.5
    buffer.sample(2)
    assert sampler.beta == pytest.approx(0.7)


def test_beta_rises_linearly_to_one_over_the_draws():
    sampler = PrioritySampler(beta=Schedule.linear(0.4, 1.0, decay=3, by="update"))
    buffer = TensorBuffer(8, sampler=sampler)
    buffer.push(rows(0, 8))
    seen = []
    for _ in range(5):
        seen.append(sampler.beta)
        buffer.sample(2)
    assert np.allclose(seen, [0.4, 0.6, 0.8, 1.0, 1.0])
    assert PrioritySampler(beta=0.4).beta == 0.4


def test_new_rows_have_the_highest_priority_given_so_far():
    sampler = PrioritySampler(alpha=1.0, eps=0.5)
    buffer = TensorBuffer(10, sampler=sampler)
    buffer.push(rows(0, 8))
    assert np.allclose(sampler.state_dict(np.arange(8))["mass"], 1.5)
    buffer.update_priority(np.arange(8), np.arange(8.0))
    buffer.update_priority(np.arange(8), np.zeros(8))
    buffer.push(rows(8, 4))  # wraps around the end
    assert np.allclose(sampler.state_dict(np.arange(2, 12))["mass"], [0.5] * 6 + [7.5] * 4)


def test_the_last_priority_of_an_index_counts_and_overwritten_rows_are_skipped():
    sampler = PrioritySampler(alpha=1.0, eps=1e-6)
    buffer = TensorBuffer(4, sampler=sampler)
    buffer.push(rows(0, 6))
    n_set = buffer.update_priority(torch.tensor([5, 1, 0, 5, 4]), torch.tensor([9.0, 9, 9, 2, 3]))
    assert n_set == 3
    mass = sampler.state_dict(np.arange(2, 6))["mass"]
    assert np.allclose(mass, [1, 1, 3, 2], atol=1e-5)
    assert buffer.update_priority([5], np.array([-0.0])) == 1
    assert np.allclose(sampler.state_dict(np.array([5]))["mass"], 1e-6)
    half = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16, requires_grad=True)
    assert buffer.update_priority([4, 5], half) == 2
    assert np.allclose(sampler.state_dict(np.array([4, 5]))["mass"], [0.5, 1.5], atol=1e-5)
    assert buffer.update_priority([], []) == 0
    assert buffer.update_priority([0], [1.0]) == 0


@pytest.mark.parametrize("odd", [-1.0, np.nan, np.inf])
def test_a_priority_that_is_not_finite_and_positive_changes_nothing(odd):
    sampler = PrioritySampler()
    buffer = TensorBuffer(4, sampler=sampler, seed=0)
    buffer.push(rows(0, 4))
    before = sampler.state_dict(np.arange(4))["mass"]
    with pytest.raises(ValueError, match="1 of 2 are not; the first is"):
        buffer.update_priority([0, 1], [5.0, odd])
    assert np.array_equal(sampler.state_dict(np.arange(4))["mass"], before)


def test_mistakes_with_priorities_are_rejected():
    buffer = TensorBuffer(4)
    buffer.push(rows(0, 4))
    with pytest.raises(TypeError, match=r"sampler=PrioritySampler\(\)"):
        buffer.update_priority([0], [1.0])
    prioritized = TensorBuffer(4, sampler=PrioritySampler())
    prioritized.push(rows(0, 4))
    with pytest.raises(IndexError, match="indices are 0 … 3"):
        prioritized.update_priority([4], [1.0])
    with pytest.raises(ValueError, match="one number per row"):
        prioritized.update_priority([0, 1], [1.0])
    with pytest.raises(ValueError, match="another buffer"):
        TensorBuffer(4, sampler=prioritized.sampler)
    with pytest.raises(ValueError, match="no buffer yet"):
        PrioritySampler().pushed(0, 1)
    for options in (
        {"alpha": -1.0},
        {"beta": 1.5},
        {"eps": 0.0},
        {"beta": {"start": 0.4, "end": 1.2}},
    ):
        with pytest.raises(ValueError):
            PrioritySampler(**options)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["push", "update", "clear", "sample"]), st.integers(0, 2**32 - 1)),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.integers(1, 40))
def test_priorities_equal_those_of_a_naive_model(actions, size):
    sampler = PrioritySampler(alpha=0.6)
    buffer = TensorBuffer(size, sampler=sampler, seed=0)
    model, total, highest = {}, 0, 1.0
    for name, seed in actions:
        generator = np.random.default_rng(seed)
        if name == "push":
            n = int(generator.integers(1, 50))
            buffer.push(rows(total, n))
            model |= dict.fromkeys(range(total, total + n), highest)
            total += n
            model = {i: p for i, p in model.items() if i >= total - size}
        elif name == "update" and total:
            index = generator.integers(0, total, 10)
            priority = generator.exponential(size=10)
            buffer.update_priority(index, priority)
            for i, p in zip(index, priority, strict=True):
                if i in model:
                    model[i] = p
                    highest = max(highest, p)
        elif name == "clear":
            buffer.clear()
            model = {}
        elif name == "sample" and model:
            batch = buffer.sample(len(model))
            assert set(batch["index"].tolist()) <= set(model)
            assert torch.equal(batch.x, batch["index"])
        assert len(buffer) == len(model)
        mass = sampler.state_dict(np.array(list(model), np.int64))["mass"]
        assert np.allclose(mass, [(p + 1e-6) ** 0.6 for p in model.values()], rtol=1e-12)
