"""Faster paths through private parts of torch: all in this file, behind one switch.

With small networks, a large share of an update is torch's bookkeeping around the arithmetic. The
functions below skip it. Each has a plain path through torch's public interface, which computes the
same numbers. Set the environment variable ``DMIDDLEWARE_PRIVATE_TORCH`` to ``0`` before the first
import to take the plain paths. See docs/decisions/private-torch.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.adam import adam

__all__ = [
    "UncompiledOptimizer",
    "call",
    "compiler_traces_gradients",
    "copy_all",
    "forward_layers",
    "fused_adam",
    "is_from_compiler",
    "move_towards",
    "plain_torch",
    "scale",
]

_is_on = os.environ.get("DMIDDLEWARE_PRIVATE_TORCH", "1") != "0"


@contextmanager
def plain_torch() -> Iterator[None]:
    """Take the plain paths in all threads, until the block ends."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return ``module(*args, **kwargs)``, without torch's hook handling unless it has hooks."""
    return (module.forward if _can_skip_call(module) else module)(*args, **kwargs)


def forward_layers(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Return the output of layers that are called one after the other.

    With small layers and batches, calling a module, and even getting its weight as an attribute
    (torch looks it up in Python), costs more than the arithmetic.
    """
    unseen = None  # a linear layer's output, which nothing else refers to
    for layer in layers:
        if type(layer) is nn.Linear and _can_skip_call(layer):
            parameters: dict[str, Any] = layer._parameters
            x = unseen = F.linear(x, parameters["weight"], parameters["bias"])
        elif type(layer) is nn.ReLU and _can_skip_call(layer):
            x = torch.relu_(x) if x is unseen else torch.relu(x)
        else:
            x = layer(x)
    return x


def _can_skip_call(module: nn.Module) -> bool:
    """Return whether a call of the module does nothing but call its ``forward``."""
    return _is_on and not (
        module._compiled_call_impl
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class UncompiledOptimizer(torch.optim.Optimizer):
    """An optimizer that does not import torch's compiler.

    torch wraps the methods below, so that its compiler does not trace them. The wrapper imports the
    compiler, which takes longer than to import torch itself.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own."""
        _unwrapped(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, and the options of all groups."""
        state: dict[str, Any] = _unwrapped(torch.optim.Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        _unwrapped(torch.optim.Optimizer.load_state_dict)(self, state_dict)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    inner: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return inner if _is_on else function


def fused_adam(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first_moments: list[torch.Tensor],
    second_moments: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    counter: torch.Tensor | None,
    found_inf: torch.Tensor,
    **options: Any,
) -> None:
    """Make one step of Adam with torch's fused kernel; nothing changes unless ``found_inf`` is 0.

    Args:
        parameters: of one device and dtype; changed in place.
        gradients: one for each parameter.
        first_moments: changed in place.
        second_moments: changed in place.
        steps: step counters, the elements of ``counter``; changed in place.
        counter: float32, as long as ``parameters``; None: the steps are only some of its elements.
        found_inf: a float32 scalar, 0 or 1.
        **options: ``lr``, ``beta1``, ``beta2``, ``weight_decay`` and ``eps``.
    """
    maxima: list[torch.Tensor] = []  # of the second moments, for AMSGrad
    lists = (parameters, gradients, first_moments, second_moments, maxima, steps)
    with torch.no_grad():
        if not _is_on:
            adam(*lists, fused=True, amsgrad=False, maximize=False, found_inf=found_inf, **options)
            return
        if counter is None:
            torch._foreach_add_(steps, 1)
        else:
            counter.add_(1)
        torch._fused_adam_(*lists, amsgrad=False, maximize=False, found_inf=found_inf, **options)
        if counter is None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        else:
            counter.sub_(found_inf)


def scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a scalar, in place; on a GPU in one kernel instead of one for each."""
    if _is_on:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes; on a GPU in one kernel instead of one for each."""
    with torch.no_grad():
        if _is_on and targets:
            torch._foreach_copy_(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def move_towards(tensors: list[torch.Tensor], ends: list[torch.Tensor], share: float) -> None:
    """Move tensors a share of the way to others, in place; on a GPU in one kernel."""
    if _is_on:
        torch._foreach_lerp_(tensors, ends, share)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, share)


def compiler_traces_gradients() -> None:
    """Let torch's compiler trace ``torch.autograd.grad``, which an update in one graph needs.

    The setting has no public name, so a policy's option ``compile`` is its switch.
    """
    import torch._dynamo.config  # takes longer to import than torch itself

    torch._dynamo.config.trace_autograd_ops = True


def is_from_compiler(error: Exception) -> bool:
    """Return whether torch's compiler raised an error, whose classes have no public names."""
    import torch._dynamo.exc

    return isinstance(error, torch._dynamo.exc.TorchDynamoException)
