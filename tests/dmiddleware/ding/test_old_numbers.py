"""``float`` in files that were written for NumPy 1."""

from __future__ import annotations

import numpy as np
import pytest

from dmiddleware.ding.old_numbers import TolerantFloat


@pytest.mark.parametrize("value", [np.array([1.5]), np.array([[1.5]]), np.float32(1.5), "1.5", 1.5])
def test_an_array_of_one_element_is_a_number(value: object) -> None:
    assert TolerantFloat(value) == 1.5
    with pytest.raises(TypeError):
        TolerantFloat(np.array([1.0, 2.0]))


def test_it_stands_for_the_built_in_type() -> None:
    assert isinstance(1.0, TolerantFloat) and isinstance(np.float64(1.0), TolerantFloat)
    assert not isinstance(1, TolerantFloat)
    assert np.zeros(2, dtype=TolerantFloat).dtype == np.float64  # type: ignore[call-overload]
    assert np.array([1]).astype(TolerantFloat).dtype == np.float64  # type: ignore[type-var]
    assert np.issubdtype(TolerantFloat, np.floating)
