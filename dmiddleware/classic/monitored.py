"""Which outputs of the stock algorithms classic learners log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.policy import (
    ActorCriticPolicy,
    C51Policy,
    CQLPolicy,
    DDPGPolicy,
    DecisionTransformerPolicy,
    DiscreteSACPolicy,
    IQLPolicy,
    Policy,
    PPOPolicy,
    QLearningPolicy,
    SACPolicy,
)

__all__ = ["monitored_of"]

_ACTOR_CRITIC: Final = ("cur_lr", "total_loss", "policy_loss", "value_loss", "entropy")
_Q_LEARNING: Final = ("cur_lr", "total_loss", "q_value", "target_q_value")
_SAC: Final = ("cur_lr", "critic_loss", "policy_loss", "q_value", "entropy", "alpha")

_MONITORED: Final[Mapping[type, tuple[str, ...]]] = {
    Policy: ("cur_lr", "total_loss"),
    ActorCriticPolicy: _ACTOR_CRITIC,
    PPOPolicy: (*_ACTOR_CRITIC, "approx_kl", "clip_fraction"),
    QLearningPolicy: _Q_LEARNING,
    C51Policy: (*_Q_LEARNING, "clipped_share"),
    SACPolicy: _SAC,
    CQLPolicy: (*_SAC, "cql_gap", "cql_alpha"),
    DiscreteSACPolicy: _SAC,
    DDPGPolicy: ("cur_lr", "total_loss", "critic_loss", "actor_loss", "q_value"),
    IQLPolicy: (
        "cur_lr", "value_loss", "policy_loss", "critic_loss", "q_value", "advantage_weight",
    ),
    DecisionTransformerPolicy: ("cur_lr", "total_loss", "largest_return"),
}  # fmt: skip


def monitored_of(kind: type) -> list[str]:
    """Return the names of the outputs of a class of policies that are logged."""
    found = next((_MONITORED[base] for base in kind.__mro__ if base in _MONITORED), ())
    return list(found)
