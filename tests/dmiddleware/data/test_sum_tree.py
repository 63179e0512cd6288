import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data.sum_tree import SumTree

SIZES = st.sampled_from([1, 2, 7, 16, 17, 300, 2000])
FAN_OUTS = st.sampled_from([2, 3, 16])


@st.composite
def changes(draw):
    """A size and changes to the values: (start, values). They are integers, so sums are exact."""
    size = draw(SIZES)
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, min(size, 40)))
        start = draw(st.integers(0, size - n))
        values = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
        steps.append((start, values, draw(st.booleans())))
    return size, steps


@settings(max_examples=150, deadline=None)
@given(changes(), FAN_OUTS, st.integers(0, 2**32 - 1))
def test_it_finds_what_a_cumulative_sum_finds(case, fan_out, seed):
    size, steps = case
    tree, naive = SumTree(size, fan_out=fan_out), np.zeros(size)
    generator = np.random.default_rng(seed)
    for start, values, as_range in steps:
        index = np.arange(start, start + len(values))
        if as_range:
            tree.fill(start, start + len(values), values)
        else:
            order = generator.permutation(len(values))
            tree.set(index[order], np.array(values, float)[order])
        naive[index] = values
        assert np.array_equal(tree.values, naive)
        assert tree.total == naive.sum()
        if naive.sum() == 0:
            with pytest.raises(ValueError, match="all values of the sum tree are zero"):
                tree.find(np.zeros(1))
            continue
        part = generator.integers(0, 2**20, 50) / 2**20
        found, value, lowest = tree.find(part)
        expected = naive.cumsum().searchsorted(part * naive.sum(), side="right")
        assert np.array_equal(found, expected)
        assert np.array_equal(value, naive[found])
        assert lowest == value.min()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-16, 0.1, 1 / 3, 7.7, 1e16]), min_size=1, max_size=60),
    FAN_OUTS,
    st.integers(0, 2**32 - 1),
)
def test_it_never_finds_a_zero_despite_rounding(values, fan_out, seed):
    if not any(values):
        values[0] = 1.0
    tree = SumTree(len(values), fan_out=fan_out)
    tree.fill(0, len(values), values)
    ends = np.cumsum(values) / np.sum(values)
    part = np.concatenate([np.random.default_rng(seed).random(20), ends, [0.0, 1 - 2**-53, 1.0]])
    found, value, lowest = tree.find(part)
    assert lowest == value.min() > 0
    assert np.array_equal(value, np.array(values)[found])


def test_an_index_that_appears_twice_gets_its_last_value():
    tree = SumTree(40)
    tree.set(np.array([33, 2, 33]), np.array([5.0, 1.0, 3.0]))
    assert tree.values[33] == 3.0
    assert tree.total == 4.0


def test_trees_of_two_and_three_levels_find_the_same():
    size = 20_000
    values = np.random.default_rng(0).integers(0, 9, size).astype(float)
    deep = SumTree(size, fan_out=2)
    deep.fill(0, size, values)
    deep.set(np.array([5, 19_999, 12_345]), np.array([100.0, 50.0, 0.0]))
    values[[5, 19_999, 12_345]] = 100.0, 50.0, 0.0
    part = (np.arange(1000) + 0.5) / 1000
    found, *_ = deep.find(part)
    assert np.array_equal(found, values.cumsum().searchsorted(part * values.sum(), side="right"))


def test_values_are_read_only():
    tree = SumTree(3)
    with pytest.raises(ValueError, match="read-only"):
        tree.values[0] = 1.0
    tree.set(np.array([0]), 2.0)
    assert tree.values[0] == 2.0


@pytest.mark.parametrize(("size", "fan_out"), [(0, 16), (4, 1)])
def test_invalid_sizes_are_rejected(size, fan_out):
    with pytest.raises(ValueError, match="must be an integer ≥"):
        SumTree(size, fan_out=fan_out)
