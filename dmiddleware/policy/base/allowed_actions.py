"""A check that the actions of a policy respect the action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.data.batch import Batch, Nested
from dmiddleware.errors import PolicyOutputError
from dmiddleware.model.action_mask import action_mask_of
from dmiddleware.policy.base.collate import is_per_env

__all__ = ["check_allowed"]


def check_allowed(obs: Nested, outputs: Mapping[Any, Any], *, mask: Any = None, user: str) -> None:
    """Reject a discrete action that its mask forbids; actions of other spaces are not checked.

    Args:
        obs: what the policy acted on: observations ``[E, …]``, or a dictionary from env ids to
            single observations.
        outputs: what it returned: ``{"action": [E]}``, or a dictionary from env ids to outputs.
        mask: what is allowed, ``[E, A]`` bool, or a dictionary from env ids to masks; None takes
            the mask that the observations have.
        user: the policy's method, for the message.

    Raises:
        PolicyOutputError: naming the action and the allowed ones.
    """
    if isinstance(obs, Mapping) and is_per_env(obs):
        for env_id, one in obs.items():
            own = action_mask_of(one) if mask is None else mask[env_id]
            if own is None:
                return
            check_allowed(one, outputs[env_id], mask=own, user=user)
        return
    if mask is None:
        mask = action_mask_of(obs)
    if mask is None:
        return
    if isinstance(outputs["action"], Batch | Mapping | tuple):
        return
    mask, action = mask.cpu(), torch.as_tensor(outputs["action"])
    if action.dim() != mask.dim() - 1:
        return
    allowed = mask.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
    if not bool(allowed.all()):
        row = 0 if allowed.dim() == 0 else int((~allowed).nonzero()[0, 0])
        chosen = int(action if action.dim() == 0 else action[row])
        choices = (mask if mask.dim() == 1 else mask[row]).nonzero().flatten().tolist()
        raise PolicyOutputError(
            f"{user} chose the action {chosen}, but its action_mask allows only {choices}; mask "
            "the model's logits, for example with dmiddleware.model.masked_logit(logit, obs), and "
            "do not ask for an action where none is allowed"
        )
