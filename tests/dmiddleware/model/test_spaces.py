import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from dmiddleware.errors import SpaceError
from dmiddleware.model import action_kind_of, action_shape_of, as_obs_shape, obs_shape_of


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


@pytest.mark.parametrize(
    ("space", "kind", "size"),
    [(spaces.Discrete(5), "discrete", 5), (spaces.Box(-1, 1, (3,)), "continuous", 3)],
    ids=str,
)
def test_actions_are_choices_or_vectors(space, kind, size):
    assert action_kind_of(space) == kind
    assert action_shape_of(space) == size


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3, start=2), r"count from 0.*TransformAction"),
        (box(2, 3), r"one-dimensional floating-point Box, got Box.*TransformAction"),
        (box(), "one-dimensional floating-point Box"),
        (box(3, dtype=np.int64), "one-dimensional floating-point Box"),
        (spaces.MultiDiscrete([2, 3]), r"gives actions of MultiDiscrete.*Discrete action"),
        (spaces.Tuple((spaces.Discrete(2),)), r"gives actions of Tuple"),
    ],
    ids=str,
)
def test_an_action_that_no_network_gives_is_rejected_with_what_to_do(space, message):
    for function in (action_kind_of, action_shape_of):
        with pytest.raises(SpaceError, match=message):
            function(space)


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
