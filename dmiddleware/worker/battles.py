"""Checks of the arguments that battle collectors and battle evaluators take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.classic import BattleEnvManager
from dmiddleware.errors import ConfigError

__all__ = ["checked_battle_env", "checked_policies", "per_player"]


def checked_policies(policies: object, *, user: str, n_policy: int | None) -> list[Any]:
    """Return a list of policies, or reject it.

    Args:
        policies: what was passed as policies.
        user: what it was passed to, for the message.
        n_policy: how many there must be; None: two or more.

    Raises:
        ConfigError: if this is not a list of that length.
    """
    wanted = "two or more policies" if n_policy is None else f"exactly {n_policy} policies"
    # A mode is a tuple, but not of policies.
    is_list = isinstance(policies, list | tuple) and not hasattr(policies, "_fields")
    n_found = len(policies) if isinstance(policies, list | tuple) else 0
    if not is_list or n_found < 2 or n_policy not in (None, n_found):
        raise ConfigError(
            f"{user} takes a list of {wanted}, one per player, got {policies!r:.100}; for "
            "self-play, repeat the policy"
        )
    assert isinstance(policies, list | tuple)
    return list(policies)


def checked_battle_env(env: object, *, user: str) -> BattleEnvManager:
    """Return an env manager of games, or reject it.

    Raises:
        ConfigError: if it is not a :class:`BattleEnvManager`.
    """
    if not isinstance(env, BattleEnvManager):
        raise ConfigError(
            f"{user} takes a BattleEnvManager, got {env!r:.100}; make one with "
            "dmiddleware.env.BattleEnvManager([make_game] * env_num)"
        )
    return env


def per_player(policy_kwargs: Any, n_player: int) -> list[Mapping[str, Any]]:
    """Return the keyword arguments of each player's policy.

    Args:
        policy_kwargs: one dictionary for all players, or a list with one for each; None: none.
        n_player: number of players.

    Raises:
        ConfigError: if it is neither.
    """
    if policy_kwargs is None:
        return [{}] * n_player
    if isinstance(policy_kwargs, Mapping):
        return [policy_kwargs] * n_player
    if not isinstance(policy_kwargs, list | tuple) or len(policy_kwargs) != n_player:
        raise ConfigError(
            f"policy_kwargs must be a dictionary for all players, or a list of {n_player} "
            f"dictionaries, one per player, got {policy_kwargs!r:.100}"
        )
    return [one or {} for one in policy_kwargs]
