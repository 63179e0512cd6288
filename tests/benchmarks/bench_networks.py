"""Networks.

The loss of a network and the gradients of its weights, with the loss a mean square. The reference
is an ``nn.Sequential`` of ``nn.Linear`` and ``nn.ReLU`` with the same weights; for an ensemble, one
for each member. For a transformer's layer, it is torch's own with as much dropout.
"""

from __future__ import annotations

import torch
from torch import nn

from dmiddleware.model import MLP, EnsembleLinear
from dmiddleware.model.transformer import TransformerLayer
from tests.benchmarks.report import Row, interleaved

CALLS = 100
AT_MOST = 1.05


def rows() -> list[Row]:
    """Measure small and large networks; both sides give the same gradients, checked first."""
    return [
        _row("64 rows, hidden 128-128-64", 64, 4, (128, 128, 64)),
        _row("256 rows, hidden 256-256", 256, 17, (256, 256)),
        _row("256 rows, hidden 400-300", 256, 17, (400, 300)),
        _row("256 rows, 2 critics of 256-256", 256, 23, (256, 256), n=2),
        _transformer_row(n_sequences=64, n_tokens=60, size=64),
    ]


def _row(name: str, n_rows: int, n_in: int, sizes: tuple[int, ...], *, n: int = 1) -> Row:
    torch.manual_seed(0)
    plain = [_plain(n_in, sizes) for _ in range(n)]
    x = torch.randn(n_rows, n_in)
    network: nn.Module = _ensemble(plain) if n > 1 else _mlp(plain[0], n_in, sizes)
    inputs = x.expand(n, *x.shape) if n > 1 else x

    def ours() -> tuple[torch.Tensor, ...]:
        return _gradients(network(inputs).square().mean(), [network])

    def reference() -> tuple[torch.Tensor, ...]:
        loss = torch.stack([one(x) for one in plain]).square().mean()
        return _gradients(loss, plain)

    for mine, theirs in zip(ours(), _stacked(reference(), n), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    pair = interleaved(ours, reference, calls=CALLS)
    return Row.of_time(name, pair, calls=CALLS, against="nn.Sequential", at_most=AT_MOST)


def _transformer_row(n_sequences: int, n_tokens: int, size: int) -> Row:
    torch.manual_seed(0)
    x = torch.randn(n_sequences, n_tokens, size)
    mine = TransformerLayer(size, n_heads=1, dropout=0.1)
    theirs = nn.TransformerEncoderLayer(
        size, 1, 4 * size, dropout=0.1, batch_first=True, norm_first=True
    )
    causal = nn.Transformer.generate_square_subsequent_mask(n_tokens)

    def ours() -> tuple[torch.Tensor, ...]:
        return _gradients(mine(x).square().mean(), [mine])

    def reference() -> tuple[torch.Tensor, ...]:
        return _gradients(theirs(x, src_mask=causal, is_causal=True).square().mean(), [theirs])

    pair = interleaved(ours, reference, calls=10)
    name = f"transformer layer of {size}, {n_sequences} sequences of {n_tokens}"
    against = "nn.TransformerEncoderLayer"
    return Row.of_time(name, pair, calls=10, against=against, at_most=AT_MOST)


def _plain(n_in: int, sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(n_in, size), nn.ReLU()]
        n_in = size
    return nn.Sequential(*layers, nn.Linear(n_in, 1))


def _mlp(plain: nn.Sequential, n_in: int, sizes: tuple[int, ...]) -> MLP:
    mlp = MLP(n_in, sizes, out_features=1)
    mlp.load_state_dict(plain.state_dict())
    return mlp


def _ensemble(plain: list[nn.Sequential]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer, *others in zip(*plain, strict=True):
        if isinstance(layer, nn.Linear):
            together = EnsembleLinear(1 + len(others), layer.in_features, layer.out_features)
            with torch.no_grad():
                for i, one in enumerate([layer, *others]):
                    together.weight[i] = one.weight.t()
                    together.bias[i, 0] = one.bias
            layers.append(together)
        else:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _gradients(loss: torch.Tensor, networks: list[nn.Module]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, [p for one in networks for p in one.parameters()])


def _stacked(gradients: tuple[torch.Tensor, ...], n: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of ``n`` networks in the shapes of an ensemble's."""
    if n == 1:
        return gradients
    n_each = len(gradients) // n
    members = [gradients[i * n_each : (i + 1) * n_each] for i in range(n)]
    return tuple(
        torch.stack([one.t() if one.dim() == 2 else one.unsqueeze(0) for one in same])
        for same in zip(*members, strict=True)
    )
