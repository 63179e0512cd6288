"""The weight of the entropy, which SAC and its variants learn."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Temperature"]


class Temperature(nn.Module):
    """The weight of the entropy, positive because its logarithm is learned.

    Args:
        alpha: the first weight.
    """

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(alpha).log())
