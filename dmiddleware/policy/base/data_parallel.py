"""Data-parallel learning over ``torch.distributed``: same parameters, averaged gradients."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from dmiddleware.errors import ConfigError

__all__ = [
    "GradientReducer",
    "all_agree",
    "broadcast_model",
    "data_parallel",
    "require_process_group",
]


@contextmanager
def data_parallel(*, backend: str | None = None, timeout_s: float = 300.0) -> Iterator[int]:
    """Join the process group that torchrun (or another launcher) describes in the environment.

    Args:
        backend: ``"gloo"`` or ``"nccl"``; None takes nccl where CUDA is available.
        timeout_s: the deadline in seconds for joining, and for every collective operation.

    Yields:
        This process's rank.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def require_process_group() -> None:
    """Reject ``multi_gpu=True`` outside of a process group.

    Raises:
        ConfigError: saying how to start the processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "multi_gpu is True, but this process is not in a torch.distributed process group; "
            "start the program with torchrun and wrap it in "
            "`with dmiddleware.policy.data_parallel():`, or set multi_gpu=False"
        )


def broadcast_model(model: nn.Module) -> None:
    """Overwrite parameters and buffers with those of rank 0; every rank must call it."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                dist.broadcast(tensor, src=0)


class GradientReducer:
    """Averages a model's gradients over all ranks.

    Parameters without a gradient count as zeros, so ranks whose losses use different parameters
    stay in sync.

    Args:
        model: its parameters that require a gradient are reduced.
        overlap: reduce each gradient while backward still computes the earlier layers' ones
            (config ``bp_update_sync=False``). Reductions start in one fixed order on every rank,
            whatever the order in which gradients become ready, since collectives match by order.
    """

    def __init__(self, model: nn.Module, *, overlap: bool = False) -> None:
        # Backward reaches the last layers first.
        self._parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        self._world_size = dist.get_world_size()
        self._ready: set[int] = set()
        self._works: list[dist.Work] = []
        self._started = 0
        self._hooks: list[RemovableHandle] = []
        if overlap:
            for position, parameter in enumerate(self._parameters):
                hook = self._make_hook(position)
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                )

    def reduce(self) -> None:
        """Average the gradients over the ranks; call it after backward and before the step."""
        self._start_until(len(self._parameters))
        for work in self._works:
            work.wait()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._world_size)
        self._ready.clear()
        self._works.clear()
        self._started = 0

    def close(self) -> None:
        """Remove the hooks from the parameters; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _make_hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def reduce_when_ready(_: torch.Tensor) -> None:
            self._ready.add(position)
            end = self._started
            while end in self._ready:
                end += 1
            self._start_until(end)

        return reduce_when_ready

    def _start_until(self, end: int) -> None:
        for parameter in self._parameters[self._started : end]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            work = dist.all_reduce(parameter.grad, async_op=True)
            assert work is not None
            self._works.append(work)
        self._started = max(self._started, end)


def all_agree(flag: bool, device: torch.device | str) -> bool:
    """Return whether the flag is true on every rank; every rank must call it."""
    vote = torch.tensor(float(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())
