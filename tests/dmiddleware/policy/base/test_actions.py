import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy.base.actions import ActionBounds

number = st.floats(-100, 100, width=32)
width = st.floats(0.125, 100, width=32)


@settings(deadline=None)
@given(low=number, width=width, raw=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
def test_mapping_to_env_actions_and_back_is_the_identity(low, width, raw):
    bounds = ActionBounds([low], [low + width])
    raw = torch.tensor(raw).unsqueeze(-1)
    error = 1e-5 * (abs(low) + width)
    torch.testing.assert_close(
        bounds.to_raw(bounds.to_env(raw)), raw, rtol=1e-4, atol=max(1e-5, 4 * error / width)
    )


@settings(deadline=None)
@given(
    low=number,
    width=width,
    raw=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    mode=st.sampled_from(["rescale", "clip"]),
)
def test_no_action_is_outside_the_box(low, width, raw, mode):
    box = gym.spaces.Box(np.float32([low]), np.float32([low + width]), dtype=np.float32)
    bounds = ActionBounds([low], [low + width], mode=mode)
    for action in bounds.to_env(torch.tensor(raw).unsqueeze(-1)).numpy():
        assert action in box


def test_rescaling_maps_the_unit_interval_to_the_bounds():
    bounds = ActionBounds([-2.0, 0.0], [2.0, 10.0])
    raw = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [9.0, 9.0]])
    assert bounds.to_env(raw).tolist() == [[-2, 0], [0, 5], [1, 7.5], [2, 10], [2, 10]]


def test_clipping_leaves_what_is_inside():
    bounds = ActionBounds([-2.0], [2.0], mode="clip")
    assert bounds.to_env(torch.tensor([[-3.0], [0.5], [3.0]])).flatten().tolist() == [-2, 0.5, 2]
    assert bounds.to_raw(torch.tensor([[0.5]])).item() == 0.5


def test_a_dimension_without_bounds_is_left_as_it_is():
    bounds = ActionBounds([-np.inf, 0.0], [np.inf, 4.0])
    assert bounds.to_env(torch.tensor([[50.0, 0.5]])).tolist() == [[50.0, 3.0]]
    assert bounds.to_raw(torch.tensor([[50.0, 3.0]])).tolist() == [[50.0, 0.5]]


def test_without_bounds_nothing_changes():
    bounds = ActionBounds()
    raw = torch.randn(3, 2)
    assert bounds.to_env(raw) is raw
    assert bounds.to_raw(raw) is raw
    assert bounds.state_dict() == {"unbounded": True}
    assert ActionBounds().state_dict() == {"unbounded": False}


def test_one_bound_alone_is_rejected():
    with pytest.raises(ConfigError, match="belong together"):
        ActionBounds([0.0], None)


@pytest.mark.parametrize(("low", "high"), [([1.0], [1.0]), ([0.0, 0.0], [1.0]), (0.0, 1.0)])
def test_invalid_bounds_are_rejected(low, high):
    with pytest.raises(ConfigError, match="each lower bound below"):
        ActionBounds(low, high)


def test_discrete_actions_do_not_fit():
    with pytest.raises(SpaceError, match=r"actions are continuous.*takes Discrete"):
        ActionBounds([0.0], [1.0]).check(gym.spaces.Discrete(2))
