import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from dmiddleware.errors import SpaceError
from dmiddleware.model import (
    action_kind_of,
    action_mask_of,
    action_parts,
    action_shape_of,
    as_obs_shape,
    obs_shape_of,
)


def box(*shape: int, dtype=np.float32) -> spaces.Box:
    return spaces.Box(0, 1, shape, dtype)


NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (3, 64, 64), np.uint8),
        "body": spaces.Dict({"joints": box(7), "gear": spaces.Discrete(6)}),
        "touch": spaces.Tuple((spaces.MultiBinary(4), spaces.MultiDiscrete([2, 3]))),
    }
)

NESTED_SHAPE = {
    "camera": (3, 64, 64),
    "body": {"joints": 7, "gear": ("one_hot", 6)},
    "touch": {"0": 4, "1": ("one_hot", 2, 3)},
}


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (box(4), 4),
        (box(), ()),
        (box(2, 3), (2, 3)),
        (box(4, 84, 84), (4, 84, 84)),
        (spaces.Discrete(5), ("one_hot", 5)),
        (spaces.MultiBinary(6), 6),
        (spaces.MultiDiscrete([2, 3]), ("one_hot", 2, 3)),
        (NESTED, NESTED_SHAPE),
    ],
    ids=str,
)
def test_each_supported_space_has_its_shape(space, shape):
    assert obs_shape_of(space) == shape


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(box(2)),
        spaces.Graph(box(2), None),
        spaces.OneOf([box(2), box(3)]),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiDiscrete([5]),
        spaces.Dict({"words": spaces.Text(5)}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_observation_that_no_network_takes_is_rejected_with_what_to_do(space):
    with pytest.raises(SpaceError, match=r"(?s)no network here takes .*TransformObservation"):
        obs_shape_of(space)


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2], start=[0, -1])], ids=str
)
def test_integers_that_do_not_count_from_zero_are_rejected(space):
    with pytest.raises(SpaceError, match=r"count from 0.*gymnasium\.wrappers\.TransformObs"):
        obs_shape_of(space)


HYBRID = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=1),
        "arm": spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.MultiDiscrete([2, 4]))),
    }
)


@pytest.mark.parametrize(
    ("space", "kind", "shape"),
    [
        (spaces.Discrete(5), "discrete", 5),
        (spaces.Discrete(3, start=2), "discrete", 3),
        (box(3), "continuous", 3),
        (box(2, 3), "continuous", 6),
        (box(), "continuous", 1),
        (spaces.MultiDiscrete([2, 3]), "multi_discrete", (2, 3)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "multi_discrete", (2, 3, 4, 5)),
        (spaces.MultiBinary((2, 2)), "multi_binary", 4),
        (
            HYBRID,
            {"move": "discrete", "arm": {"0": "continuous", "1": "multi_discrete"}},
            {"move": 3, "arm": {"0": 4, "1": (2, 4)}},
        ),
    ],
    ids=str,
)
def test_each_supported_action_space_has_its_kind_and_shape(space, kind, shape):
    assert action_kind_of(space) == kind
    assert action_shape_of(space) == shape
    plain = yaml.safe_load(yaml.dump(as_lists(shape)))
    assert action_parts(kind, plain) == action_parts(kind, shape)


def test_the_parts_of_an_action_are_sorted_and_those_of_a_tuple_numbered():
    parts = action_parts(action_kind_of(HYBRID), action_shape_of(HYBRID))
    assert [part.name for part in parts] == ["arm.0", "arm.1", "move"]
    many = spaces.Tuple([spaces.Discrete(n) for n in range(2, 14)])
    parts = action_parts(action_kind_of(many), action_shape_of(many))
    assert [part.sizes for part in parts] == [(n,) for n in range(2, 14)]


@pytest.mark.parametrize(
    "space",
    [
        box(3, dtype=np.int64),
        spaces.Text(5),
        spaces.Sequence(box(2)),
        spaces.Dict({"a": spaces.Text(5)}),
    ],
    ids=str,
)
def test_an_action_that_no_network_gives_is_rejected_with_what_to_do(space):
    for function in (action_kind_of, action_shape_of):
        with pytest.raises(SpaceError, match=r"gives actions of .*TransformAction"):
            function(space)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("hybrid", 3, "action_space must be one of"),
        ("discrete", 0, "must be a positive integer for discrete actions, got 0"),
        ("discrete", (2, 3), "must be a positive integer"),
        ("continuous", True, "a positive integer for continuous actions, got True"),
        ("multi_discrete", (2, 0), "a list of positive integers"),
        ("multi_discrete", (), "a list of positive integers"),
        ({"a": "discrete"}, 3, "mappings with the same names"),
        ({"a": "discrete"}, {"b": 3}, "mappings with the same names"),
        ({}, {}, "mappings with the same names"),
    ],
    ids=str,
)
def test_an_invalid_action_is_rejected(kind, shape, message):
    with pytest.raises(SpaceError, match=message):
        action_parts(kind, shape)


def test_names_with_dots_are_rejected():
    with pytest.raises(SpaceError, match=r"texts without dots, got 'a\.b'"):
        action_kind_of(spaces.Dict({"a.b": spaces.Discrete(2)}))


def test_a_nested_mask_is_joined_in_the_order_of_the_action():
    nested = {"move": np.array([1, 0, 1]), "arm": (np.array([0, 1]), np.array([1]))}
    mask = action_mask_of({"action_mask": nested, "observation": np.zeros(2)})
    assert mask.tolist() == [False, True, True, True, False, True]


def test_the_wrapper_that_a_message_names_exists():
    for name in (
        "TransformObservation",
        "TransformAction",
        "ResizeObservation",
        "FlattenObservation",
        "FrameStackObservation",
    ):
        assert hasattr(gym.wrappers, name)


def test_all_notations_of_a_shape_become_the_same():
    assert as_obs_shape(4) == as_obs_shape([4]) == as_obs_shape((np.int64(4),)) == (4,)
    assert as_obs_shape(["one_hot", 3]) == ("one_hot", 3)
    assert list(as_obs_shape({"b": 1, "a": {"c": [2, 3]}}).items()) == [
        ("a", {"c": (2, 3)}),
        ("b", (1,)),
    ]


def test_a_shape_survives_yaml():
    plain = yaml.safe_load(yaml.dump(as_lists(NESTED_SHAPE)))
    assert as_obs_shape(plain) == as_obs_shape(NESTED_SHAPE)


def as_lists(shape):
    if isinstance(shape, dict):
        return {key: as_lists(value) for key, value in shape.items()}
    return list(shape) if isinstance(shape, tuple) else shape


@pytest.mark.parametrize(
    "shape",
    [0, -1, True, None, "4", 4.0, (3, 0), ("one_hot",), ("one_hot", 0), ("hot", 3)],
    ids=str,
)
def test_an_invalid_shape_is_rejected(shape):
    with pytest.raises(SpaceError, match="an observation shape is a positive integer"):
        as_obs_shape(shape)


def test_an_empty_mapping_is_not_a_shape():
    with pytest.raises(SpaceError, match="needs at least one entry"):
        as_obs_shape({"inner": {}})
