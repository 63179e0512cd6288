import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.rl import discounted_scan


def literal_scan(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    solved = torch.zeros_like(value)
    following = torch.zeros_like(value[0])
    for step in range(len(value) - 1, -1, -1):
        following = value[step] + factor[step] * following
        solved[step] = following
    return solved


@settings(deadline=None, max_examples=60)
@given(
    n_steps=st.integers(1, 70),
    width=st.sampled_from([1, 3, 8, 256, 257, 300]),
    seed=st.integers(0, 99),
)
def test_scan_equals_the_literal_loop_for_narrow_and_wide_rows(n_steps, width, seed):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(n_steps, width, generator=generator, dtype=torch.float64)
    factor = torch.rand(n_steps, width, generator=generator, dtype=torch.float64)
    factor[torch.rand(n_steps, width, generator=generator) < 0.2] = 0.0
    torch.testing.assert_close(discounted_scan(value, factor), literal_scan(value, factor))


@pytest.mark.parametrize("width", [8, 300])
def test_scan_leaves_its_inputs_as_they_are(width):
    value, factor = torch.randn(9, width), torch.rand(9, width)
    value_before, factor_before = value.clone(), factor.clone()
    discounted_scan(value, factor)
    assert torch.equal(value, value_before)
    assert torch.equal(factor, factor_before)


@pytest.mark.parametrize("width", [8, 300])
def test_scan_keeps_no_gradient(width):
    value = torch.randn(5, width, requires_grad=True)
    assert not discounted_scan(value, torch.ones(5, width)).requires_grad


def test_scan_of_float32_stays_accurate_over_a_long_rollout():
    value, factor = torch.randn(5000, 4), torch.full((5000, 4), 0.999)
    exact = literal_scan(value.double(), factor.double())
    torch.testing.assert_close(discounted_scan(value, factor).double(), exact, rtol=1e-4, atol=1e-3)


def test_columns_do_not_influence_each_other():
    value, factor = torch.randn(33, 5), torch.rand(33, 5)
    together = discounted_scan(value, factor)
    for column in range(5):
        alone = discounted_scan(value[:, [column]], factor[:, [column]])
        assert torch.equal(together[:, [column]], alone)
