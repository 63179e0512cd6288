"""Large matrix products; the op itself runs on every processor, also where MKL is chosen."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dmiddleware.model import MLP, DecisionTransformer, EnsembleLinear, ImplicitQuantileQNetwork
from dmiddleware.model.linear import Linear, linear
from tests.variants import mostly_slow

onednn_linear = torch.ops.dmiddleware.linear

N_IN, N_OUT, N_ROWS = 60, 40, 30


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def spread(n: int) -> torch.Tensor:
    """Return a vector that is every second number of another."""
    return numbers(2 * n)[::2]


class Ops(TorchDispatchMode):
    """Counts the products of oneDNN."""

    n_onednn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n_onednn += func is onednn_linear.default
        return func(*args, **(kwargs or {}))


def n_onednn(compute: Callable[[], object]) -> int:
    with Ops() as ops:
        compute()
    return ops.n_onednn


def is_chosen() -> bool:
    """Return whether this processor computes a large product with oneDNN."""
    return n_onednn(lambda: linear(numbers(512, 256), numbers(256, 256))) == 1


only_where_chosen = pytest.mark.skipif(
    not is_chosen(), reason="MKL uses all that this processor offers"
)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (numbers(N_ROWS, N_IN), numbers(N_OUT, N_IN), numbers(N_OUT)),
        (numbers(N_ROWS, N_IN), numbers(N_OUT, N_IN), None),
        (numbers(N_ROWS, N_IN), numbers(N_IN, N_OUT).t(), spread(N_OUT)),
        (numbers(N_IN, N_ROWS).t(), numbers(N_OUT, 2 * N_IN)[:, ::2], numbers(1).expand(N_OUT)),
        (numbers(1, N_IN).expand(N_ROWS, N_IN), numbers(1, N_IN).expand(N_OUT, N_IN), None),
        (numbers(1, N_IN), numbers(1, N_IN), numbers(1)),
    ],
    ids=["plain", "no bias", "transposed", "strided", "expanded", "one row"],
)
def test_the_op_equals_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    found = onednn_linear(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_rows", [N_ROWS, 2000], ids=["small", "large"])
def test_the_gradients_of_the_op_equal_those_of_torch(n_rows: int) -> None:
    given = [numbers(n_rows, N_IN), numbers(N_OUT, N_IN), numbers(N_OUT)]
    given = [one.requires_grad_() for one in given]
    weights = numbers(n_rows, N_OUT)

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((function(*given).tanh() * weights).sum(), given)

    expected = gradients(F.linear)
    for found, one in zip(gradients(onednn_linear), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-3, rtol=1e-4)


def test_torch_finds_no_fault_in_the_op() -> None:
    x, weight = (one.requires_grad_() for one in (numbers(8, 5), numbers(3, 5)))
    for bias in (numbers(3).requires_grad_(), None):
        torch.library.opcheck(onednn_linear.default, (x, weight, bias))


@pytest.mark.parametrize("shape", [(600,), (20, 30), (2, 15, 20)], ids=str)
def test_a_large_product_keeps_the_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, layer = numbers(*shape, 256), Linear(256, 128)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    assert layer(x).shape == (*shape, 128)


def test_an_empty_batch_gives_an_empty_output() -> None:
    assert linear(numbers(0, 256), numbers(128, 256)).shape == (0, 128)


@pytest.mark.parametrize("n_rows", [2, 600], ids=["small", "large"])
def test_an_ensemble_computes_its_layers_one_by_one_or_at_once(n_rows: int) -> None:
    layers = EnsembleLinear(2, 128, 64)
    x = numbers(2, n_rows, 128)
    loss = layers(x).square().mean()
    gradients = torch.autograd.grad(loss, list(layers.parameters()))
    by_hand = torch.stack([x[i] @ layers.weight[i] + layers.bias[i] for i in range(2)])
    torch.testing.assert_close(layers(x), by_hand, atol=1e-4, rtol=1e-4)
    expected = torch.autograd.grad(by_hand.square().mean(), list(layers.parameters()))
    for found, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-5, rtol=1e-3)


@only_where_chosen
def test_only_large_float32_products_are_left_to_onednn() -> None:
    x, weight = numbers(512, 256), numbers(256, 256)
    assert n_onednn(lambda: linear(x, weight)) == 1
    assert n_onednn(lambda: linear(x[:8], weight)) == 0
    assert n_onednn(lambda: linear(x.double(), weight.double())) == 0
    with torch.autocast("cpu"):
        assert n_onednn(lambda: linear(x, weight)) == 0


@only_where_chosen
@pytest.mark.parametrize(
    ("network", "inputs", "n"),
    [
        (MLP(256, (256, 256)), (numbers(256, 256),), 2),
        (EnsembleLinear(2, 256, 256), (numbers(2, 256, 256),), 2),
        (
            DecisionTransformer((3,), 2, action_space="continuous", context_length=20, n_layers=1),
            (numbers(20, 64, 3), numbers(20, 64, 2), numbers(20, 64), torch.ones(20, 64).long()),
            4,
        ),
        (
            partial(
                ImplicitQuantileQNetwork((4,), 2, encoder_hidden_sizes=(256,)),
                tau=torch.full((64, 32), 0.5),
            ),
            (numbers(64, 4),),
            1,
        ),
    ],
    ids=["MLP", "ensemble", "transformer", "IQN"],
)
def test_networks_leave_their_large_products_to_onednn(
    network: Callable[..., object], inputs: tuple[torch.Tensor, ...], n: int
) -> None:
    assert n_onednn(lambda: network(*inputs)) == n


@pytest.mark.compiled
@pytest.mark.parametrize("backend", mostly_slow(["aot_eager", "inductor"], keep=1))
def test_a_compiled_function_has_the_same_gradients(backend: str) -> None:
    mlp = MLP(64, (256, 256))
    x = numbers(128, 64)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mlp(x).square().mean(), list(mlp.parameters()))

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(gradients, fullgraph=True, backend=backend)(x)
    for found, one in zip(compiled, gradients(x), strict=True):
        torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-3)
