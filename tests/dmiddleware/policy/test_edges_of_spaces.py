"""Policies in spaces at their edges: one value, no dimensions, equal bounds, odd dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import SpaceError
from dmiddleware.policy import ActionCodec, DQNPolicy, PPOPolicy, RecurrentPPOPolicy, SACPolicy
from tests.dmiddleware.policy.one_round import (
    ANY_ACTION,
    BOX,
    CONTINUOUS,
    DISCRETE,
    Drawn,
    action_space_of,
    one_round,
)
from tests.variants import mostly_slow

Box = spaces.Box


def deep(leaf: gym.Space[Any]) -> gym.Space[Any]:
    return spaces.Dict({"a": spaces.Tuple((spaces.Dict({"b": spaces.Tuple((leaf,))}),))})


OBSERVATIONS: dict[str, gym.Space[Any]] = {
    "a single choice": spaces.Discrete(1),
    "choices of another dtype": spaces.Discrete(4, dtype=np.int32),
    "single choices": spaces.MultiDiscrete([1, 1]),
    "a single bit": spaces.MultiBinary(1),
    "bits of rank 2": spaces.MultiBinary((2, 3)),
    "equal bounds": Box(1.0, 1.0, (3,)),
    "equal bounds of bytes": Box(255, 255, (3,), np.uint8),
    "no dimensions": Box(-1.0, 1.0, ()),
    "rank 2": Box(-1.0, 1.0, (3, 2)),
    "half bounds": Box(0.0, np.inf, (3,)),
    "float64": Box(-5.0, 5.0, (3,), np.float64),
    "float16": Box(-5.0, 5.0, (3,), np.float16),
    "bool": Box(0, 1, (3,), np.bool_),
    **{
        np.dtype(kind).name: Box(0, 60, (3,), kind)
        for kind in (np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)
    },
    "deep": deep(Box(-1.0, 1.0, ())),
    "mixed": spaces.Dict(
        {"d": spaces.Discrete(1), "m": spaces.MultiBinary((2, 2)), "f": Box(0, 1, (2,), np.float64)}
    ),
}

CHOICES: dict[str, gym.Space[Any]] = {
    "a single choice": spaces.Discrete(1),
    "from below zero": spaces.Discrete(3, start=-7),
    "bytes": spaces.Discrete(4, dtype=np.uint8),
}
BOXES: dict[str, gym.Space[Any]] = {
    "equal bounds": Box(0.5, 0.5, (2,)),
    "some equal bounds": Box(np.float32([-1.0, 2.0]), np.float32([1.0, 2.0])),
    "no dimensions": Box(-1.0, 1.0, ()),
    "rank 2": Box(-1.0, 1.0, (2, 2)),
    "tiny": Box(-1e-8, 1e-8, (2,)),
    "float64": Box(-5.0, 5.0, (3,), np.float64),
    "float64 between float32": Box(0.1, 0.3, (2,), np.float64),
    "float64 thirds": Box(-1 / 3, 1 / 3, (2,), np.float64),
    "float16": Box(-0.1, 0.1, (2,), np.float16),
}
UNBOUNDED: dict[str, gym.Space[Any]] = {
    "unbounded": Box(-np.inf, np.inf, (2,)),
    "half bounded": Box(0.0, np.inf, (2,)),
}
SEVERAL: dict[str, gym.Space[Any]] = {
    "single choices": spaces.MultiDiscrete([1, 1]),
    "one choice": spaces.MultiDiscrete([5]),
    "choices of rank 2": spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[1, 2], [3, -4]]),
    "a single bit": spaces.MultiBinary(1),
    "bits of rank 2": spaces.MultiBinary((2, 3)),
    "deep": deep(Box(-1.0, 1.0, ())),
    "mixed": spaces.Dict(
        {"d": spaces.Discrete(1), "e": Box(1.0, 1.0, (1,)), "f": Box(0.1, 0.3, (2,), np.float64)}
    ),
}


def pairs(classes: Iterable[Any], names: Sequence[str]) -> list[object]:
    """Return all pairs; two of three are slow, so that no class and no name is always slow."""
    found = [(cls, name, i + j) for i, cls in enumerate(classes) for j, name in enumerate(names)]
    kept = [at for at, (_, _, place) in enumerate(found) if place % 3 == 0]
    return mostly_slow([(cls, name) for cls, name, _ in found], keep=kept)


@pytest.mark.parametrize(("cls", "name"), pairs([DQNPolicy, PPOPolicy], [*OBSERVATIONS]))
def test_a_policy_sees_every_supported_observation(cls: Any, name: str, tmp_path: Path) -> None:
    one_round(cls, OBSERVATIONS[name], folder=tmp_path, obs_norm=name in ("equal bounds", "mixed"))


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy, RecurrentPPOPolicy])
@pytest.mark.parametrize(
    "space",
    [
        Box(-1.0, 1.0, (0,)),
        Box(-1.0, 1.0, (2, 0)),
        spaces.Dict({}),
        spaces.Tuple(()),
        spaces.Dict({"x": BOX, "nothing": Box(-1.0, 1.0, (0,))}),
        spaces.Dict({"action_mask": spaces.MultiBinary(3)}),
    ],
    ids=str,
)
def test_nothing_to_see_is_refused(cls: Any, space: gym.Space[Any]) -> None:
    with pytest.raises(SpaceError, match=r"no numbers|at least one entry"):
        cls.for_env(Drawn(space, action_space_of(cls)))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("cls", DISCRETE)
def test_choices_at_their_edges(cls: Any, name: str, tmp_path: Path) -> None:
    one_round(cls, BOX, CHOICES[name], folder=tmp_path)


@pytest.mark.parametrize(("cls", "name"), pairs(CONTINUOUS, [*BOXES]))
def test_boxes_at_their_edges(cls: Any, name: str, tmp_path: Path) -> None:
    one_round(cls, BOX, BOXES[name], folder=tmp_path)


@pytest.mark.parametrize(
    ("cls", "name"), pairs(ANY_ACTION, [*BOXES, *UNBOUNDED, *CHOICES, *SEVERAL])
)
def test_actions_of_every_kind_at_their_edges(cls: Any, name: str, tmp_path: Path) -> None:
    one_round(cls, BOX, {**BOXES, **UNBOUNDED, **CHOICES, **SEVERAL}[name], folder=tmp_path)


@pytest.mark.parametrize("space", [Box(-1.0, 1.0, (0,)), Box(0, 5, (2,), np.int64)], ids=str)
@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy])
def test_actions_that_no_network_gives_are_refused(cls: Any, space: gym.Space[Any]) -> None:
    with pytest.raises(SpaceError, match=r"gives actions of Box.*TransformAction"):
        cls.for_env(Drawn(BOX, space))


BOUNDS = st.tuples(*[st.floats(-1e6, 1e6, allow_nan=False)] * 2).map(sorted)


@settings(deadline=None)
@given(
    bounds=BOUNDS,
    raw=st.floats(-3.0, 3.0, width=32),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_mapped_actions_are_in_the_box_and_back_again(bounds: Any, raw: float, dtype: Any) -> None:
    low, high = bounds
    space = Box(np.array([low], dtype), np.array([high], dtype), (1,), dtype)
    codec = ActionCodec.for_space(space)
    action = codec.to_env(torch.tensor([raw]))
    if np.float32(low) != np.float32(high) or dtype is np.float32:
        assert action.numpy().astype(dtype) in space
    assert codec.to_raw(action).isfinite().all()
    again = ActionCodec(low=[low], high=[high]) if high - low > 1 else codec
    again.set_space(space)
    assert torch.equal(again.to_env(torch.tensor([raw])), action)
