"""States of policies that DI-engine saved, or that have the model and its optimizer only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch

from dmiddleware.errors import CheckpointMismatch
from dmiddleware.policy.modes import CollectMode, EvalMode, LearnMode

__all__ = ["in_own_names", "is_partial", "load_acting_state", "load_learner_state"]

_log = logging.getLogger(__name__)

_GROUPS: Final = (
    # What begins with the first belongs to the second; the longer prefixes come first.
    ("actor_critic.actor_head.log_sigma_param", "actor.log_std"),
    ("actor_critic.encoder.", "actor.encoder."),
    ("actor_critic.actor_head.", "actor.policy_head."),
    ("actor_critic.critic_head.", "auxiliary."),
    ("aux_critic.", "critic."),
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
"""The submodules of DI-engine's DQN, VAC and PPG, and those of the networks here."""

_REPEATED: Final = ("actor.", "critic.", "actor_critic.actor.", "actor_critic.critic.")
"""Names under which VAC, also as a part of PPG, has its submodules a second time."""

_OWN: Final = (
    "acting", "learning", "target", "generator", "train_iter", "learn_generator",
)  # fmt: skip
"""What only states of this project have."""


def is_partial(state: Mapping[str, Any]) -> bool:
    """Return whether a learner's state has its model, and nothing else that is saved here."""
    return "model" in state and not any(name in state for name in _OWN)


def load_acting_state(mode: CollectMode | EvalMode, state: Mapping[str, Any]) -> None:
    """Load a state into a policy that acts, also one of DI-engine's.

    Raises:
        CheckpointMismatch: as the mode's ``load_state_dict``.
    """
    model, network = state.get("model"), mode.spec.model
    if isinstance(model, Mapping) and network is not None:
        state = {**state, "model": in_own_names(model, network.state_dict())}
    mode.load_state_dict(dict(state))


def load_learner_state(mode: LearnMode, state: Mapping[str, Any]) -> None:
    """Load a learner's state, also one of DI-engine's.

    A state that has only the model, and maybe its optimizer and target network, as DI-engine
    saves it, is loaded as far as it goes; the rest begins again, with a warning.

    Raises:
        CheckpointMismatch: if something is missing, or belongs to another model; nothing was
            loaded.
    """
    network = mode.spec.model
    if not is_partial(state) or network is None:
        mode.load_state_dict(dict(state))
        return
    own = network.state_dict()
    model = in_own_names(state["model"], own)
    before = mode.state_dict()
    mode.spec.load_weights(model)
    whole = {**mode.state_dict(), "train_iter": 0}
    missing = [*whole["acting"], "random generators"]
    is_whole = len(whole["target"]) == 1 and list(*whole["target"].values()) == list(own)
    target = state.get("target_model") if is_whole else None
    if target is not None:
        whole["target"] = {name: dict(in_own_names(target, own)) for name in whole["target"]}
    elif whole["target"]:
        missing.append("target network (now a copy of the network)")
    slots = None
    if list(model) == list(own) and len(whole["optimizer"]) == 1:
        ((name, saved),) = whole["optimizer"].items()
        slots = _optimizer_slots(state.get("optimizer") or {}, saved)
        if slots is not None:
            whole["optimizer"] = {name: {**saved, "state": slots}}
    if slots is None:
        missing.append("optimizer")
    try:
        mode.load_state_dict(whole)
    except CheckpointMismatch:
        mode.load_state_dict(before)
        raise
    _log.warning(
        "%s: the state to load has no usable %s; they begin again, and updates count from 0",
        mode.spec.kind.__name__,
        ", ".join(missing),
    )


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
            name: state[old].reshape(-1) if name.endswith("log_std") else state[old]
            for name, old in zip(ours, names, strict=True)
        }
    return renamed


def _optimizer_slots(
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
