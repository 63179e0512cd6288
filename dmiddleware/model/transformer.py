"""Layers of a causal transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Dropout", "TransformerLayer"]

_INT64_MIN = -(2**63)
_PER_INT64 = 4  # one random int64 decides about four elements
_LEVELS = 2**16


class Dropout(nn.Dropout):
    """``torch.nn.Dropout``, faster on the CPU.

    Each element has 16 random bits instead of a random float, so the share of dropped elements is
    a multiple of ``2**-16``. The other elements are divided by the share that stays on average.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with elements set to 0 at random while training."""
        if not self.training or x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p, self.training)
        n_dropped = round(self.p * _LEVELS)
        if n_dropped in (0, _LEVELS):
            return F.dropout(x, n_dropped / _LEVELS)
        drawn = torch.empty(math.ceil(x.numel() / _PER_INT64), dtype=torch.int64)
        bits = drawn.random_(_INT64_MIN, None).view(torch.int16)[: x.numel()].view(x.shape)
        mask = bits >= n_dropped - _LEVELS // 2
        return x * mask.to(x.dtype).mul_(_LEVELS / (_LEVELS - n_dropped))


class TransformerLayer(nn.Module):
    """Causal self-attention and an MLP, with residual connections and layer normalization first.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section
    2.3, with ReLU.

    Args:
        size: width of the tokens.
        n_heads: attention heads, a divisor of ``size``.
        dropout: share of the attention weights and activations that are dropped while learning.
    """

    def __init__(self, size: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(size)
        self.in_proj = nn.Linear(size, 3 * size)
        self.out_proj = nn.Linear(size, size)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(
            nn.Linear(size, 4 * size), nn.ReLU(), Dropout(dropout), nn.Linear(4 * size, size)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return tokens ``[B, T, size]`` of tokens ``[B, T, size]``, each from those up to it."""
        x = x + self.dropout(self._attend(self.attention_norm(x)))
        output: torch.Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        n_tokens = x.shape[1]
        heads = self.in_proj(x).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, n_heads, T, size / n_heads]
        score = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=x.device).triu(1)
        weight = self.dropout(score.masked_fill(later, -math.inf).softmax(-1))
        output: torch.Tensor = self.out_proj((weight @ value).transpose(1, 2).flatten(2))
        return output
