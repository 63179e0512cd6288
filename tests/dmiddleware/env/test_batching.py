import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.env.batching import (
    allocate,
    index_rows,
    make_check,
    make_collate,
    make_read,
    make_split,
    make_write,
    map_arrays,
    replace_rows,
)
from dmiddleware.errors import EnvProtocolError, StructureError

SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
BOXES = st.builds(
    lambda shape, dtype: spaces.Box(0, 100, shape, dtype),
    SHAPES,
    st.sampled_from([np.float32, np.float64, np.uint8, np.int16]),
)
FLAT = st.one_of(
    BOXES,
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 6), st.integers(-3, 3)
    ),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
)
SPACES = st.recursive(
    FLAT,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: spaces.Tuple(tuple(items))),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
)


def same(ours, theirs):
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


@given(SPACES, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_batching_equals_gymnasiums(space, n):
    space.seed(0)
    rows = [space.sample() for _ in range(n)]
    expected = concatenate(space, rows, create_empty_array(space, n))
    same(make_collate(space)(rows), expected)


@given(SPACES, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_splitting_undoes_batching(space, n):
    space.seed(0)
    rows = [space.sample() for _ in range(n)]
    split = make_split(space)(make_collate(space)(rows))
    for ours, theirs in zip(split, rows, strict=True):
        assert space.contains(ours)
        same(ours, theirs)


@given(SPACES, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_rows_are_written_and_read_one_by_one(space, n):
    space.seed(0)
    rows = [space.sample() for _ in range(n)]
    arrays, write, read = allocate(space, n), make_write(space), make_read(space)
    for index, row in enumerate(rows):
        write(arrays, index, row)
    same(arrays, make_collate(space)(rows))
    for index, row in enumerate(rows):
        same(read(arrays, index), row)


def test_a_read_element_is_a_copy():
    arrays = np.zeros((2, 3))
    element = make_read(spaces.Box(-1, 1, (3,), np.float64))(arrays, 0)
    arrays[0] = 7
    assert element.tolist() == [0, 0, 0]


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("obs", [np.zeros(3), np.zeros((1, 2)), 0.0, None, "ab"])
def test_an_observation_of_another_shape_is_rejected(obs, write):
    space = spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises((ValueError, TypeError)):
        if write:
            make_write(space)(allocate(space, 1), 0, obs)
        else:
            make_collate(space)([obs])


def test_float64_observations_take_the_dtype_of_the_space():
    batch = make_collate(spaces.Box(-1, 1, (2,), np.float32))([np.zeros(2), [1, 2]])
    assert batch.dtype == np.float32


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("space", [spaces.Box(0, 255, (2,), np.uint8), spaces.MultiBinary(2)])
def test_fractions_do_not_become_whole_numbers(space, write):
    with pytest.raises(TypeError, match="its dtype is float64"):
        if write:
            make_write(space)(allocate(space, 1), 0, np.zeros(2))
        else:
            make_collate(space)([np.zeros(2)])
    assert make_collate(space)([[1, 0]]).dtype == space.dtype


@pytest.mark.parametrize(
    "actions",
    [np.zeros((2, 1), np.int64), np.zeros(2), np.int64(1), ["a", "b"], np.zeros((2, 2), np.int64)],
)
def test_discrete_actions_are_integers_one_per_env(actions):
    with pytest.raises(StructureError, match=r"Discrete\(3\): pass integers of shape \[E\]"):
        make_check(spaces.Discrete(3))(actions)


def test_box_actions_take_the_dtype_of_the_space():
    space = spaces.Box(-1, 1, (2,), np.float32)
    actions = make_split(space)(make_check(space)(np.zeros((3, 2))))
    assert [action.dtype for action in actions] == [np.float32] * 3


def test_box_actions_of_another_shape_are_rejected():
    with pytest.raises(StructureError, match=r"shape \(3, 4\).*numbers of shape \[E, 2\]"):
        make_check(spaces.Box(-1, 1, (2,), np.float32))(np.zeros((3, 4)))


def test_nested_actions_need_every_key():
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    with pytest.raises(StructureError, match=r"a dict with its keys, got \['a'\]"):
        make_check(space)({"a": np.zeros(2, int)})
    with pytest.raises(StructureError, match="a dict with its keys"):
        make_check(space)(np.zeros(2, int))


def test_tuple_actions_may_come_as_a_treetensor_has_them():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
    parts = {"0": np.array([1, 0]), "1": np.array([2, 1])}
    assert make_split(space)(make_check(space)(parts)) == [(1, 2), (0, 1)]
    with pytest.raises(StructureError, match="a tuple of 2"):
        make_check(space)((np.array([1, 0]),))


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_a_space_without_a_shape_is_rejected_with_what_to_do(space):
    for make in (make_collate, make_split, make_write, make_check):
        with pytest.raises(EnvProtocolError, match=r"have no fixed shape.*wrap the env"):
            make(spaces.Dict(a=space))


def test_replaced_rows_leave_the_original_alone():
    old = {"a": np.zeros((3, 2)), "b": (np.arange(3),)}
    new = replace_rows(old, [1], {"a": np.ones((1, 2)), "b": (np.array([9]),)})
    assert new["a"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert new["b"][0].tolist() == [0, 9, 2]
    assert old["b"][0].tolist() == [0, 1, 2]
    assert index_rows(new, 1)["b"][0] == 9
    assert index_rows(new, [2, 1])["b"][0].tolist() == [2, 9]
    assert map_arrays(len, new) == {"a": 3, "b": (3,)}
