"""States of models and optimisers, in a form that checkpoints store without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import CheckpointMismatch

__all__ = [
    "check_model_state",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "part_of",
    "plain_name",
]


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's parameters and buffers, which later updates do not change.

    The names are those of the plain model, whether or not it is compiled.
    """
    return {
        plain_name(name): value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def part_of(state: Mapping[str, Any], name: str) -> Any:
    """Return one part of a policy's state.

    Raises:
        CheckpointMismatch: if the state lacks it, naming what it has.
    """
    if name not in state:
        raise CheckpointMismatch(
            f"the state to load has no {name}, only {', '.join(map(str, state)) or 'nothing'}; "
            "load a state of the same kind of policy; learn_mode needs one that learn_mode saved"
        )
    return state[name]


def check_model_state(model: nn.Module, state: Mapping[str, Any], what: str = "model") -> None:
    """Reject a state that belongs to another model.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, and both shapes.
    """
    own = {plain_name(name): value for name, value in model.state_dict().items()}
    state = {plain_name(name): value for name, value in state.items()}
    for name, value in own.items():
        if name not in state:
            raise CheckpointMismatch(
                f"the checkpoint's {what} has no {name}, which this policy's {what} has with shape "
                f"{_shape(value)}; it belongs to another model: check cfg.model"
            )
        if _shape(value) != _shape(state[name]):
            raise CheckpointMismatch(
                f"{name} of the checkpoint's {what} has shape {_shape(state[name])}, this policy's "
                f"has {_shape(value)}; it belongs to another model: check cfg.model"
            )
    for name, value in state.items():
        if name not in own:
            raise CheckpointMismatch(
                f"the checkpoint's {what} has {name} of shape {_shape(value)}, which this policy's "
                f"{what} lacks; it belongs to another model: check cfg.model"
            )


def load_model_state(model: nn.Module, state: Mapping[str, Any], what: str = "model") -> None:
    """Load a state strictly; a state that does not fit leaves the model as it was.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, and both shapes.
    """
    check_model_state(model, state, what)
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({names[plain_name(name)]: value for name, value in state.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimiser's state, with text keys (checkpoints have no others)."""
    raw = optimizer.state_dict()
    return {
        "state": {str(index): _copied(slots) for index, slots in raw["state"].items()},
        "param_groups": [dict(group) for group in raw["param_groups"]],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`optimizer_state` returned.

    Raises:
        CheckpointMismatch: if the state belongs to an optimiser of other parameters.
    """
    raw = {
        "state": {int(index): _copied(slots) for index, slots in state["state"].items()},
        "param_groups": [dict(group) for group in state["param_groups"]],
    }
    try:
        optimizer.load_state_dict(raw)
    except (ValueError, KeyError) as error:
        raise CheckpointMismatch(
            f"the checkpoint's optimiser does not fit this policy's: {error}; check cfg.learn"
        ) from error


def plain_name(name: str) -> str:
    """Return the name that a parameter has without ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _copied(slots: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in slots.items()
    }
