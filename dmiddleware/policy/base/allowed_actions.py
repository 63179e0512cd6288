"""A check that the actions of a policy respect the action masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmiddleware.data.batch import Batch, Nested, leaves
from dmiddleware.errors import PolicyOutputError
from dmiddleware.model.action_mask import action_mask_of
from dmiddleware.policy.base.collate import is_per_env

__all__ = ["allows_choice", "check_allowed"]


def check_allowed(
    obs: Nested,
    outputs: Mapping[Any, Any],
    *,
    mask: Any = None,
    allows: Callable[[torch.Tensor, Any], torch.Tensor | None],
    user: str,
) -> None:
    """Reject an action that its mask forbids.

    Args:
        obs: what the policy acted on: observations ``[E, …]``, or a dictionary from env ids to
            single observations.
        outputs: what it returned: ``{"action": [E, …]}``, or a dictionary from env ids to outputs.
        mask: what is allowed, ``[E, A]`` bool, or a dictionary from env ids to masks; None takes
            the mask that the observations have.
        allows: whether a mask ``[…, A]`` allows actions ``[…]``, bool; None where that is unknown.
        user: the policy's method, for the message.

    Raises:
        PolicyOutputError: naming the action and the allowed ones.
    """
    if is_per_env(obs):
        for env_id, one in obs.items():
            own = action_mask_of(one) if mask is None else mask[env_id]
            if own is None:
                return
            check_allowed(one, outputs[env_id], mask=own, allows=allows, user=user)
        return
    if mask is None:
        mask = action_mask_of(obs)
    if mask is None:
        return
    mask, action = mask.cpu(), outputs["action"]
    if not isinstance(action, Batch | Mapping | tuple):
        action = torch.as_tensor(action)
    allowed = allows(mask, action)
    if allowed is None or bool(allowed.all()):
        return
    row = () if allowed.dim() == 0 else int((~allowed).nonzero()[0, 0])
    chosen = {path: leaf[row].tolist() for path, leaf in leaves(action)}
    raise PolicyOutputError(
        f"{user} chose the action {chosen.get('', chosen)}, but its action_mask allows only "
        f"{mask[row].nonzero().flatten().tolist()} (counted from 0); mask the model's logits, for "
        "example with dmiddleware.model.masked_logit(logit, obs), and do not ask for an action "
        "where none is allowed"
    )


def allows_choice(mask: torch.Tensor, action: Any) -> torch.Tensor | None:
    """Return ``[…]`` bool, whether a mask ``[…, A]`` allows choices ``[…]``, counted from 0.

    Returns:
        None for other actions, about which a mask alone says nothing.
    """
    if not isinstance(action, torch.Tensor) or action.dim() != mask.dim() - 1:
        return None
    return mask.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
