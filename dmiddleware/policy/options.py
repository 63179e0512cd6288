"""Options and columns that several algorithms have."""

from __future__ import annotations

from typing import Any, Final

from dmiddleware.config import Option, at_least, count, fraction, optional, positive, switch
from dmiddleware.policy.policy import PolicyOptions
from dmiddleware.schedule import scheduled

__all__ = [
    "COLLECT_OPTIONS",
    "LEARNING_RATE",
    "ON_POLICY_OPTIONS",
    "TD_COLUMNS",
    "TD_OPTIONS",
    "TDOptions",
]

LEARNING_RATE: Final = scheduled(positive, reach=at_least(0))
"""The values of a learning rate: a positive number, or a schedule, which may fall to 0."""

TD_COLUMNS: Final = ("obs", "action", "reward", "next_obs", "terminated")
"""The columns of a batch that such algorithms learn from."""

TD_OPTIONS: Final[dict[str, Any]] = {
    "priority": Option(False, switch, "whether to return the TD errors as priorities"),
    "priority_IS_weight": Option(
        True,
        switch,
        "whether the importance weights of a batch weigh the loss",
        keyword=None,
    ),
    "discount_factor": Option(0.99, fraction, "γ, the discount of future rewards"),
    "nstep": Option(1, count, "number of rewards in an n-step target"),
}

COLLECT_OPTIONS: Final[dict[str, Any]] = {
    "n_sample": Option(None, optional(count), "env steps to collect at a time"),
    "n_episode": Option(None, optional(count), "episodes to collect at a time"),
}

ON_POLICY_OPTIONS: Final[dict[str, Any]] = {
    "on_policy": True,
    "discount_factor": Option(0.99, fraction, "γ, the discount of future rewards"),
    "collect": COLLECT_OPTIONS,
}


class TDOptions(PolicyOptions, total=False):
    """The options that all these algorithms have in ``for_env``."""

    priority: bool
    discount_factor: float
    nstep: int
    batch_size: int
    n_sample: int | None
    n_episode: int | None
