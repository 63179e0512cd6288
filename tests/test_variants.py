"""Variants that are left to ``make test-slow``."""

import pytest

from tests.variants import mostly_slow


def test_all_variants_but_the_kept_ones_are_slow():
    assert mostly_slow(["a", "b"], keep=1) == ["a", pytest.param("b", marks=pytest.mark.slow)]
    assert mostly_slow(["a", "b"], keep=[1]) == [pytest.param("a", marks=pytest.mark.slow), "b"]


def test_a_variant_keeps_its_values_its_name_and_its_marks():
    named = pytest.param(1, "x", marks=pytest.mark.process, id="one")
    kept, slow, plain = mostly_slow([named, named, (2, "y")], keep=1)
    assert kept is named
    marks = [pytest.mark.process, pytest.mark.slow]
    assert slow == pytest.param(1, "x", marks=marks, id="one")
    assert plain == pytest.param(2, "y", marks=pytest.mark.slow)
