"""The layers of a causal transformer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmiddleware.model.transformer import Dropout, TransformerLayer


def same_layers(size: int = 12, n_heads: int = 3) -> tuple[TransformerLayer, nn.Module]:
    """Return a layer and torch's, with the same weights."""
    ours = TransformerLayer(size, n_heads, dropout=0.0)
    theirs = nn.TransformerEncoderLayer(
        size, n_heads, 4 * size, dropout=0.0, batch_first=True, norm_first=True
    )
    names = {
        "self_attn.in_proj_weight": "in_proj.weight",
        "self_attn.in_proj_bias": "in_proj.bias",
        "self_attn.out_proj.weight": "out_proj.weight",
        "self_attn.out_proj.bias": "out_proj.bias",
        "linear1.weight": "mlp.0.weight",
        "linear1.bias": "mlp.0.bias",
        "linear2.weight": "mlp.3.weight",
        "linear2.bias": "mlp.3.bias",
        "norm1.weight": "attention_norm.weight",
        "norm1.bias": "attention_norm.bias",
        "norm2.weight": "mlp_norm.weight",
        "norm2.bias": "mlp_norm.bias",
    }
    weights = ours.state_dict()
    theirs.load_state_dict({name: weights[mine] for name, mine in names.items()})
    return ours, theirs


def test_a_layer_computes_what_torchs_layer_computes() -> None:
    torch.manual_seed(0)
    ours, theirs = same_layers()
    x = torch.randn(4, 7, 12)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=causal, is_causal=True))


def test_a_token_does_not_depend_on_later_ones() -> None:
    torch.manual_seed(0)
    layer, x = TransformerLayer(8, 2, dropout=0.0), torch.randn(2, 5, 8)
    changed = x.clone()
    changed[:, 3:] = torch.randn(2, 2, 8)
    before, after = layer(x), layer(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(-1).any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    y = Dropout(p)(torch.ones(1000, 333))
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=0.005)
    assert y.double().mean().item() == pytest.approx(1.0, abs=0.02)
    assert y[y != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-4)


def test_dropout_does_not_repeat_a_pattern() -> None:
    """Neighbors are independent: all four shares of a random integer are drawn afresh."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(400_000)) != 0).double()
    for distance in (1, 2, 3, 4, 8):
        both = (kept[:-distance] * kept[distance:]).mean().item()
        assert both == pytest.approx(0.25, abs=0.005), distance


@pytest.mark.parametrize(("p", "wanted"), [(0.0, 1.0), (1e-6, 1.0), (1.0, 0.0)])
def test_dropout_of_nothing_and_of_all(p: float, wanted: float) -> None:
    assert Dropout(p)(torch.ones(5)).tolist() == [wanted] * 5


def test_dropout_changes_nothing_while_evaluating() -> None:
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x


def test_the_gradient_passes_where_dropout_kept() -> None:
    torch.manual_seed(0)
    x = torch.ones(3, 50, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_dropout_repeats_from_a_seed() -> None:
    dropout, x = Dropout(0.3), torch.ones(1001)
    torch.manual_seed(3)
    first = dropout(x)
    torch.manual_seed(3)
    assert dropout(x).equal(first)
    assert not dropout(x).equal(first)
