"""Tensors and batches through the router's codec and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch

from dmiddleware.router import Codec
from dmiddleware.tree import as_tree, leaves


def there_and_back(value: Any) -> Any:
    skeleton, buffers = Codec().encode(value)
    return Codec().decode(skeleton, [bytes(buffer) for buffer in buffers])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int64,
        torch.bool,
    ],
)
def test_tensors_keep_their_dtype_and_numbers(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back(tensor)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)


def test_received_tensors_are_writable() -> None:
    back = there_and_back(torch.zeros(3))
    back += 1
    assert back.tolist() == [1.0, 1.0, 1.0]


def test_a_nested_batch_keeps_its_structure() -> None:
    batch = as_tree({"obs": {"image": np.zeros((2, 3), np.uint8)}, "reward": torch.ones(2)})
    back = there_and_back({"batch": batch})["batch"]
    assert isinstance(back, ttorch.Tensor)
    assert [path for path, _ in leaves(back)] == ["obs.image", "reward"]
    assert back.obs.image.dtype is torch.uint8


def test_strided_tensors_and_scalars_arrive_unchanged() -> None:
    assert there_and_back(torch.arange(12).reshape(3, 4)[:, ::2]).tolist() == [
        [0, 2],
        [4, 6],
        [8, 10],
    ]
    assert there_and_back(torch.tensor(2.5)).item() == 2.5


def test_the_parameters_of_a_network_arrive_as_tensors() -> None:
    net = torch.nn.Linear(2, 2)
    back = there_and_back(dict(net.named_parameters()))
    assert torch.equal(back["weight"], net.weight)
    assert not back["weight"].requires_grad
