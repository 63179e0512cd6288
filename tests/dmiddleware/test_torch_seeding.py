"""A seed for what draws from torch's global generators, in one thread and in several."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.model import obs_shape_of
from dmiddleware.policy import DQNPolicy
from dmiddleware.reward import GAIL, RND, IntrinsicCritic
from dmiddleware.seeding import seed_libraries
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import as_tree

OBS, ACTIONS = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)


def tensors_of(state: Mapping[str, Any], path: str = "") -> list[tuple[str, bytes]]:
    """Return the tensors of nested dictionaries, with their paths."""
    found: list[tuple[str, bytes]] = []
    for name, value in state.items():
        if isinstance(value, Mapping):
            found += tensors_of(value, f"{path}{name}.")
        elif isinstance(value, torch.Tensor):
            found.append((f"{path}{name}", value.numpy().tobytes()))
    return found


def draw() -> None:
    with torch_seeded(5):
        torch.rand(4)


@pytest.fixture
def frequent_turns() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_the_block_draws_the_same_numbers_and_leaves_the_generator_as_it_was():
    before = torch.default_generator.get_state()
    with torch_seeded(3):
        first = torch.rand(4)
    with torch_seeded(3):
        assert torch.equal(torch.rand(4), first)
    with torch_seeded(4):
        assert not torch.equal(torch.rand(4), first)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_an_error_in_the_block_leaves_the_generator_as_it_was():
    before = torch.default_generator.get_state()
    with pytest.raises(ZeroDivisionError), torch_seeded(3):
        torch.rand(4)
        raise ZeroDivisionError
    assert torch.equal(torch.default_generator.get_state(), before)


@pytest.mark.parametrize("in_other_thread", [draw, lambda: seed_libraries(5)])
def test_another_thread_waits_until_the_block_has_ended(
    in_other_thread: Callable[[], None],
) -> None:
    other = threading.Thread(target=in_other_thread)
    with torch_seeded(3):
        alone = torch.rand(8)
    with torch_seeded(3):
        first = torch.rand(4)
        other.start()
        other.join(0.2)
        assert other.is_alive(), "the other thread did not wait"
        assert torch.equal(torch.cat([first, torch.rand(4)]), alone)
    other.join(10)
    assert not other.is_alive()


class Spaces:
    observation_space, action_space = OBS, ACTIONS


EXPERT = as_tree({"obs": np.zeros((64, 4), np.float32), "action": np.zeros(64, np.int64)})
MAKE: dict[str, Callable[[int], Any]] = {
    "policy": lambda seed: DQNPolicy.for_env(Spaces, seed=seed).learn_mode,
    "RND": lambda seed: RND(obs_shape_of(OBS), seed=seed),
    "GAIL": lambda seed: GAIL.for_env(Spaces, EXPERT, seed=seed),
    "critic": lambda seed: IntrinsicCritic(obs_shape_of(OBS), seed=seed),
}


@pytest.mark.parametrize("kind", MAKE)
def test_threads_that_build_at_once_get_the_weights_that_one_gets(
    kind: str, frequent_turns: None
) -> None:
    def made(seed: int) -> list[tuple[str, bytes]]:
        return tensors_of(MAKE[kind](seed).state_dict())

    alone = [made(seed) for seed in range(4)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert list(threads.map(made, range(4))) == alone
