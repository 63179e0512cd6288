"""Trees of tensors, parts of networks and optimizers of ``ding.torch_utils``."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.ding import torch_utils

Point = namedtuple("Point", "x y")


def test_values_become_tensors() -> None:
    converted = torch_utils.to_tensor(
        {"a": np.zeros(2), "b": [1, 2], "c": 1.5, "d": True, "e": None, "f": Point([1.0], "x")}
    )
    assert converted["a"].dtype == torch.float32 and converted["b"].dtype == torch.int64
    assert converted["c"].item() == 1.5 and converted["d"] is True and converted["e"] is None
    assert converted["f"].x.tolist() == [1.0] and converted["f"].y == "x"
    half = torch_utils.to_tensor([np.ones(1), torch.ones(1)], torch.float16)
    assert [x.dtype for x in half] == [torch.float16] * 2
    assert torch_utils.to_tensor({"a": [1]}, ignore_keys=["a"]) == {"a": [1]}
    assert torch_utils.to_tensor(3, transform_scalar=False) == 3
    with pytest.raises(TypeError, match="object"):
        torch_utils.to_tensor(object())


def test_values_become_arrays_and_lists() -> None:
    converted = torch_utils.to_ndarray(
        {"a": torch.ones(2), "b": [1, 2], "c": 1, "d": "x", "e": [], "f": Point([1], None)},
        np.float32,
    )
    assert converted["a"].dtype == converted["b"].dtype == converted["c"].dtype == np.float32
    assert (converted["d"], converted["e"], converted["f"].y) == ("x", None, None)
    assert torch_utils.to_ndarray([torch.ones(1)])[0].tolist() == [1.0]
    nested = {"a": (torch.ones(1), np.zeros(1)), "b": 2}
    assert torch_utils.to_list(nested) == {"a": [[1.0], [0.0]], "b": 2}
    assert torch_utils.to_item({"a": torch.ones(1), "b": torch.ones(2)}) == {"a": 1.0}
    assert torch_utils.to_item([np.ones(1), 3]) == [1.0, 3]
    with pytest.raises((RuntimeError, ValueError)):
        torch_utils.to_item({"b": torch.ones(2)}, ignore_error=False)


def test_tensors_are_moved_and_converted() -> None:
    tree = {"a": torch.ones(1), "b": [1, "x"], "c": torch.ones(1)}
    moved = torch_utils.to_device(tree, "meta", ignore_keys=["c"])
    assert (moved["a"].device.type, moved["c"].device.type) == ("meta", "cpu")
    assert moved["b"] == [1, "x"]
    assert torch_utils.to_dtype([torch.ones(1)], torch.int64)[0].dtype == torch.int64


def test_one_hot_leaves_out_what_is_minus_1() -> None:
    val = torch.tensor([[1, -1]])
    assert torch_utils.one_hot(val, 3).tolist() == [[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]
    assert torch_utils.one_hot(val, 3, num_first=True).shape == (3, 1, 2)


def test_layers_have_di_engines_names_of_parameters() -> None:
    mlp = torch_utils.MLP(
        2,
        4,
        3,
        2,
        activation=nn.ReLU(),
        norm_type="LN",
        use_dropout=True,
        output_activation=False,
        output_norm=False,
        last_linear_layer_init_zero=True,
    )
    assert list(mlp.state_dict()) == [f"{i}.{x}" for i in (0, 1, 4) for x in ("weight", "bias")]
    assert mlp(torch.ones(1, 2)).tolist() == [[0.0, 0.0, 0.0]]
    assert torch_utils.MLP(2, 4, 3, 0)(torch.ones(1, 2)).shape == (1, 2)
    assert torch_utils.fc_block(2, 3, nn.ReLU(), "BN")(torch.ones(4, 2)).shape == (4, 3)
    block = torch_utils.conv2d_block(3, 8, 3, padding=1, pad_type="reflect", norm_type="LN")
    assert block.out_channels == 8 and block(torch.ones(1, 3, 5, 5)).shape == (1, 8, 5, 5)
    names = set(torch_utils.ResFCBlock(4, dropout=0.1).state_dict())
    assert {"fc1.0.weight", "fc2.1.running_mean"} <= names
    assert torch_utils.ResFCBlock(4)(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("kind", "shape"), [("basic", (4, 6)), ("bottleneck", (4, 6)), ("downsample", (8, 3))]
)
def test_residual_blocks_keep_or_halve_the_image(kind: str, shape: tuple[int, int]) -> None:
    block = torch_utils.ResBlock(4, res_type=kind, out_channels=shape[0], norm_type="BN")
    assert block(torch.ones(2, 4, 6, 6)).shape == (2, shape[0], shape[1], shape[1])
    assert "conv1.0.weight" in block.state_dict()
    with pytest.raises(ValueError, match="wide"):
        torch_utils.ResBlock(4, res_type="wide")


@pytest.mark.parametrize(
    ("name", "value"), [("relu", 0.0), ("square", 4.0), ("identity", -2.0), ("swish", -0.2384)]
)
def test_activations_have_names(name: str, value: float) -> None:
    activation = torch_utils.build_activation(name)
    assert activation(torch.tensor(-2.0)).item() == pytest.approx(value, abs=1e-4)
    with pytest.raises(KeyError, match="step"):
        torch_utils.build_activation("step")
    with pytest.raises(KeyError, match="GN"):
        torch_utils.build_normalization("GN")


def test_noise_is_there_only_when_it_is_switched_on() -> None:
    torch.manual_seed(0)
    (layer,) = torch_utils.noise_block(3, 2)
    x = torch.ones(1, 3)
    quiet = layer(x)
    layer.enable_noise = True
    first = layer(x)
    layer.reset_noise()
    assert not torch.equal(first, layer(x)) and not torch.equal(first, quiet)
    noise = layer.weight_mu + layer.weight_sigma * torch.outer(
        layer.bias_eps, layer.weight_eps[0] / layer.bias_eps[0]
    )
    expected = x @ noise.T + layer.bias_mu + layer.bias_sigma * layer.bias_eps
    torch.testing.assert_close(layer(x), expected)


def test_entities_are_put_at_their_places() -> None:
    x = torch.tensor([[[1.0], [2.0]]])
    location = torch.tensor([[[0, 2], [0, 2]]])
    added = torch_utils.ScatterConnection("add")(x, (2, 3), location)
    assert added.tolist() == [[[[0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]]]
    cover = torch_utils.ScatterConnection("cover")(x, (2, 3), location)
    assert cover[0, 0, 0, 2].item() in (1.0, 2.0)
    with pytest.raises(ValueError, match="max"):
        torch_utils.ScatterConnection("max")


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (torch_utils.Adam, {}),
        (torch_utils.Adam, {"optim_type": "adamw", "weight_decay": 0.1}),
        (torch_utils.RMSprop, {}),
    ],
)
@pytest.mark.parametrize(("kind", "norm"), [("clip_norm", 0.5), ("clip_value", 0.5)])
def test_optimizers_bound_gradients(build: Any, options: Any, kind: str, norm: float) -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = build(layer.parameters(), lr=0.1, grad_clip_type=kind, clip_value=norm, **options)
    before = layer.weight.item()
    (layer.weight * 100).sum().backward()
    assert torch_utils.calculate_grad_norm(layer) == 100.0
    optimizer.step()
    assert torch_utils.calculate_grad_norm(layer, "inf") == pytest.approx(norm)
    assert layer.weight.item() < before
    with pytest.raises(ValueError, match="clip_momentum"):
        build(layer.parameters(), grad_clip_type="clip_momentum", clip_value=1.0)
    with pytest.raises(ValueError, match="go together"):
        build(layer.parameters(), grad_clip_type="clip_norm")


def test_gradients_are_averaged_only_over_several_ranks() -> None:
    assert torch_utils.calculate_grad_norm(nn.Linear(1, 1)) == 0.0
    with pytest.raises(RuntimeError, match="ranks"):
        torch_utils.DataParallel(nn.Linear(1, 1))
