import pytest
import torch

from dmiddleware.rl import rescale_value, unscale_value


def test_values_are_rescaled_as_the_paper_has_it():
    value = torch.tensor([-1000.0, -3.0, 0.0, 0.5, 3.0, 1e6], dtype=torch.float64)
    wanted = torch.sign(value) * (torch.sqrt(value.abs() + 1) - 1) + 0.001 * value
    torch.testing.assert_close(rescale_value(value), wanted)
    assert rescale_value(value, slope=0.5)[4].item() == pytest.approx(2.5)


def test_the_inverse_is_the_one_of_the_paper():
    scaled = torch.linspace(-50, 50, 101, dtype=torch.float64)
    e = 0.01
    root = (torch.sqrt(1 + 4 * e * (scaled.abs() + 1 + e)) - 1) / (2 * e)
    wanted = scaled.sign() * (root**2 - 1)
    torch.testing.assert_close(unscale_value(scaled, slope=e), wanted)


def test_float32_values_survive_both_ways():
    value = torch.cat([torch.linspace(-2, 2, 401), torch.tensor([-1e5, 1e5])])
    torch.testing.assert_close(unscale_value(rescale_value(value)), value, rtol=1e-5, atol=1e-6)
