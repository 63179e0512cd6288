"""What the stock middleware log: names, units and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dmiddleware.policy.metrics import Metric

__all__ = ["COUNTS", "FAILURES", "MIDDLEWARE_METRICS", "TOTALS"]

FAILURES: Final = ("collect/env_restarts", "collect/dropped_steps")
"""What a collector logs when environments fail: how much was added in a step."""

COUNTS: Final = frozenset(FAILURES)
"""Metrics that a step adds to: loggers write their sums over the run, and not means."""

TOTALS: Final = frozenset(("learn/skipped_draws", "data/rows"))
"""Metrics that are totals when they are logged: loggers write the last value, and not a mean."""

_GROWTH: Final = "rises over the run"
_STEADY: Final = "steady"
_NONE: Final = "0"

MIDDLEWARE_METRICS: Final[Mapping[str, tuple[Metric, ...]]] = {
    "Collecting": (
        Metric(
            "collect/return_mean",
            "return",
            "the mean return of the episodes that ended, with exploration",
            _GROWTH,
        ),
        Metric(
            "collect/length_mean",
            "steps",
            "the mean length of these episodes",
            "rises where an episode ends by failure, falls where it ends at a goal",
        ),
        Metric(
            "collect/success_rate",
            "0 to 1",
            "the share of these episodes that reached the goal, if the environment reports "
            "`is_success` or `success` in their last info",
            _GROWTH,
        ),
        Metric("collect/eps", "0 to 1", "ε of `EpsGreedyHandler`", "follows its schedule"),
        Metric(
            FAILURES[0],
            "restarts",
            "how often environments failed and were restarted, in total over the run",
            "absent",
        ),
        Metric(
            FAILURES[1],
            "steps",
            "the steps of the episodes that these failures cut off, in total over the run",
            "absent",
        ),
    ),
    "Self-play": (
        Metric(
            "self_play/elo",
            "rating",
            "the Elo rating of the policy in games of teams against its past versions",
            _GROWTH,
        ),
        Metric(
            "self_play/version<n>_win_rate",
            "0 to 1",
            "the policy's share of wins against its n-th version, a draw as a half; 0.5 before 8 "
            "games, and older games count less",
            "above 0.5",
        ),
        Metric("self_play/version<n>_elo", "rating", "the rating of this version", _STEADY),
    ),
    "Evaluation": (
        Metric(
            "eval/return_mean",
            "return",
            "the mean return of an evaluation, without exploration",
            f"{_GROWTH}, above `collect/return_mean`",
        ),
        Metric("eval/return_std", "return", "the standard deviation of these returns", "falls"),
        Metric("eval/return_min", "return", "the lowest of these returns", _GROWTH),
        Metric("eval/return_max", "return", "the highest of these returns", _GROWTH),
        Metric("eval/length_mean", "steps", "the mean length of the episodes", "as of collecting"),
        Metric(
            "eval/success_rate",
            "0 to 1",
            "the share of episodes that reached the goal, if the environment reports it",
            _GROWTH,
        ),
        Metric(
            "<evaluator>/<value>",
            "",
            "the same values of an `InteractionEvaluator` with this name",
            "as those of `eval`",
        ),
        Metric(
            "<part>/<metric>",
            "",
            "any metric of the named part of the chain, and its `env_step` and `train_iter`",
            "as the metric",
        ),
    ),
    "Learning": (
        Metric(
            "learn/explained_variance",
            "up to 1",
            "which part of the variance of returns the values explain, once for each collected "
            "batch (`GAEEstimator`)",
            "above 0.5 after some updates; below 0, the values are worse than a constant",
        ),
        Metric(
            "learn/policy_lag",
            "updates",
            "how many updates the policy has made since it collected the rows (`OnPolicyLearner`)",
            "0 in one process; a few in a run of several",
        ),
        Metric(
            "learn/skipped_draws",
            "draws",
            "how many updates had too few rows to draw, in total over the run",
            "absent",
        ),
    ),
    "Curricula": (
        Metric(
            "<curriculum>/<value>",
            "",
            "a number that a `Curriculum` of this name has set in the envs",
            "changes as the policy learns",
        ),
    ),
    "Learned rewards": (
        Metric("reward/env", "reward", "the mean reward of the environment", _GROWTH),
        Metric(
            "reward/learned",
            "reward",
            "the mean reward of the reward model",
            "of curiosity, falls; of GAIL, levels off",
        ),
        Metric("reward/<loss>", "", "a loss of the reward model", _STEADY),
    ),
    "Speed": (
        Metric("speed/env_step_per_s", "1/s", "environment steps per second", _STEADY),
        Metric("speed/train_iter_per_s", "1/s", "updates per second", _STEADY),
        Metric("time/step_s", "s", "the duration of a step of the task (`EpochTimer`)", _STEADY),
        Metric("data/rows", "rows", "rows saved so far (`OfflineDataSaver`)", "grows"),
    ),
    "Exchange between processes": (
        Metric(
            "exchange/blocked_s",
            "s per step",
            "how long a step waited: the learner for data, a collector for the learner, an "
            "evaluator for updates",
            "near 0 on the side that is the bottleneck",
        ),
        Metric(
            "exchange/blocked_for_weights_s",
            "s per step",
            "how long a step waited for weights (`ModelExchanger`)",
            "near 0",
        ),
        Metric(
            "exchange/policy_lag",
            "updates",
            "how many updates the learner has made since a batch was collected",
            "1 to a few steps' updates; limit it by `max_policy_lag`",
        ),
        Metric(
            "exchange/node<n>_blocked_s",
            "s per step",
            "how long collector n waited for the learner; on the learner, with the batch",
            "as `exchange/blocked_s`",
        ),
        Metric(
            "exchange/node<n>_blocked_for_weights_s",
            "s per step",
            "how long collector n waited for weights",
            "near 0",
        ),
        Metric(
            "exchange/<barrier>_blocked_s",
            "s per step",
            "how long a step waited at a `Barrier` of this name",
            "near 0 at the slowest node",
        ),
    ),
    "Router, by event (only in TensorBoard)": (
        Metric("router/event/<event>/sent", "messages", "accepted for peers", "grows"),
        Metric("router/event/<event>/sent_bytes", "bytes", "their bytes", "grows"),
        Metric("router/event/<event>/received", "messages", "received from peers", "grows"),
        Metric("router/event/<event>/received_bytes", "bytes", "their bytes", "grows"),
        Metric(
            "router/event/<event>/blocked_s",
            "s",
            "how long emitters waited for room, in total",
            "grows slowly; fast growth means that a peer is too slow",
        ),
        Metric("router/event/<event>/undecodable", "messages", "could not be decoded", _NONE),
        Metric(
            "router/event/<event>/unsubscribed",
            "messages",
            "no peer had subscribed to them",
            "constant after the start",
        ),
        Metric(
            "router/event/<event>/undelivered",
            "messages",
            "dropped, because their peer had left or was gone for too long",
            _NONE,
        ),
    ),
    "Router, by peer (only in TensorBoard)": (
        Metric("router/node<n>/connected", "0 or 1", "whether the peer is connected", "1"),
        Metric("router/node<n>/waiting", "messages", "not acknowledged yet", "small"),
        Metric("router/node<n>/waiting_bytes", "bytes", "their bytes", "small"),
        Metric("router/node<n>/sent_frames", "frames", "sent, also those sent again", "grows"),
        Metric(
            "router/node<n>/resent_frames",
            "frames",
            "with reliable messages, sent again",
            "0, or a few after a failure",
        ),
        Metric("router/node<n>/received_frames", "frames", "received", "grows"),
        Metric("router/node<n>/sent_bytes", "bytes", "sent", "grows"),
        Metric("router/node<n>/received_bytes", "bytes", "received", "grows"),
        Metric("router/node<n>/dropped", "messages", "lossy ones that were dropped", "near 0"),
    ),
}
"""The metrics of the stock middleware, by group; ``<…>`` in a name stands for any text."""
