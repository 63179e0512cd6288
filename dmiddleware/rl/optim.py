"""Optimisers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

__all__ = ["FusedAdam"]


class _Lists(NamedTuple):
    """The arguments of the kernel, all in the order of the parameters."""

    parameters: list[torch.Tensor]
    first_moments: list[torch.Tensor]
    second_moments: list[torch.Tensor]
    steps: list[torch.Tensor]
    counter: torch.Tensor
    """The tensor that holds all step counters, so one addition increments them."""

    @classmethod
    def of(cls, optimizer: torch.optim.Adam) -> _Lists | None:
        """Collect the lists; None if a step takes more than one call of the kernel."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        group = optimizer.param_groups[0]
        if (
            len(optimizer.param_groups) > 1
            or not all(states)
            or group["amsgrad"]
            or group["maximize"]
            or len({(p.device, p.dtype) for p in parameters}) != 1
        ):
            return None
        counter = torch.stack([state["step"] for state in states])
        for state, step in zip(states, counter.unbind(), strict=True):
            state["step"] = step
        return cls(
            parameters,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            counter,
        )


class FusedAdam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)`` with less overhead per step.

    With small networks, half of an ordinary step is spent on profiler hooks, compiler guards and
    collecting the same lists of tensors again. This class collects them once. Numbers and state
    are those of ``torch.optim.Adam``, and ``torch.amp.GradScaler`` works with it; step hooks are
    not run.

    Args:
        parameters: floating-point parameters of one device.
        lr: step size; the group's ``"lr"`` can be changed between steps.
        betas: decay rates of the two moments.
        eps: added to the denominator.
    """

    # The lists of the last step; None if they must be collected. Not copied or pickled.
    _lists: _Lists | None = None

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, fused=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        """Make one step (Kingma and Ba, "Adam", 2015, algorithm 1)."""
        lists = self._lists
        if lists is None or closure is not None:
            result = super().step(closure)
            self._lists = _Lists.of(self)
            return result
        gradients = [p.grad for p in lists.parameters if p.grad is not None]
        if len(gradients) < len(lists.parameters):
            self._lists = None
            return super().step()
        group = self.param_groups[0]
        # A GradScaler sets these on the optimiser for the length of one step.
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        with torch.no_grad():
            lists.counter.add_(1)
            torch._fused_adam_(
                lists.parameters,
                gradients,
                lists.first_moments,
                lists.second_moments,
                [],
                lists.steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if found_inf is not None:
                lists.counter.sub_(found_inf)
        return None

    # Keeps torch from wrapping the step in its profiler and hooks, which would only be slower.
    step.hooked = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class or of ``torch.optim.Adam``."""
        super().load_state_dict(state_dict)
        self._lists = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options; from then on, steps are those of Adam."""
        super().add_param_group(param_group)
        self._lists = None
