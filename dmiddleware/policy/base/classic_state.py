"""States of policies that DI-engine saved, or that have the model and its optimizer only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

__all__ = ["in_own_names", "is_partial", "optimizer_slots"]

_GROUPS: Final = (
    # What begins with the first belongs to the second; the longer prefixes come first.
    ("actor_head.log_sigma_param", "log_std"),
    ("actor_encoder.", "encoder."),
    ("critic_encoder.", "critic_encoder."),
    ("encoder.", "encoder."),
    ("head.V.", "value_head."),
    ("head.A.", "head."),
    ("head.Q.", "head."),
    ("actor_head.", "policy_head."),
    ("critic_head.", "value_head."),
)
"""The submodules of DI-engine's DQN and VAC, and those of the networks here."""

_REPEATED: Final = ("actor.", "critic.")
"""Names under which VAC has its submodules a second time."""

_OWN: Final = (
    "acting_parts", "learning_parts", "target", "generator", "train_iter", "learn_generator",
)  # fmt: skip
"""What only states of this project have."""


def is_partial(state: Mapping[str, Any]) -> bool:
    """Return whether a learner's state has its model, and nothing else that is saved here."""
    return "model" in state and not any(name in state for name in _OWN)


def in_own_names(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state under the names of a network here.

    The tensors of each submodule keep their order. A state that does not look like one of
    DI-engine's is returned as it is, and so is a submodule with another number of tensors.

    Args:
        state: the state.
        own: the state of the network.
    """
    if state.keys() <= own.keys():  # ours, maybe only of the parts that act
        return state
    theirs: dict[str, list[str]] = {}
    for name in state:
        if name.startswith(_REPEATED):
            continue
        group = next((ours for prefix, ours in _GROUPS if name.startswith(prefix)), None)
        if group is None:
            return state
        theirs.setdefault(group, []).append(name)
    renamed: dict[str, Any] = {}
    for group, names in theirs.items():
        ours = [name for name in own if name.startswith(group)]
        if len(ours) != len(names):
            ours = names
        renamed |= {
            name: state[old].reshape(-1) if name == "log_std" else state[old]
            for name, old in zip(ours, names, strict=True)
        }
    return renamed


def optimizer_slots(
    state: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, dict[str, torch.Tensor]] | None:
    """Return what an optimizer of torch has learned, if it fits an optimizer here.

    Args:
        state: a state of ``torch.optim.Optimizer``, or one with text keys.
        own: the state of the optimizer here, with text keys.

    Returns:
        The slots by the index of the parameter; None if they do not fit.
    """
    slots = {str(index): dict(one) for index, one in state.get("state", {}).items()}
    if slots.keys() != own["state"].keys():
        return None
    for index, one in own["state"].items():
        if one.keys() != slots[index].keys():
            return None
        if any(value.shape != slots[index][name].shape for name, value in one.items()):
            return None
    return slots
