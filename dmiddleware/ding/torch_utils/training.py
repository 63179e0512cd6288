"""Optimizers, checkpoints and gradients, with DI-engine's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmiddleware.distributed import rank_and_world_size

__all__ = [
    "Adam",
    "DataParallel",
    "RMSprop",
    "calculate_grad_norm",
]

_LOG: Final = logging.getLogger(__name__)


class _Clipping:
    """The options of DI-engine's optimizers, around one of torch.

    Args:
        params: the parameters.
        lr: the learning rate.
        optim_type: ``"adam"`` or ``"adamw"``.
        grad_clip_type: what bounds gradients: None, ``"clip_value"`` or ``"clip_norm"``.
        clip_value: their bound.
        clip_norm_type: the norm's order.
        options: those of torch's optimizer.

    Raises:
        ValueError: for ``"clip_momentum"`` and the like, which are not here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        optim_type: str = "",
        grad_clip_type: str | None = None,
        clip_value: float | None = None,
        clip_norm_type: float = 2.0,
        **options: Any,
    ) -> None:
        if grad_clip_type not in (None, "clip_value", "clip_norm"):
            raise ValueError(
                f"grad_clip_type must be None, 'clip_value' or 'clip_norm', got {grad_clip_type!r}"
            )
        if (grad_clip_type is None) != (clip_value is None):
            raise ValueError(
                "grad_clip_type and clip_value go together, "
                f"got {grad_clip_type!r} and {clip_value!r}"
            )
        self._clip = grad_clip_type, clip_value, clip_norm_type
        super().__init__(params, lr=lr, **options)  # type: ignore[call-arg]

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Bound the gradients, and take a step."""
        kind, bound, order = self._clip
        if bound is not None:
            groups: Any = self.param_groups  # type: ignore[attr-defined]
            parameters = [p for group in groups for p in group["params"]]
            if kind == "clip_value":
                nn.utils.clip_grad_value_(parameters, bound)
            else:
                nn.utils.clip_grad_norm_(parameters, bound, order)
        return super().step(closure)  # type: ignore[misc]


class _Adam(_Clipping, torch.optim.Adam):
    pass


class _AdamW(_Clipping, torch.optim.AdamW):
    pass


class RMSprop(_Clipping, torch.optim.RMSprop):
    """torch's RMSprop, with gradients that are bounded before each step."""


def Adam(params: Iterable[Any], *arguments: Any, **options: Any) -> torch.optim.Optimizer:  # noqa: N802
    """Return torch's Adam or AdamW (``optim_type``), with gradients bounded before each step."""
    build = _AdamW if options.get("optim_type") == "adamw" else _Adam
    return build(params, *arguments, **options)


class DataParallel(DistributedDataParallel):
    """A module whose gradients are averaged over all ranks."""

    def __init__(self, module: nn.Module, broadcast: bool = True) -> None:
        if rank_and_world_size()[1] == 1:
            raise RuntimeError("DataParallel needs the process group of several ranks; DDPContext")
        super().__init__(module)


def calculate_grad_norm(model: nn.Module, norm_type: Any = 2) -> float:
    """Return the norm of all gradients; ``"inf"`` is the largest one."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(grads, float(norm_type))) if grads else 0.0
