import math

import pytest
import torch
from torch import nn

from dmiddleware.model import (
    MLP,
    BatchRenorm,
    NoisyLinear,
    NoisyMLP,
    activation_of,
    orthogonal_init,
)

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
        (
            (4, (8,)),
            {"norm": "batch"},
            r"norm must be one of 'layer', 'batch_renorm' or None, got 'batch'",
        ),
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


def seen(layer: BatchRenorm, x: torch.Tensor, n: int) -> BatchRenorm:
    """Return the layer after it has seen the same batch in training mode."""
    for _ in range(n):
        layer.train()(x)
    return layer


def scaled(layer: BatchRenorm) -> BatchRenorm:
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2.0)
        layer.bias.uniform_(-1.0, 1.0)
    return layer


def test_renormalization_starts_as_batch_normalization():
    layer = scaled(BatchRenorm(3))
    plain = nn.BatchNorm1d(3, eps=1e-3, momentum=0.01)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)
    x = (5 + 3 * torch.randn(40, 3)).requires_grad_()
    for _ in range(4):
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (layer, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.mean, plain.running_mean)
    # The running variance of torch is that of a sample, 40 / 39 of it.
    biased = 1 + (plain.running_var - plain.running_var.new_tensor(0.99**5)) * 39 / 40
    torch.testing.assert_close(layer.variance - 0.99**5 + 1, biased, rtol=1e-4, atol=1e-5)
    assert layer.n_batches == 5


def test_renormalization_corrects_towards_the_running_statistics():
    layer, x = scaled(BatchRenorm(4)), torch.randn(50, 4)
    layer.n_batches.fill_(100_000)
    layer.mean.copy_(torch.tensor([0.0, 0.5, 40.0, -0.1]))
    layer.variance.copy_(torch.tensor([1.0, 2.0, 1.0, 1e4]))
    mean, variance = layer.mean.clone(), layer.variance.clone()
    got = layer(x)
    for feature in range(4):
        center, std = x[:, feature].mean(), (x[:, feature].var(correction=0) + 1e-3).sqrt()
        running = (variance[feature] + 1e-3).sqrt()
        r = (std / running).clamp(1 / 3, 3)  # algorithm 1
        d = ((center - mean[feature]) / running).clamp(-5, 5)
        hat = (x[:, feature] - center) / std * r + d
        wanted = layer.weight[feature] * hat + layer.bias[feature]
        torch.testing.assert_close(got[:, feature], wanted, rtol=1e-4, atol=1e-5)
    # Within the bounds, it is what eval mode computes.
    layer.mean.copy_(mean)
    layer.variance.copy_(variance)
    torch.testing.assert_close(layer.eval()(x)[:, :2], got[:, :2], rtol=1e-4, atol=1e-5)


def test_the_correction_has_no_gradient():
    layer, x = BatchRenorm(2), torch.randn(30, 2).requires_grad_()
    layer.n_batches.fill_(100_000)
    layer.mean.fill_(0.3)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, torch.zeros(30, 2), rtol=0, atol=1e-5)


def test_eval_mode_uses_and_keeps_the_running_statistics():
    layer = seen(BatchRenorm(3), 2 + torch.randn(64, 3), 600).eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert {"mean", "variance", "n_batches"} < before.keys()
    x = torch.randn(5, 3)
    wanted = (x - layer.mean) / (layer.variance + 1e-3).sqrt()
    torch.testing.assert_close(layer(x), wanted)
    torch.testing.assert_close(layer(x[:1]), wanted[:1])
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_layers_that_are_computed_together_have_their_own_statistics():
    together, x = (
        BatchRenorm(3, n_layers=2),
        torch.randn(2, 40, 3) * torch.tensor([[[1.0]], [[9.0]]]),
    )
    got = together(x)
    for at in range(2):
        alone = BatchRenorm(3)
        torch.testing.assert_close(got[at], alone(x[at]))
        torch.testing.assert_close(together.variance[at, 0], alone.variance)


def test_leading_dimensions_are_all_rows():
    x = torch.randn(4, 5, 3)
    torch.testing.assert_close(BatchRenorm(3)(x), BatchRenorm(3)(x.flatten(0, 1)).view(4, 5, 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_reach_the_running_statistics(value: float):
    layer, x = BatchRenorm(2), torch.randn(8, 2)
    x[3, 0] = value
    layer(x)
    assert (layer.mean[0], layer.variance[0]) == (0.0, 1.0)
    assert layer.mean[1] != 0.0
    assert layer.mean.isfinite().all()


def test_an_mlp_renormalizes_its_input_and_what_its_activations_return():
    mlp = MLP(4, (8, 6), out_features=2, norm="batch_renorm")
    assert kinds(mlp) == [
        "BatchRenorm", "Linear", "ReLU", "BatchRenorm", "Linear", "ReLU", "BatchRenorm", "Linear"
    ]  # fmt: skip
