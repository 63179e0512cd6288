import math

import pytest
import torch
from torch import nn

from dmiddleware.model import MLP, NoisyLinear, NoisyMLP, activation_of, orthogonal_init

pytestmark = pytest.mark.usefixtures("either_torch")


def kinds(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module]


def test_an_mlp_is_a_plain_sequential_of_its_layers():
    mlp = MLP(4, (8, 6), out_features=2)
    assert kinds(mlp) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert list(mlp.state_dict()) == [
        "0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"
    ]  # fmt: skip
    x = torch.randn(5, 4)
    by_hand = mlp[4](torch.relu(mlp[2](torch.relu(mlp[0](x)))))
    assert torch.equal(mlp(x), by_hand)


def test_out_features_is_the_width_of_the_output():
    assert MLP(4, (8, 6)).out_features == 6
    assert MLP(4, (8, 6), out_features=2).out_features == 2
    assert MLP(4, (), out_features=3)(torch.zeros(7, 4)).shape == (7, 3)


def test_layer_norm_comes_before_each_activation_but_not_after_the_output():
    mlp = MLP(4, (8,), out_features=2, activation="tanh", norm="layer")
    assert kinds(mlp) == ["Linear", "LayerNorm", "Tanh", "Linear"]


def test_orthogonal_initialization_gives_scaled_orthogonal_weights_and_zero_biases():
    mlp = MLP(16, (16, 8), init="orthogonal")
    for layer in (mlp[0], mlp[2]):
        gram = layer.weight @ layer.weight.T
        torch.testing.assert_close(gram, 2.0 * torch.eye(len(gram)), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def test_orthogonal_initialization_reaches_convolutions():
    conv = nn.Sequential(nn.Conv2d(1, 4, 3))
    orthogonal_init(conv, 3.0)
    flat = conv[0].weight.flatten(1)
    torch.testing.assert_close(flat @ flat.T, 9.0 * torch.eye(4), atol=1e-5, rtol=0)


def test_without_an_initialization_layers_start_as_in_torch():
    torch.manual_seed(3)
    mlp = MLP(4, (8,))
    torch.manual_seed(3)
    assert torch.equal(mlp[0].weight, nn.Linear(4, 8).weight)
    bound = 1 / math.sqrt(4)
    assert mlp[0].bias.abs().max() <= bound
    assert mlp[0].bias.any()


def test_an_unknown_activation_is_rejected_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown activation 'reluu'; did you mean 'relu'\?"):
        activation_of("reluu")
    with pytest.raises(ValueError, match="known are: relu, tanh"):
        activation_of("xyz")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, (8,)), {}, r"in_features must be an integer ≥ 1, got 0"),
        ((4, (8, -1)), {}, r"hidden_sizes must be a list of integers ≥ 1, got \(8, -1\)"),
        ((4, (8.5,)), {}, r"hidden_sizes must be a list of integers ≥ 1, got \(8\.5,\)"),
        ((4, 8), {}, r"hidden_sizes must be a list of integers ≥ 1, got 8"),
        ((4, "8"), {}, r"hidden_sizes must be a list of integers ≥ 1, got the text '8'"),
        ((4, (8,)), {"out_features": 0}, r"out_features must be an integer ≥ 1, got 0"),
        ((4, (8,)), {"norm": "batch"}, r"norm must be 'layer' or None, got 'batch'"),
        ((4, (8,)), {"init": "zeros"}, r"init must be 'orthogonal' or None, got 'zeros'"),
    ],
)
def test_invalid_options_are_rejected(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MLP(*arguments, **options)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_inner_layers_are_called(position, register):
    called = []
    mlp = MLP(3, [4], out_features=2)
    getattr(mlp[position], register)(lambda *_: called.append(position))
    mlp(torch.randn(5, 3, requires_grad=True)).sum().backward()
    assert called == [position]


def test_tensors_kept_by_a_hook_are_not_overwritten():
    kept = []
    mlp = MLP(3, [4], out_features=2)
    mlp[0].register_forward_hook(lambda layer, inputs, output: kept.append(output))
    x = torch.randn(5, 3)
    mlp(x)
    assert torch.equal(kept[0], torch.nn.functional.linear(x, mlp[0].weight, mlp[0].bias))


def test_an_mlp_computes_what_its_layers_compute_one_by_one():
    mlp = MLP(3, [4, 5], out_features=2, norm="layer", activation="relu")
    x = torch.randn(6, 3)
    expected = x
    for layer in mlp:
        expected = layer(expected)
    assert torch.equal(mlp(x), expected)


def noisy_weights(layer: NoisyLinear, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the bias of equations 9 to 11 of Fortunato et al. for one draw."""
    shaped = noise.sign() * noise.abs().sqrt()
    for_input, for_output = shaped[: layer.in_features], shaped[layer.in_features :]
    return (
        layer.weight + layer.weight_sigma * torch.outer(for_output, for_input),
        layer.bias + layer.bias_sigma * for_output,
    )


def test_a_noisy_layer_computes_with_the_noisy_weights_of_the_paper():
    layer, x = NoisyLinear(5, 3), torch.randn(7, 5)
    with torch.no_grad():
        layer.weight_sigma.uniform_(0.1, 2.0)
        layer.bias_sigma.uniform_(0.1, 2.0)
    noise = torch.randn(layer.n_noise)
    weight, bias = noisy_weights(layer, noise)
    torch.testing.assert_close(layer(x, noise), x @ weight.T + bias)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)


def test_every_row_may_have_its_own_noise():
    layer, x = NoisyLinear(5, 3), torch.randn(2, 7, 5)
    noise = torch.randn(2, 7, layer.n_noise)
    y = layer(x, noise)
    for row in range(2):
        for column in range(7):
            alone = layer(x[row, column], noise[row, column])
            torch.testing.assert_close(y[row, column], alone)


def test_a_noisy_layer_starts_as_the_paper_says():
    layer = NoisyLinear(100, 50, sigma=0.4)
    for mean in (layer.weight, layer.bias):
        assert mean.abs().max().item() == pytest.approx(0.1, rel=0.1)
    for sigma in (layer.weight_sigma, layer.bias_sigma):
        torch.testing.assert_close(sigma, torch.full_like(sigma, 0.04))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_noise_without_a_size_is_rejected(sigma):
    with pytest.raises(ValueError, match="sigma must be a positive number"):
        NoisyLinear(2, 2, sigma=sigma)


def test_each_layer_of_a_noisy_mlp_has_its_part_of_the_noise():
    mlp, x = NoisyMLP(4, (8,), out_features=2, norm="layer"), torch.randn(5, 4)
    assert kinds(mlp) == ["NoisyLinear", "LayerNorm", "ReLU", "NoisyLinear"]
    assert mlp.n_noise == (4 + 8) + (8 + 2)
    noise = torch.randn(mlp.n_noise)
    hidden = mlp[1](mlp[0](x, noise[:12])).relu()
    torch.testing.assert_close(mlp(x, noise), mlp[3](hidden, noise[12:]))
    torch.testing.assert_close(mlp(x), mlp(x, torch.zeros(mlp.n_noise)))
