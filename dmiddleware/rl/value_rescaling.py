"""A scale on which action values of any size can be learned without clipping rewards."""

from __future__ import annotations

import torch

__all__ = ["rescale_value", "unscale_value"]

_SLOPE = 1e-3


def rescale_value(value: torch.Tensor, *, slope: float = _SLOPE) -> torch.Tensor:
    """Return ``h(x) = sign(x) * (sqrt(|x| + 1) - 1) + slope * x``.

    Source: Pohlen et al., "Observe and Look Further: Achieving Consistent Performance on Atari"
    (2018), proposition A.2, as R2D2 uses it (Kapturowski et al., 2019, section 2.3).

    Args:
        value: ``[…]`` returns or values, in units of the reward.
        slope: the paper's ε, positive; it keeps the inverse Lipschitz continuous.

    Returns:
        ``[…]``, on the scale on which a network learns.

    Example:
        >>> rescale_value(torch.tensor([0.0, 3.0, -99.0]))
        tensor([ 0.0000,  1.0030, -9.0990])
    """
    return value.sign() * ((value.abs() + 1.0).sqrt() - 1.0) + slope * value


def unscale_value(scaled: torch.Tensor, *, slope: float = _SLOPE) -> torch.Tensor:
    """Return the inverse of :func:`rescale_value`.

    It is equation (iii) of proposition A.2 with the difference of two large numbers written as a
    quotient, which in float32 is a thousand times as exact.

    Args:
        scaled: ``[…]`` as :func:`rescale_value` returns them.
        slope: as there.

    Returns:
        ``[…]`` in units of the reward.
    """
    shifted = scaled.abs() + (1.0 + slope)
    root = 2.0 * shifted / (1.0 + (1.0 + 4.0 * slope * shifted).sqrt())
    return scaled.sign() * (root - 1.0) * (root + 1.0)
