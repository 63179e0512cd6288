"""What the stock algorithms log of their updates: names, units and meanings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["LEARNING_METRICS", "Metric", "metrics_table"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric.

    Attributes:
        name: its name; ``<…>`` stands for any text.
        unit: its unit; empty: it has none.
        meaning: what it is.
        healthy: what to expect while training goes well.
    """

    name: str
    unit: str
    meaning: str
    healthy: str


_RETURN: Final = "return"
_SETTING: Final = "follows its schedule"

_METRICS: Final = (
    Metric(
        "total_loss",
        "",
        "the loss, or the sum of the losses, of an update",
        "finite; its size says little, because the targets move",
    ),
    Metric(
        "policy_loss",
        "",
        "the loss of the actor",
        "small for on-policy algorithms; otherwise about minus the values of its actions",
    ),
    Metric(
        "actor_loss",
        _RETURN,
        "the loss of the actor; only in updates that move it",
        "about minus `q_value`, and falls",
    ),
    Metric(
        "critic_loss",
        "return²",
        "the loss of the critics, the sum of their squared errors",
        "rises while returns grow, then levels off",
    ),
    Metric(
        "value_loss",
        "return²",
        "the loss of the state values; with `value_norm` in units of their deviation",
        "rises while returns grow, then falls",
    ),
    Metric(
        "q_value",
        _RETURN,
        "the mean value of the actions learned from",
        "near the discounted return of an episode; growth without bound is divergence",
    ),
    Metric("target_q_value", _RETURN, "the mean target of these values", "close to `q_value`"),
    Metric(
        "td_error",
        _RETURN,
        "the mean absolute difference between values and targets",
        "small against `q_value`",
    ),
    Metric(
        "clipped_share",
        "0 to 1",
        "the share of the target's probability that is outside of `v_min` to `v_max`",
        "near 0; above 0.05 a warning is logged",
    ),
    Metric(
        "n_step_loss",
        "return²",
        "the loss of the n-step targets of DQfD",
        "as `total_loss`",
    ),
    Metric(
        "margin_loss",
        _RETURN,
        "by how much the values of other actions, plus `margin`, exceed those demonstrated",
        "falls towards 0",
    ),
    Metric(
        "munchausen_bonus",
        _RETURN,
        "the mean of what Munchausen DQN adds to rewards, the scaled log-policy of the actions",
        "from minus `munchausen_weight` times `munchausen_clip` to 0; rises",
    ),
    Metric(
        "fraction_entropy",
        "nat",
        "the mean entropy of the widths that FQF proposes",
        "starts at the logarithm of `model.n_quantiles`; near 0, lower `learning_rate_fraction`",
    ),
    Metric(
        "entropy",
        "nat",
        "the mean entropy of the policy; of SAC, minus the log-density of its actions",
        "falls slowly; of SAC, stays at the target entropy",
    ),
    Metric(
        "alpha",
        "return / nat",
        "SAC's temperature, the weight of the entropy",
        "falls, then levels off",
    ),
    Metric(
        "approx_kl",
        "nat",
        "how far the policy has moved from the one that collected: mean(r - 1 - log r) of the "
        "probability ratios r",
        "0.003 to 0.03; more means that steps are too large",
    ),
    Metric(
        "clip_fraction",
        "0 to 1",
        "the share of rows whose ratio is outside of the clip range",
        "0.05 to 0.3",
    ),
    Metric(
        "kl_stop",
        "0 or 1",
        "whether `target_kl` has stopped the epochs; such an output is not an update",
        "mostly 0",
    ),
    Metric(
        "aux_loss",
        "return²",
        "the loss of the auxiliary value on the actor's features; only with an auxiliary phase",
        "falls towards `value_loss`",
    ),
    Metric(
        "clone_kl",
        "nat",
        "the mean divergence from the policy before the auxiliary phase; only with such a phase",
        "below 0.01; more, raise `aux_bc_weight`",
    ),
    Metric(
        "central_loss",
        "return²",
        "the loss of weighted QMIX's central network, the mean squared error of its values",
        "below `total_loss` divided by the mean weight, where the mixture restricts the values",
    ),
    Metric("clip_ratio", "", "the present clip range, the setting `clip_ratio`", _SETTING),
    Metric(
        "entropy_weight",
        "",
        "the present weight of the entropy, the setting `entropy_weight`",
        _SETTING,
    ),
    Metric(
        "grad_norm",
        "",
        "the norm of the gradient before clipping; only with `grad_clip_norm`",
        "mostly below `grad_clip_norm`, or steady",
    ),
    Metric("cur_lr", "", "the learning rate of the first optimizer", _SETTING),
    Metric(
        "cql_gap",
        _RETURN,
        "how far values of all actions exceed those of the data",
        "falls, often below 0; with `lagrange_gap`, towards it",
    ),
    Metric("cql_alpha", "", "the weight of CQL's penalty", "constant; with `lagrange_gap`, tuned"),
    Metric(
        "gradient_similarity",
        "",
        "how much EDAC's critics agree on how a better action differs: the mean cosine of their "
        "gradients, summed over the critics",
        "falls, below the number of critics",
    ),
    Metric(
        "vae_loss",
        "",
        "the loss of BCQ's autoencoder: the squared error of actions, and half of the divergence",
        "falls, then levels off",
    ),
    Metric(
        "advantage",
        _RETURN,
        "the mean advantage of the actions in the data",
        "slightly below 0, and steady",
    ),
    Metric(
        "advantage_weight",
        "",
        "the mean weight of the actions that IQL clones",
        "around 1; near `max_advantage_weight`, lower `inverse_temperature`",
    ),
    Metric(
        "accuracy",
        "0 to 1",
        "the share of rows whose choices are those of the data; not of continuous actions",
        "rises",
    ),
    Metric(
        "largest_return",
        _RETURN,
        "the largest return of an episode in the data, which acting asks for",
        "constant after the first pass over the data",
    ),
)

LEARNING_METRICS: Final[Mapping[str, Metric]] = {one.name: one for one in _METRICS}
"""What a stock policy may put into the output of an update, by name.

The attribute :attr:`Policy.reports` of a class has the names that are its own.
"""


def metrics_table(metrics: Iterable[Metric], *, prefix: str = "") -> str:
    """Return a table in Markdown, one row for each metric.

    Args:
        metrics: the metrics.
        prefix: what their names begin with, such as ``"learn/"``.
    """
    head = "| name | unit | meaning | healthy |\n| --- | --- | --- | --- |"
    rows = (
        f"| `{prefix}{metric.name}` | {metric.unit} | {metric.meaning} | {metric.healthy} |"
        for metric in metrics
    )
    return "\n".join((head, *rows))
