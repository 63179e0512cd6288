"""A policy refuses observations that are not finite, however it is called."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from treetensor.torch import Tensor as Tree

from dmiddleware.classic import as_collect_mode, as_eval_mode
from dmiddleware.errors import StructureError
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    DDPGPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    IQNPolicy,
    PPOPolicy,
    R2D2Policy,
    SACPolicy,
)

BOX = spaces.Box(-1, 1, (3,), np.float32)
PAIR = spaces.Dict(cam=spaces.Box(0, 255, (4,), np.uint8), pose=BOX)


class Env:
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


ACTIONS = {
    "discrete": spaces.Discrete(3),
    "several": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
}
POLICIES = [
    *((PPOPolicy, kind) for kind in ACTIONS),
    (A2CPolicy, "discrete"),
    (DQNPolicy, "discrete"),
    (IQNPolicy, "discrete"),
    (R2D2Policy, "discrete"),
    (DiscreteSACPolicy, "discrete"),
    (BCPolicy, "discrete"),
    (SACPolicy, "box"),
    (DDPGPolicy, "box"),
]


@pytest.mark.parametrize("field", ["collect_mode", "eval_mode"])
@pytest.mark.parametrize(("policy_cls", "kind"), POLICIES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_policy_names_the_value(policy_cls, kind, field, value):
    policy = policy_cls.for_env(Env(BOX, ACTIONS[kind]), seed=0)
    mode = getattr(policy, field)
    obs = torch.zeros(4, 3)
    obs[2, 1] = value
    state = mode.spec.initial_state(4)
    kwargs = {} if state is None else {"state": state}
    with pytest.raises(StructureError, match=rf"{policy_cls.__name__} .*{value} at \[2, 1\]"):
        mode.forward(obs, **kwargs)


@pytest.mark.parametrize("as_mode", [as_collect_mode, as_eval_mode])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda cam, pose: Tree({"cam": cam, "pose": pose}), r"pose \[1, 2\]"),
        (lambda cam, pose: {"cam": cam.numpy(), "pose": pose.numpy()}, r"\['pose'\]\[1, 2\]"),
        (
            lambda cam, pose: {
                key: Tree({"cam": cam[row], "pose": pose[row]}) for row, key in enumerate((7, 9))
            },
            r"\[9\]pose \[2\]",
        ),
    ],
)
def test_the_part_of_a_nested_observation_is_named(make, where, as_mode):
    policy = PPOPolicy.for_env(Env(PAIR, ACTIONS["discrete"]), seed=0)
    mode = as_mode(policy, user="the test")
    cam, pose = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, 3)
    mode.forward(make(cam, pose))
    pose[1, 2] = np.nan
    with pytest.raises(StructureError, match=f"nan at {where}"):
        mode.forward(make(cam, pose))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_large_values_are_accepted(dtype):
    policy = DQNPolicy.for_env(Env(BOX, ACTIONS["discrete"]), seed=0)
    info = np.finfo(dtype) if np.dtype(dtype).kind == "f" else np.iinfo(dtype)
    obs = np.zeros((2, 3), dtype)
    obs[0, 0] = info.max if dtype is not np.float64 else 1e30
    assert policy.eval_mode.forward(torch.as_tensor(obs).float())["action"].shape == (2,)
