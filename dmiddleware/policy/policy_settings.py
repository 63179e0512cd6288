"""The settings of all policies, and the further ones of policies that learn returns."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Annotated, Any, Final, Literal

import torch

from dmiddleware.distributed import rank_and_world_size, require_process_group
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.foreign_names import POLICIES, declare
from dmiddleware.settings import BY_PROGRAM, Count, Fraction, Options, Settings, Whole

__all__ = ["DiscountedSettings", "PolicySettings", "annotated_settings", "device_for"]

_COMPILES_FROM: Final = torch.torch_version.TorchVersion("2.13")
"""The first version whose compiler traces ``torch.autograd.grad`` and isolates recompilations."""


class PolicySettings(Settings):
    """The settings that all policies have."""

    cuda: bool = False
    """Whether to put the model on the GPU."""
    multi_gpu: bool = False
    """Whether to average gradients over the ranks of torch.distributed."""
    bp_update_sync: bool = True
    """With multi_gpu: False overlaps the averaging of gradients with backward, unless compiled."""
    seed: Annotated[Whole | None, BY_PROGRAM] = None
    """Seed of the initial weights and of acting; None uses torch's seed."""
    model: Options = dataclasses.field(default_factory=dict)
    """The network: `type` (a registered name) and the arguments of its class."""
    compile: bool | Literal["graphs"] = False
    """Whether to compile the update, and the network that collects in envs that return tensors,
    with torch.compile, which takes a minute at the start; 'graphs' also replays the update, and
    acting in envs on the GPU, as CUDA graphs (on the CPU it is True)."""
    autocast: Literal["bfloat16"] | None = None
    """The type of the networks' products, by torch.autocast; None: float32."""
    batch_size: Count = 64
    """Rows per update."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        declare(POLICIES, cls.__dataclass_fields__)

    def __post_init__(self) -> None:
        super().__post_init__()
        mode: object = self.compile
        self.require(
            not (mode == "graphs" and self.multi_gpu),
            "compile",
            "True or False with multi_gpu, because a CUDA graph cannot wait for other ranks",
        )
        self.require(
            not self.compile or torch.__version__ >= _COMPILES_FROM,
            "compile",
            f"False with torch {torch.__version__}; compiled updates need torch "
            f"{_COMPILES_FROM} or newer",
        )


class DiscountedSettings(PolicySettings):
    """The settings of policies that learn returns."""

    discount: Fraction = 0.99
    """γ, the discount of future rewards."""


def annotated_settings(policy: type) -> type[PolicySettings]:
    """Return the class that a class of policies, or one of its bases, annotates ``cfg`` with.

    Raises:
        PolicyError: if the annotation does not name a class of settings of its module.
    """
    for base in policy.__mro__:
        hint = inspect.get_annotations(base).get("cfg")
        if isinstance(hint, str):
            hint = vars(sys.modules[base.__module__]).get(hint, hint)
        if isinstance(hint, type) and issubclass(hint, PolicySettings):
            return hint
        if hint is not None:
            raise PolicyError(
                f"{base.__name__} annotates cfg with {hint!r}, which is not a subclass of "
                f"PolicySettings in the module {base.__module__}; define it there, at the top level"
            )
    raise AssertionError("unreachable: Policy annotates cfg")


def device_for(cfg: PolicySettings) -> str:
    """Return the device of a policy: the CPU, or the GPU of this rank.

    Raises:
        ConfigError: for ``cuda=True`` without CUDA, or ``multi_gpu=True`` outside of a process
            group.
    """
    if not cfg.cuda:
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"cuda is True, but torch {torch.__version__} finds no CUDA device here; "
            "set cuda=False, or install a CUDA build of torch on a machine with a GPU"
        )
    if cfg.multi_gpu:
        require_process_group()
        return f"cuda:{rank_and_world_size()[0] % torch.cuda.device_count()}"
    return f"cuda:{torch.cuda.current_device()}"
