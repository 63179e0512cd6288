"""Optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch

from dmiddleware.torch_private import UncompiledOptimizer, fused_adam, scale

__all__ = ["FusedAdam", "FusedAdamW", "OpaqueStep", "RMSprop"]


class _Lists(NamedTuple):
    """The arguments of the kernel, all in the order of the parameters."""

    parameters: list[torch.Tensor]
    first_moments: list[torch.Tensor]
    second_moments: list[torch.Tensor]
    steps: list[torch.Tensor]
    counter: torch.Tensor
    """The tensor that holds all step counters, so one addition increments them."""
    rate: torch.Tensor
    """The learning rate, as compiled steps read it."""
    betas: tuple[float, float]
    eps: float

    @classmethod
    def of(cls, optimizer: torch.optim.Adam) -> _Lists | None:
        """Collect the lists; None if a step takes more than one call of the kernel."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state[parameter] for parameter in parameters]
        group = optimizer.param_groups[0]
        if (
            len(optimizer.param_groups) > 1
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
            counter.new_tensor(group["lr"]),
            group["betas"],
            group["eps"],
        )


class FusedAdam(UncompiledOptimizer, torch.optim.Adam):
    """``torch.optim.Adam(fused=True)`` with less overhead per step.

    With small networks, half of an ordinary step is spent on profiler hooks, compiler guards and
    collecting the same lists of tensors again. :meth:`apply` skips that, with lists that are
    collected once. Numbers and state are those of ``torch.optim.Adam``.

    Args:
        parameters: floating-point parameters of one device.
        lr: step size; the group's ``"lr"`` can be changed between steps.
        betas: decay rates of the two moments.
        eps: added to the denominator.
    """

    # None if a step takes more than one call of the kernel. Not copied or pickled.
    _lists: _Lists | None = None
    # Whether the weight decay of the group is applied apart from the gradient.
    _is_decoupled = False

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, fused=True)
        self._collect()

    def apply(self, gradients: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
        """Make one step from given gradients; a compiled function may contain it.

        Args:
            gradients: one for each parameter, in their order; None: the parameter took no part, and
                does not change.
            found_inf: a float32 scalar; unless it is 0, nothing changes.
        """
        lists = self._lists
        present = [gradient for gradient in gradients if gradient is not None]
        if lists is not None and torch.compiler.is_compiling():
            used = [row is not None for row in gradients]
            self._step_in_graph(lists, present, used, found_inf)
        elif lists is not None and present:
            group = self.param_groups[0]
            tensors = [lists.parameters, lists.first_moments, lists.second_moments, lists.steps]
            are_all = len(present) == len(gradients)
            if not are_all:
                used = [row is not None for row in gradients]
                tensors = [list(itertools.compress(rows, used)) for rows in tensors]
            parameters, *states = tensors
            fused_adam(
                parameters,
                present,
                *states,
                counter=lists.counter if are_all else None,
                found_inf=found_inf,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=0.0 if self._is_decoupled else group["weight_decay"],
                eps=group["eps"],
            )
        elif lists is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.found_inf = found_inf
            self.step()
            del self.found_inf

    def _step_in_graph(
        self,
        lists: _Lists,
        gradients: list[torch.Tensor],
        used: list[bool],
        found_inf: torch.Tensor,
    ) -> None:
        """Make one step in operations that the compiler joins, which the kernel is not."""
        beta1, beta2 = lists.betas
        with torch.no_grad():
            keep = 1.0 - found_inf
            parameters, first, second = (
                list(itertools.compress(tensors, used))
                for tensors in (lists.parameters, lists.first_moments, lists.second_moments)
            )
            none = keep * 0.0
            lists.counter.add_(torch.stack([keep if is_used else none for is_used in used]))
            steps = list(itertools.compress(lists.counter.unbind(), used))
            for p, gradient, m, v, step in zip(
                parameters, gradients, first, second, steps, strict=True
            ):
                gradient = torch.where(found_inf == 0, gradient, 0.0)
                m.lerp_(gradient, (1 - beta1) * keep)
                v.lerp_(gradient.square(), (1 - beta2) * keep)
                # If the first step is skipped there is none to correct for, and 0 / 0 is NaN.
                n = step.clamp_min(1)
                rate = keep * lists.rate / (1 - beta1**n)
                p.sub_(rate * m / ((v / (1 - beta2**n)).sqrt() + lists.eps))

    def follow_schedule(self) -> None:
        """Let compiled steps see the group's ``"lr"``; call it after a change."""
        if self._lists is not None:
            self._lists.rate.fill_(self.param_groups[0]["lr"])

    def _collect(self) -> None:
        """Make the state, and the lists of a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
        self._lists = _Lists.of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class or of ``torch.optim.Adam``."""
        super().load_state_dict(state_dict)
        self._collect()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled optimizer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "state" in state:
            self._collect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with separate options; from then on, steps are those of Adam."""
        super().add_param_group(param_group)
        self._lists = None


class FusedAdamW(FusedAdam):
    """AdamW as :class:`FusedAdam`, with numbers that differ from torch's by rounding.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.

    Args:
        parameters: as of :class:`FusedAdam`.
        weight_decay: fraction of the weights that a step takes away, times the learning rate.
        **options: those of :class:`FusedAdam`.
    """

    _is_decoupled = True

    def __init__(
        self, parameters: Iterable[torch.Tensor], *, weight_decay: float, **options: Any
    ) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group["weight_decay"] = weight_decay

    def apply(self, gradients: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
        """Make one step; see :meth:`FusedAdam.apply`.

        Raises:
            RuntimeError: for parameters of several groups or devices.
        """
        lists, (group, *others) = self._lists, self.param_groups
        if lists is None or others:
            raise RuntimeError("FusedAdamW takes parameters of one group, device and dtype")
        rate = lists.rate if torch.compiler.is_compiling() else group["lr"]
        used = [gradient is not None for gradient in gradients]
        decayed = list(itertools.compress(lists.parameters, used))
        if decayed:
            with torch.no_grad():
                scale(decayed, 1.0 - (1.0 - found_inf) * (rate * group["weight_decay"]))
        super().apply(gradients, found_inf)


class RMSprop(UncompiledOptimizer):
    """RMSprop as A3C has it (Mnih et al., "Asynchronous Methods for Deep RL", 2016, section 4).

    ``g = decay * g + (1 - decay) * gradient²``, and the parameters change by ``-lr * gradient /
    sqrt(g + eps)``: ``eps`` is below the root, unlike in ``torch.optim.RMSprop``.

    Args:
        parameters: floating-point parameters of one device.
        lr: step size; the group's ``"lr"`` can be changed between steps, followed by
            :meth:`follow_schedule`.
        decay: of the mean of squared gradients.
        eps: added to that mean.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        lr: float,
        decay: float = 0.99,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "eps": eps})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"square_avg": torch.zeros_like(parameter)}
        self._collect()

    def step(self, closure: Any = None) -> Any:
        """Make one step from the parameters' gradients; ``closure`` is not called."""
        gradients = [parameter.grad for parameter in self._updated]
        self.apply(gradients, self._rate.new_zeros(()))

    def apply(self, gradients: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
        """Make one step from given gradients; a compiled function may contain it.

        Args:
            gradients: one for each parameter, in their order; None: the parameter took no part, and
                does not change.
            found_inf: a float32 scalar; unless it is 0, nothing changes.
        """
        with torch.no_grad():
            # A gradient of 0, and a mean that does not decay, change nothing.
            is_finite = found_inf == 0
            keep = 1.0 - (1.0 - self._decay) * (1.0 - found_inf)
            for parameter, gradient, square in zip(
                self._updated, gradients, self._squares, strict=True
            ):
                if gradient is None:
                    continue
                gradient = torch.where(is_finite, gradient, 0.0)
                square.mul_(keep).addcmul_(gradient, gradient, value=1.0 - self._decay)
                root = (square + self._eps).sqrt_()
                parameter.sub_(gradient.div_(root).mul_(self._rate))

    def follow_schedule(self) -> None:
        """Let steps see the group's ``"lr"``; call it after a change."""
        self._rate.fill_(self.param_groups[0]["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        self._collect()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled optimizer."""
        super().__setstate__(state)
        if "state" in state:
            self._collect()

    def _collect(self) -> None:
        """Collect what a step needs, so that it looks nothing up."""
        (group,) = self.param_groups
        self._updated: list[torch.Tensor] = list(group["params"])
        self._squares = [self.state[parameter]["square_avg"] for parameter in self._updated]
        self._decay, self._eps = float(group["decay"]), float(group["eps"])
        self._rate = self._updated[0].new_tensor(group["lr"])


_numbers = itertools.count()
_steps: Final[WeakValueDictionary[int, OpaqueStep]] = WeakValueDictionary()
"""The steps that compiled updates find by their numbers, as long as something holds them."""


class OpaqueStep:
    """Makes the steps of any optimizer of torch, which need not know of compiled updates.

    To the compiler, a step is one operation that changes the parameters. The optimizer itself makes
    it, so its state and numbers are those of an ordinary ``step()``. Whether to make it is read
    back, for which a GPU waits.

    Args:
        optimizer: any optimizer that steps without a closure.
        parameters: what it updates, in the order of the gradients.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self.number = next(_numbers)
        _steps[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return OpaqueStep, (self._optimizer, self._parameters)

    def __call__(self, gradients: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
        """Make one step from given gradients; a compiled function may contain it.

        Args:
            gradients: one for each parameter, in their order; None: the parameter took no part.
            found_inf: a float32 scalar; unless it is 0, nothing changes.
        """
        if not torch.compiler.is_compiling():
            self.make(gradients, found_inf)
            return
        present = [gradient for gradient in gradients if gradient is not None]
        used = [gradient is not None for gradient in gradients]
        with torch.no_grad():
            torch.ops.dmiddleware.step(self._parameters, present, used, found_inf, self.number)

    def make(self, gradients: Sequence[torch.Tensor | None], found_inf: torch.Tensor) -> None:
        """Make one step outside of a compiled function; the arguments are those of a call."""
        if found_inf.item():
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    def copy_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy the parameters to those that a compiled function works with, if they differ."""
        for source, target in zip(self._parameters, parameters, strict=True):
            if source.data_ptr() != target.data_ptr():
                target.copy_(source.detach())


@torch.library.custom_op(
    "dmiddleware::step",
    mutates_args=("parameters",),
    # Versions of torch before 2.7 cannot infer it from these annotations.
    schema="(Tensor(a!)[] parameters, Tensor[] gradients, bool[] used, Tensor found_inf, "
    "int number) -> ()",
)
def _step(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    used: list[bool],
    found_inf: torch.Tensor,
    number: int,
) -> None:
    step, remaining = _steps[number], iter(gradients)
    # The compiler may use the memory of its gradients again.
    step.make([next(remaining).clone() if is_used else None for is_used in used], found_inf)
    step.copy_to(parameters)
