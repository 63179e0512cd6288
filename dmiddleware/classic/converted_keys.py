"""Settings of DI-engine's algorithms whose values stand for other ones here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["CONVERSIONS", "REFUSED_VALUES", "Conversion"]


class Conversion(NamedTuple):
    """How a setting becomes one that an algorithm has here.

    Attributes:
        old: its path in DI-engine.
        new: the path here; an algorithm that does not have it is not concerned.
        convert: returns the value here, from the value there and the config; None: it is the same.
    """

    old: str
    new: str
    convert: Callable[[Any, Mapping[str, Any]], Any] = lambda value, cfg: value


def _gap(threshold: float, cfg: Mapping[str, Any]) -> float | None:
    """Return what the tuned weight of CQL's penalty aims at; None: it is not tuned."""
    learn = cfg.get("learn", {})
    if not learn.get("with_lagrange", False) or threshold <= 0:
        return None
    n_actions = int(learn.get("num_actions", 10))
    return float(threshold / learn.get("min_q_weight", 1.0) - math.log(3 * n_actions))


CONVERSIONS: Final = (
    # IQL divides an advantage by β, and one optimizer is for critics and state value.
    Conversion("learn.beta", "learn.inverse_temperature", lambda value, cfg: 1.0 / value),
    Conversion("learn.beta", "learn.max_advantage_weight", lambda value, cfg: 20.0),
    Conversion("learn.tau", "learn.expectile"),
    Conversion("learn.learning_rate_q", "learn.learning_rate_value"),
    Conversion("learn.learning_rate_q", "learn.learning_rate_critic"),
    Conversion("learn.learning_rate_policy", "learn.learning_rate_actor"),
    # CQL's squared error is halved here, and its penalty is a mean over the actions.
    Conversion("learn.lagrange_thresh", "learn.lagrange_gap", _gap),
    Conversion("learn.min_q_weight", "learn.cql_alpha", lambda value, cfg: value / 2),
)
"""Settings with other values here, those that need others of the config first."""

_USE_RAINBOW: Final = "use the algorithm rainbow, which has noisy layers"

REFUSED_VALUES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "noisy_net": ((False, None), _USE_RAINBOW),
    "learn.pretrained_model_path": (
        (None, ""),
        "no algorithm here stays close to a pretrained policy; leave it out, with kl_beta",
    ),
    "learn.betas": ((), "Adam has its standard betas here; leave it out, and set learn.optimizer"),
}
"""Settings that no algorithm here has: the values that change nothing, and what to do otherwise."""
