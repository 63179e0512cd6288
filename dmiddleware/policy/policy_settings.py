"""The settings that all policies have, and those of policies that learn returns."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Final

import torch

from dmiddleware.settings import BY_PROGRAM, At, Count, Fraction, Options, Settings, Whole

__all__ = ["DiscountedSettings", "PolicySettings"]

_COMPILES_FROM: Final = torch.torch_version.TorchVersion("2.13")
"""The first version whose compiler traces ``torch.autograd.grad`` and isolates recompilations."""


class PolicySettings(Settings):
    """The settings that all policies have."""

    cuda: bool = False
    """Whether to put the model on the GPU."""
    multi_gpu: bool = False
    """Whether to average gradients over the ranks of torch.distributed."""
    bp_update_sync: bool = True
    """With multi_gpu: False overlaps the averaging of gradients with backward."""
    seed: Annotated[Whole | None, BY_PROGRAM] = None
    """Seed of the initial weights and of acting; None uses torch's seed."""
    model: Options = dataclasses.field(default_factory=dict)
    """The network: `type` (a registered name) and the arguments of its class."""
    compile: bool = False
    """Whether to compile the update with torch.compile, which takes a minute at the start."""
    batch_size: Annotated[Count, At("learn.batch_size")] = 64
    """Rows per update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not (self.compile and self.multi_gpu),
            "compile",
            "False with multi_gpu, because ranks exchange gradients within the update",
        )
        self.require(
            not self.compile or torch.__version__ >= _COMPILES_FROM,
            "compile",
            f"False with torch {torch.__version__}; compiled updates need torch "
            f"{_COMPILES_FROM} or newer",
        )


class DiscountedSettings(PolicySettings):
    """The settings of policies that learn returns."""

    discount: Annotated[Fraction, At("discount_factor")] = 0.99
    """γ, the discount of future rewards."""
