"""Data of other dtypes than the policy's own, as it is when someone makes it by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.classic import as_eval_mode, as_learn_mode
from dmiddleware.data import TensorBuffer, as_tree, to_dict
from dmiddleware.errors import ConfigError
from dmiddleware.policy import (
    BCPolicy,
    DQNPolicy,
    IQLPolicy,
    PPOPolicy,
    SACPolicy,
    TD3BCPolicy,
)
from tests.dmiddleware.policy.every_policy import CONTINUOUS, EVERY, batch_for, env_for, made

FLAGS = ("done", "terminated", "truncated", "mask", "is_first")


def mapped(function: Callable[[str, Any], Any], columns: dict[str, Any], name: str = "") -> Any:
    """Apply a function to the name and each leaf of all columns."""
    return {
        key: mapped(function, value, name or key)
        if isinstance(value, dict)
        else function(name or key, value)
        for key, value in columns.items()
    }


def as_numbers(dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf


def flags_as(dtype: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda name, leaf: leaf.to(dtype) if name in FLAGS else leaf


def small_choices(name: str, leaf: torch.Tensor) -> torch.Tensor:
    is_choice = name in ("action", "prev_action") and not leaf.is_floating_point()
    return leaf.to(torch.int32) if is_choice else leaf


def arrays(name: str, leaf: torch.Tensor) -> Any:
    return as_numbers(torch.float64)(name, leaf).numpy()


def whole_rewards(name: str, leaf: torch.Tensor) -> torch.Tensor:
    return leaf.round().long() if name == "reward" else leaf


CONVERSIONS: dict[str, Callable[[str, torch.Tensor], Any]] = {
    "float64": as_numbers(torch.float64),
    "float64 arrays": arrays,
    "flags of uint8": flags_as(torch.uint8),
    "flags of float64": flags_as(torch.float64),
    "choices of int32": small_choices,
}


@pytest.mark.parametrize("cls", EVERY)
def test_an_update_does_not_depend_on_the_dtypes_of_its_data(cls: Any) -> None:
    policy = made(cls)
    batch = batch_for(policy)
    state = policy.learn_mode.state_dict()
    loss = policy.learn_mode.forward(batch)["total_loss"]
    for name, convert in CONVERSIONS.items():
        policy.learn_mode.load_state_dict(state)
        converted = as_tree(mapped(convert, to_dict(batch)))
        assert policy.learn_mode.forward(converted)["total_loss"] == loss, name


@pytest.mark.parametrize("cls", EVERY)
def test_half_precision_and_whole_rewards_are_learned_from(cls: Any) -> None:
    policy = made(cls, **({"n_step": 1} if hasattr(cls.settings_class(), "n_step") else {}))
    columns = to_dict(batch_for(policy))
    columns.pop("discount", None)  # which half precision cannot hold
    for convert in (as_numbers(torch.float16), whole_rewards):
        output = policy.learn_mode.forward(as_tree(mapped(convert, columns)))
        assert np.isfinite(output["total_loss"])


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy, IQLPolicy, BCPolicy])
def test_samples_and_plain_dictionaries_of_numpy_are_learned_from(cls: Any) -> None:
    policies = [made(cls) for _ in range(3)]
    batch, *_ = (to_dict(batch_for(policy)) for policy in policies)
    by_hand = mapped(arrays, batch)
    samples = [mapped(lambda _, leaf, i=i: leaf[i], by_hand) for i in range(len(batch["reward"]))]
    lists = mapped(lambda _, leaf: leaf.tolist(), batch)
    modes = [as_learn_mode(policy, user="the test") for policy in policies]  # take lists, too
    losses = [
        mode.forward(data)["total_loss"]
        for mode, data in zip(modes, (by_hand, samples, as_tree(lists)), strict=True)
    ]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("flags", [np.bool_, np.uint8, np.float64])
@pytest.mark.parametrize("numbers", [np.float16, np.float64])
@pytest.mark.parametrize("cls", [DQNPolicy, SACPolicy, TD3BCPolicy, IQLPolicy])
def test_hand_made_rows_are_learned_from_through_a_buffer(
    cls: Any, numbers: Any, flags: Any
) -> None:
    draw, n = np.random.default_rng(0), 60
    ends = np.arange(n) % 6 == 5
    choices = draw.integers(0, 3, n, np.int32)
    rows = {
        "obs": draw.normal(size=(n, 3)).astype(numbers),
        "next_obs": draw.normal(size=(n, 3)).astype(numbers),
        "action": draw.uniform(-2, 2, (n, 2)).astype(numbers) if cls in CONTINUOUS else choices,
        "reward": draw.normal(size=n).astype(numbers),
        "done": ends.astype(flags),
        "terminated": ends.astype(flags),
        "truncated": np.zeros(n, flags),
        "episode_id": np.arange(n) // 6,
    }
    policy = made(cls, **({} if cls is IQLPolicy else {"n_step": 3}))
    buffer = TensorBuffer(100, n_step=policy.n_step, discount=0.99, seed=0)
    buffer.push(as_tree(rows))
    assert np.isfinite(policy.learn_mode.forward(buffer.sample(16))["total_loss"])


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def other_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cls", EVERY)
def test_another_default_dtype_is_refused(cls: Any, other_default: Callable[[], None]) -> None:
    env = env_for(cls)
    other_default()
    with pytest.raises(ConfigError, match=rf"{cls.__name__} learns in float32.*set_default_dtype"):
        cls.for_env(env)


def test_another_default_dtype_is_refused_at_any_time(other_default: Callable[[], None]) -> None:
    policy = made(SACPolicy)
    batch, obs = batch_for(policy), torch.zeros(2, 3)
    other_default()
    for use in (
        lambda: policy.learn_mode.forward(batch),
        lambda: policy.collect_mode.forward(obs),
        lambda: as_eval_mode(policy, user="the test").forward({0: obs[0]}),
    ):
        with pytest.raises(ConfigError, match="in float32"):
            use()
