"""The components of an algorithm: its modules, how each is trained, and what acting needs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from dmiddleware.distributed import GradientReducer
from dmiddleware.errors import CheckpointMismatch, ConfigError, PolicyError
from dmiddleware.rl.optim import FusedAdam, FusedAdamW, OpaqueStep, RMSprop
from dmiddleware.schedule import Schedule
from dmiddleware.torch_private import move_towards, scale

__all__ = [
    "Component",
    "HasState",
    "MakeOptimizer",
    "TargetRule",
    "adam",
    "adamw",
    "broken_weights",
    "load_optimizer_state",
    "optimizer_state",
    "rmsprop",
    "take_flag",
    "torch_optimizer",
]


@dataclass(frozen=True, slots=True)
class MakeOptimizer:
    """Makes the optimizer of a component.

    Attributes:
        learning_rate: the step size.
        make: makes the optimizer from the parameters and ``lr``.
    """

    learning_rate: Schedule
    make: Callable[..., torch.optim.Optimizer]


class HasState(Protocol):
    """An object that can be saved, such as running statistics or the bounds of actions."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore what :meth:`state_dict` returned."""
        ...


M_co = TypeVar("M_co", bound=HasState, covariant=True)


def adam(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> MakeOptimizer:
    """Return what makes the Adam of a component (Kingma and Ba, "Adam", 2015).

    Args:
        learning_rate: step size.
        betas: decay of the means of the gradient and of its square.
        eps: added to the denominator.
    """
    return MakeOptimizer(Schedule.of(learning_rate), partial(FusedAdam, betas=betas, eps=eps))


def rmsprop(
    learning_rate: float | Schedule, *, decay: float = 0.99, eps: float = 1e-5
) -> MakeOptimizer:
    """Return what makes the RMSprop of a component, in the form of A3C.

    Source: Mnih et al., "Asynchronous Methods for Deep RL", 2016, section 4.

    Args:
        learning_rate: step size.
        decay: of the mean of squared gradients.
        eps: added to that mean, below the root.
    """
    return MakeOptimizer(Schedule.of(learning_rate), partial(RMSprop, decay=decay, eps=eps))


def adamw(
    learning_rate: float | Schedule,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> MakeOptimizer:
    """Return what makes the AdamW of a component.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        learning_rate: step size.
        weight_decay: fraction of the weights that a step takes away, times the learning rate.
        betas: decay of the means of the gradient and of its square.
        eps: added to the denominator.
    """
    make = partial(FusedAdamW, weight_decay=weight_decay, betas=betas, eps=eps)
    return MakeOptimizer(Schedule.of(learning_rate), make)


def torch_optimizer(
    make: Callable[..., torch.optim.Optimizer], learning_rate: float | Schedule, **options: Any
) -> MakeOptimizer:
    """Return what makes any optimizer of torch, or of one's own, for a component.

    Args:
        make: its class; it takes the parameters, ``lr`` and the options. It must step without a
            closure, which ``torch.optim.LBFGS`` cannot.
        learning_rate: step size.
        **options: its other arguments.

    Example:
        >>> momentum = torch_optimizer(torch.optim.SGD, 1e-2, momentum=0.9)
        >>> component = Component(nn.Linear(2, 1), momentum, grad_clip_norm=1.0)
    """
    return MakeOptimizer(Schedule.of(learning_rate), partial(make, **options))


@dataclass(frozen=True, slots=True)
class TargetRule:
    """How a target network follows its module.

    Attributes:
        every: updates between two moves.
        tau: fraction of the way that a move takes; 1 copies the weights.
    """

    every: int = 1
    tau: float = 1.0


class Component(Generic[M_co]):
    """A module, or another object with a state, of an algorithm.

    A policy declares its components once (:meth:`Policy.make_components`). From that follows on
    which device they are, how they are saved, what collectors receive, and how ranks average
    gradients. An annotation of the class, such as ``critic: Component[QEnsemble]``, makes the
    component of this name an attribute, whose module has this type.

    Args:
        module: what is saved. An ``nn.Module`` is also moved to the policy's device.
        optimizer: makes the optimizer of the parameters that require a gradient; see :func:`adam`,
            :func:`adamw`, :func:`rmsprop` and :func:`torch_optimizer`. Or an optimizer of torch
            that has these parameters. None: this component is not trained.
        target: how a target network follows the module; None: the component has none.
        grad_clip_norm: largest norm of the component's gradient; None does not clip (Pascanu et
            al., "On the difficulty of training recurrent neural networks", 2013).
        acts: whether acting needs it; only such components are sent to collectors and evaluators.
        optional: whether a state without this component is accepted, and leaves it as it is.

    Attributes:
        module: as given.
        optimizer: the optimizer; None: there is none, or the policy does not learn.
        schedule: of the learning rate; None: it is constant, or the policy does not learn.
        acts: as given.
        optional: as given.
        target_rule: how the target network moves; None: there is none.

    Raises:
        ConfigError: if ``optimizer`` is none, needs a closure, or has other parameters.
    """

    def __init__(
        self,
        module: M_co,
        optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
        *,
        target: TargetRule | None = None,
        grad_clip_norm: float | None = None,
        acts: bool = False,
        optional: bool = False,
    ) -> None:
        self.module = module
        self.target_rule = target
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Schedule | None = None
        self.acts, self.optional = acts, optional
        if not isinstance(optimizer, MakeOptimizer | torch.optim.Optimizer | None):
            raise ConfigError(
                f"the optimizer of a component must be an optimizer of torch, adam(...), "
                f"adamw(...), rmsprop(...) or torch_optimizer(...), got {optimizer!r:.100}; a "
                "class is given as torch_optimizer(torch.optim.SGD, learning_rate)"
            )
        self._target: M_co | None = None
        self._make_optimizer = optimizer
        self._apply: Callable[[Sequence[torch.Tensor | None], torch.Tensor], None] | None = None
        self._max_norm = grad_clip_norm
        self._parameters: list[nn.Parameter] = []
        self._online: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._not_finite = torch.zeros(())
        self._reducer: GradientReducer | None = None

    def prepare(self, *, not_finite: torch.Tensor, reducer: GradientReducer | None = None) -> None:
        """Build what learning needs: the optimizer and the target network.

        Args:
            not_finite: a float32 scalar, the same for all components of an algorithm. A step whose
                loss or norm of the gradient is not finite sets it to 1; until it is 0 again, no
                step changes anything.
            reducer: averages the module's gradients over all ranks; None: there is one.
        """
        self._not_finite, self._reducer = not_finite, reducer
        module: Any = self.module
        if self.target_rule is not None:
            target: Any = copy.deepcopy(module).requires_grad_(False).eval()
            self._target = target
            self._online = list(module.parameters())
            self._copies = list(target.parameters())
            self._buffers = list(zip(target.buffers(), module.buffers(), strict=True))
        if self._make_optimizer is not None:
            if isinstance(self._make_optimizer, MakeOptimizer):
                rate = self._make_optimizer.learning_rate
                trained = [p for p in module.parameters() if p.requires_grad]
                self.use_optimizer(self._make_optimizer.make(trained, lr=rate.start))
                self.schedule = None if rate.type == "constant" else rate
            else:
                self.use_optimizer(self._make_optimizer)

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with an optimizer of torch from the next step on, at its own learning rate.

        Raises:
            ConfigError: if it needs a closure, or has other parameters than the module.
        """
        module: Any = self.module
        trained = [p for p in module.parameters() if p.requires_grad]
        self._parameters = _checked_parameters(optimizer, trained)
        self.optimizer, self.schedule = optimizer, None
        if type(optimizer) in (FusedAdam, FusedAdamW, RMSprop):
            self._apply = optimizer.apply  # type: ignore[attr-defined]
        else:
            self._apply = OpaqueStep(optimizer, self._parameters)

    def require_capturable(self, name: str) -> None:
        """Refuse an optimizer whose steps read values back, which a CUDA graph cannot contain.

        Args:
            name: the component's, for the message.

        Raises:
            ConfigError: if it is one of torch's own; see :func:`torch_optimizer`.
        """
        if isinstance(self._apply, OpaqueStep):
            raise ConfigError(
                f'compile must not be "graphs" with the {type(self.optimizer).__name__} of {name}, '
                "because its steps read back whether to be made; set compile=True, or use "
                "adam(...), adamw(...) or rmsprop(...)"
            )

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the optimizer, but not its options: the component keeps its own.

        A learning rate that follows a schedule is restored too; the next update sets it.

        Raises:
            CheckpointMismatch: if the state belongs to an optimizer of other parameters.
        """
        assert self.optimizer is not None
        restored = {"params"} if self.schedule is None else {"params", "lr"}
        pairs = zip(state["param_groups"], self.optimizer.param_groups, strict=False)
        groups = [
            {**saved, **{name: value for name, value in group.items() if name not in restored}}
            for saved, group in pairs
        ]
        load_optimizer_state(self.optimizer, {**state, "param_groups": groups})

    def step(self, loss: torch.Tensor, *, skip: torch.Tensor | None = None) -> torch.Tensor:
        """Make an optimizer step from a loss; leave the component unchanged if it is not finite.

        Nothing is read back from a GPU, and nothing depends on the values, so that an update can be
        compiled. If the loss is not finite, or the norm of the gradient of a component that is
        clipped, this step changes nothing, and nor does any later step of any component until the
        policy has reported it. Components that made their step before it, in the same update, have
        changed. Without clipping the gradient is not checked, because its norm would take time in
        every step.

        Args:
            loss: a scalar, with gradient.
            skip: a bool scalar: True also leaves the component unchanged, and is not an error.

        Returns:
            The norm of the gradient before clipping, a scalar; 0 if the component is not clipped.
        """
        assert self._apply is not None
        gradients = self._gradients(loss)
        finite = loss.detach().isfinite()
        norm = loss.new_zeros(())
        if self._max_norm is not None:
            used = [gradient for gradient in gradients if gradient is not None]
            norm = nn.utils.get_total_norm(used)
            finite = finite.logical_and_(norm.isfinite())
            scale(used, (self._max_norm / (norm + 1e-6)).clamp_max_(1.0))
        found_inf = finite.logical_not_().float()
        if self._reducer is not None:
            self._reducer.agree_on_largest(found_inf)
        # Components that step later would learn from what this one could not.
        found_inf = self._not_finite.clamp_(min=found_inf)
        if skip is not None:
            found_inf = torch.maximum(found_inf, skip.float())
        self._apply(gradients, found_inf)
        return norm

    def move_target(self) -> None:
        """Move the target network towards the module, as far as the rule says."""
        assert self.target_rule is not None
        with torch.no_grad():
            move_towards(self._copies, self._online, self.target_rule.tau)
            for copied, online in self._buffers:
                copied.copy_(online)

    @property
    def target(self) -> M_co:
        """The target network, in eval mode and without gradients.

        Raises:
            PolicyError: if there is none: the component has no rule for it, or the policy does not
                learn.
        """
        if self._target is None:
            raise PolicyError(
                f"a component of {type(self.module).__name__} has no target network; give it a "
                "rule, such as target=TargetRule(tau=0.005), in a policy that learns"
            )
        return self._target

    @property
    def has_target(self) -> bool:
        """Whether there is a target network."""
        return self._target is not None

    @property
    def has_finite_weights(self) -> bool:
        """Whether no weight that is trained is NaN or infinite; reads them back from a GPU."""
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters)

    @property
    def is_module(self) -> bool:
        """Whether the component is an ``nn.Module``, and not another object with a state."""
        return isinstance(self.module, nn.Module)

    @property
    def learning_rate(self) -> float:
        """The optimizer's present learning rate; 0 without an optimizer."""
        return 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        assert self.optimizer is not None
        if value != self.learning_rate:
            for group in self.optimizer.param_groups:
                group["lr"] = value
            if isinstance(self.optimizer, FusedAdam | RMSprop):
                self.optimizer.follow_schedule()

    def _gradients(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter, averaged over all ranks; None: unused."""
        reducer = self._reducer
        if torch.compiler.is_compiling():
            # A compiled function cannot write to the parameters' gradients.
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            return list(gradients) if reducer is None else self._averaged(gradients)
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward(inputs=self._parameters)  # type: ignore[no-untyped-call]
        if reducer is not None:
            module: Any = self.module
            reducer.reduce(module)
        return [parameter.grad for parameter in self._parameters]

    def _averaged(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients averaged over all ranks; parameters without one count as zeros."""
        assert self._reducer is not None
        averaged = [
            torch.zeros_like(parameter) if gradient is None else gradient.clone()
            for gradient, parameter in zip(gradients, self._parameters, strict=True)
        ]
        self._reducer.average(averaged)
        return [*averaged]


def _checked_parameters(
    optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Return what an optimizer updates, in its order, if it can train a component.

    Args:
        optimizer: the component's.
        trained: the parameters of the component that require a gradient.

    Raises:
        ConfigError: if it steps only with a closure, or does not have these parameters.
    """
    kind = type(optimizer).__name__
    parameters = inspect.signature(optimizer.step).parameters
    closure = parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{kind} needs a closure that computes the loss again, and an update computes it once; "
            "use an optimizer that steps without one, such as adam(...) or torch.optim.SGD"
        )
    updated = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if {id(p) for p in updated} != {id(p) for p in trained}:
        raise ConfigError(
            f"the {kind} of a component has {len(updated)} parameters that require a gradient, but "
            f"they are not the {len(trained)} of the component's module; build it with "
            f"module.parameters(), or give torch_optimizer(torch.optim.{kind}, learning_rate)"
        )
    return updated


def take_flag(not_finite: torch.Tensor) -> bool:
    """Return whether a step set the flag of :meth:`Component.prepare`, and clear it."""
    if not not_finite.item():
        return False
    not_finite.zero_()
    return True


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's state, with text keys (checkpoints have no others)."""
    raw = optimizer.state_dict()
    return {
        "state": {str(index): _copied(slots) for index, slots in raw["state"].items()},
        "param_groups": [dict(group) for group in raw["param_groups"]],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`optimizer_state` returned.

    Raises:
        CheckpointMismatch: if the state belongs to an optimizer of other parameters.
    """
    raw = {
        "state": {int(index): _copied(slots) for index, slots in state["state"].items()},
        "param_groups": [dict(group) for group in state["param_groups"]],
    }
    try:
        optimizer.load_state_dict(raw)
    except (ValueError, KeyError) as error:
        raise CheckpointMismatch(
            f"the checkpoint's optimizer does not fit this policy's: {error}; check its settings"
        ) from error


def broken_weights(components: Mapping[str, Component[Any]]) -> str | None:
    """Say which components have weights that are not finite, for an error; None: none has."""
    broken = [name for name, component in components.items() if not component.has_finite_weights]
    if not broken:
        return None
    return (
        f"the weights of {', '.join(broken)} are NaN or infinite, because a gradient of this or an "
        "earlier update was; load an earlier checkpoint, and lower the learning rate or set "
        "grad_clip_norm, with which gradients are checked too"
    )


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in slots.items()
    }
