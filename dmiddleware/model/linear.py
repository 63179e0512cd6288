"""Large matrix products on the CPU, with AVX-512 wherever the processor has it.

torch multiplies float32 matrices with MKL, which uses AVX2 on AMD's processors. oneDNN, which torch
contains too, uses AVX-512 there and takes half the time. A call of it takes about 15 microseconds
longer, so small products stay with MKL. See docs/decisions/large-matrix-products.md.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Linear", "batched_linear", "linear"]

_LARGE = 2**22
"""Multiplications from which a product is large: those of 64 rows with 256 by 256 weights."""

# An operator of our own, because torch's compiler refuses oneDNN's for weights that change.
_LIBRARY = torch.library.Library("dmiddleware", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    Args:
        x: ``[…, in_features]``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
    """
    if _ONEDNN_IS_FASTER and _is_large(x.numel() * weight.shape[0], x, weight):
        rows = torch.ops.dmiddleware.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return rows.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def batched_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight + bias``, as ``torch.baddbmm`` does.

    Args:
        x: ``[n, B, in_features]``.
        weight: ``[n, in_features, out_features]``.
        bias: ``[n, 1, out_features]``.
    """
    _, n_rows, n_in = x.shape
    if _ONEDNN_IS_FASTER and _is_large(n_rows * n_in * weight.shape[2], x, weight):
        layers = zip(x.unbind(), weight.unbind(), bias.unbind(), strict=True)
        return torch.stack([linear(rows, one.t(), moved[0]) for rows, one, moved in layers])
    return torch.baddbmm(bias, x, weight)


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose large products use AVX-512 on AMD's processors, too.

    Its parameters and their first values are those of ``torch.nn.Linear``.

    Example:
        >>> Linear(3, 2)(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out_features]`` of ``x`` ``[…, in_features]``."""
        return linear(x, self.weight, self.bias)


def _is_large(n_products: int, x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        n_products >= _LARGE
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and weight.dtype is torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


def _compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        bias = bias.contiguous()  # oneDNN takes no notice of its stride
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output


def _shape_output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(
    ctx: Any, gradient: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    return (
        linear(gradient, weight.t()) if needs_x else None,
        linear(gradient.t(), x.t()) if needs_weight else None,
        gradient.sum(0) if needs_bias else None,
    )


def _is_amd() -> bool:
    """Return whether Linux says that the processor is AMD's."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return False
    with path.open(encoding="utf-8") as file:  # as long as there are processors
        return any("AuthenticAMD" in line for line in islice(file, 4))


_LIBRARY.impl("linear", _compute, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("dmiddleware::linear", _shape_output, lib=_LIBRARY)
torch.library.register_autograd("dmiddleware::linear", _backward, setup_context=_keep, lib=_LIBRARY)

_ONEDNN_IS_FASTER = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and _is_amd()
)
