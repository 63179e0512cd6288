"""Action masks: which discrete actions an observation allows.

A masked environment gives observations that are dictionaries with the key ``action_mask``, as
PettingZoo's games do: ``[A]``, not 0 where the action is allowed. For a MultiDiscrete action these
are the options of all choices one after the other (or a tuple with a mask for each choice), for a
MultiBinary one whether each bit may be 1, and for a Dict or Tuple action all of these one after the
other (or nested like the action). Everything else in the dictionary is what the network sees.

The stock policies apply the mask to what their networks return, both when they act and when they
bootstrap, so networks do not apply it. A custom policy does the same with :func:`masked_logit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dmiddleware.env.team import ACTION_MASK
from dmiddleware.rl import mask_logit
from dmiddleware.tree import Batch, Nested

__all__ = ["action_mask_of", "as_mask", "masked_logit", "sorted_names"]


def action_mask_of(obs: Nested) -> torch.Tensor | None:
    """Return the mask of observations, ``[…, A]`` bool, or None if they have none.

    Args:
        obs: a tensor, a treetensor or a nested dictionary, ``[…]``.
    """
    if not isinstance(obs, Batch | Mapping) or ACTION_MASK not in obs:
        return None
    return as_mask(obs[ACTION_MASK])


def as_mask(mask: Nested) -> torch.Tensor:
    """Return a mask as ``[…, A]`` bool: the parts of a nested one are joined in order."""
    if isinstance(mask, tuple):
        parts = list(mask)
    elif isinstance(mask, Batch | Mapping):
        parts = [mask[name] for name in sorted_names(mask)]
    else:
        return torch.as_tensor(mask) != 0
    return torch.cat([as_mask(part) for part in parts], dim=-1)


def sorted_names(mapping: Iterable[Any]) -> list[Any]:
    """Return the names of a mapping in order; those of a Tuple space by number."""
    names = list(mapping)
    return sorted(names, key=int if all(str(name).isdecimal() for name in names) else str)


def masked_logit(logit: torch.Tensor, obs: Nested) -> torch.Tensor:
    """Give the forbidden actions the lowest finite logit; without a mask return the logits as is.

    Rows whose mask allows no action stay as they are. PettingZoo gives such masks to players that
    are not to move and at the end of a game.

    Source: Huang and Ontañón, "A Closer Look at Invalid Action Masking", 2022.

    Args:
        logit: ``[…, A]``, logits or action values.
        obs: the observations ``[…]`` that they were computed from.
    """
    mask = action_mask_of(obs)
    return mask_logit(logit, mask)
