"""The numbers in what envs report at the end of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.env import BaseEnvManager
from dmiddleware.env.batching import kind_of
from dmiddleware.tree import as_number

__all__ = ["SUCCESS_KEYS", "share_of", "success_of", "warn_of_success"]

SUCCESS_KEYS: Final = ("is_success", "success")
"""The keys under which the last info of an episode says whether it reached its goal: that of
gymnasium-robotics and stable-baselines3, and that of Meta-World."""


def share_of(value: object) -> float | None:
    """Return a success in an info as a float; None if it is not one number from 0 to 1.

    Numbers and booleans of Python and of array libraries count, also as the only element of an
    array, a tensor, a list or a tuple.
    """
    number = as_number(value)
    return number if number is not None and 0 <= number <= 1 else None


def success_of(info: Mapping[str, Any]) -> float | None:
    """Return the success that the last info of an episode reports; None if it reports none."""
    shares = (share_of(info[key]) for key in SUCCESS_KEYS if key in info)
    return next((share for share in shares if share is not None), None)


def warn_of_success(info: Mapping[str, Any], env_manager: BaseEnvManager) -> None:
    """Warn, once for each env manager, of a success that is not one number from 0 to 1."""
    for key in SUCCESS_KEYS:
        if key in info and share_of(info[key]) is None:
            env_manager.warn_once(
                key,
                "an episode ended with %r of type %s in its info, which is not one number from 0 "
                "to 1; it is left out of the success rate. Report True or False",
                key,
                kind_of(info[key]),
            )
