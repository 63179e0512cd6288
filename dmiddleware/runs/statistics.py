"""Statistics of a few runs: point estimates with bootstrap confidence intervals.

Scores are given as a list of arrays, one for each task (such as an environment), with one score for
each run (seed) in it. Tasks may have different numbers of runs. The bootstrap resamples the runs of
each task separately (stratified).

Percentile intervals of few runs are too narrow. If scores are normal, the 95% interval of a mean
covers it in 75% of the cases with 3 runs, 87% with 7, and 90% with 10; that of a difference in 81%,
90% and 92%.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.errors import ConfigError

__all__ = [
    "MOST_RUNS",
    "Estimate",
    "Floats",
    "detectable_difference",
    "difference_of_means",
    "interquartile_mean",
    "interval_of",
    "is_number",
    "last_tenth",
    "least_visible_difference",
    "mean_score",
    "median_score",
    "performance_profile",
    "probability_of_improvement",
    "runs_to_detect",
    "short",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Scores: TypeAlias = Sequence[npt.ArrayLike]

RESAMPLES: Final = 2000
POWER: Final = 0.8
"""The probability with which a difference is to be shown, by the usual convention."""
MOST_RUNS: Final = 10_000
"""The highest number of runs that is told."""


class Estimate(NamedTuple):
    """A statistic with its confidence interval.

    Attributes:
        value: the statistic of the scores.
        low: the lower end of the interval; NaN where a single run shows no spread.
        high: the upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not np.isfinite(self.low):
            return short(self.value)
        return f"{short(self.value)} [{short(self.low)}, {short(self.high)}]"


def short(value: float) -> str:
    """Return a number in four digits, or as an integer of five digits or more."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def last_tenth(values: npt.ArrayLike) -> float:
    """Return the mean of the last tenth of the evaluations of a run: its score.

    Args:
        values: ``[N]``, at least one; the tenth is rounded up to whole values.
    """
    scores = np.asarray(values, np.float64)
    return float(scores[-max(1, -(-len(scores) // 10)) :].mean())


def is_number(text: str) -> bool:
    """Return whether the text of a cell begins as a number."""
    return text[:1] in tuple("(-0123456789")


def interquartile_mean(tasks: list[Floats]) -> Floats:
    """Return the mean of the scores of all tasks without the lowest and the highest quarter.

    As in the paper, the quarters are rounded down: of three scores, all count.

    Args:
        tasks: one array ``[…, n_runs]`` for each task.

    Returns:
        ``[…] float64``.
    """
    from scipy.stats import trim_mean  # takes half a second to import

    mean: Floats = trim_mean(np.concatenate(tasks, axis=-1), 0.25, axis=-1)
    return mean


def interval_of(
    statistic: Callable[[list[Floats]], Floats],
    scores: Scores,
    *,
    confidence: float = 0.95,
    n_resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Return a statistic with its percentile-bootstrap interval.

    Args:
        statistic: takes one array ``[…, n_runs]`` for each task, returns ``[…]``.
        scores: one array for each task.
        confidence: the probability that the interval covers.
        n_resamples: how many times the runs are drawn again.
        seed: of these draws.

    Raises:
        ConfigError: if there are no scores, or one is not finite.
    """
    tasks = _checked(scores)
    value = float(statistic(tasks))
    if max(map(len, tasks)) < 2:
        return Estimate(value, np.nan, np.nan)
    from scipy.stats import bootstrap

    # bootstrap() wants at least two scores a sample; a task with one run has no spread.
    spread = [at for at, task in enumerate(tasks) if len(task) > 1]

    def resampled(*drawn: Floats, axis: int) -> Floats:
        lead = drawn[0].shape[:-1]
        again = [np.broadcast_to(task, (*lead, len(task))) for task in tasks]
        for at, task in zip(spread, drawn, strict=True):
            again[at] = task
        return statistic(again)

    interval: Any = bootstrap(
        [tasks[at] for at in spread],
        resampled,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=n_resamples,
        batch=200,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Estimate(
        value, float(interval.confidence_interval.low), float(interval.confidence_interval.high)
    )


def mean_score(tasks: list[Floats]) -> Floats:
    """Return the mean over tasks of the mean over runs; a statistic for :func:`interval_of`."""
    mean: Floats = np.mean([task.mean(-1) for task in tasks], axis=0)
    return mean


def median_score(tasks: list[Floats]) -> Floats:
    """Return the median of the runs of one task; a statistic for :func:`interval_of`."""
    (runs,) = tasks
    median: Floats = np.median(runs, -1)
    return median


def difference_of_means(scores: npt.ArrayLike, others: npt.ArrayLike) -> Estimate:
    """Return how much higher the mean of the scores is than that of others, in one task.

    Args:
        scores: ``[n_runs]``.
        others: ``[n_others]``.

    Raises:
        ConfigError: if a side has no score, or one is not finite.
    """

    def statistic(sides: list[Floats]) -> Floats:
        more: Floats = sides[0].mean(-1) - sides[1].mean(-1)
        return more

    return interval_of(statistic, [scores, others])


def least_visible_difference(scores: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the least difference of two means that these runs can tell from luck.

    It is half the width of Welch's 95% interval, which, unlike a bootstrap, is right for few runs
    if the scores are normal.

    Args:
        scores: ``[n_runs]``.
        others: ``[n_others]``.

    Returns:
        The difference; infinity if a side has a single run, which shows no spread.

    Raises:
        ConfigError: if a side has no score, or one is not finite.
    """
    return _welch_multiple(scores, others, [0.975])


def detectable_difference(scores: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the least true difference of two means that as many runs show with probability 0.8.

    A difference is shown if it lies outside Welch's 95% interval around 0, that is, if it is above
    :func:`least_visible_difference`. One that is just as large is above it in half of the
    experiments only. The power is that of a t-test of normal scores with the variances that these
    runs have: the sum of the 97.5% and the 80% quantile of t, times the standard error.

    Args:
        scores: ``[n_runs]``.
        others: ``[n_others]``.

    Returns:
        The difference; infinity if a side has a single run, which shows no spread.

    Raises:
        ConfigError: if a side has no score, or one is not finite.
    """
    return _welch_multiple(scores, others, [0.975, POWER])


def _welch_multiple(
    scores: npt.ArrayLike, others: npt.ArrayLike, quantiles: Sequence[float]
) -> float:
    """Return the sum of quantiles of t, times the standard error of a difference of means."""
    from scipy.stats import t

    sides = _checked([scores, others])
    counts = np.array([len(side) for side in sides])
    if counts.min() < 2:
        return np.inf
    squares = np.array([side.var(ddof=1) for side in sides]) / counts
    if not squares.any():
        return 0.0
    freedom = squares.sum() ** 2 / (squares**2 / (counts - 1)).sum()
    return float(t.ppf(quantiles, freedom).sum() * np.sqrt(squares.sum()))


def runs_to_detect(scores: npt.ArrayLike, others: npt.ArrayLike) -> int | None:
    """Return how many runs a side would show the difference that is seen, with probability 0.8.

    It is the least number for which :func:`detectable_difference` is not larger, if both sides had
    so many runs, with the variances and the difference of means that these runs have.

    Args:
        scores: ``[n_runs]``.
        others: ``[n_others]``.

    Returns:
        The number, at most 10,000; None: there is no difference, or a side has a single run.

    Raises:
        ConfigError: if a side has no score, or one is not finite.
    """
    from scipy.stats import t

    sides = _checked([scores, others])
    difference = abs(sides[0].mean() - sides[1].mean())
    if min(map(len, sides)) < 2 or not difference:
        return None
    variances = np.array([side.var(ddof=1) for side in sides])
    if not variances.any():
        return 2
    n = np.arange(2, MOST_RUNS + 1)
    freedom = (n - 1) * variances.sum() ** 2 / (variances**2).sum()
    quantiles = t.ppf(0.975, freedom) + t.ppf(POWER, freedom)
    detectable = quantiles * np.sqrt(variances.sum() / n)
    return int(n[min(np.searchsorted(-detectable, -difference), len(n) - 1)])


def probability_of_improvement(scores: Scores, others: Scores) -> Estimate:
    """Return the probability that a run of one side scores higher than one of the other side.

    It is the mean over tasks of the Mann-Whitney statistic: the share of pairs of runs in which the
    first is higher, where a tie counts as half.

    Args:
        scores: one array for each task.
        others: the same tasks of the other side.

    Returns:
        The probability, with its 95% interval.

    Raises:
        ConfigError: if the sides have different numbers of tasks, or a score is not finite.
    """
    if len(scores) != len(others):
        raise ConfigError(
            f"compare the same tasks: one side has {len(scores)}, the other {len(others)}"
        )
    n_tasks = len(scores)

    def statistic(tasks: list[Floats]) -> Floats:
        shares = []
        for mine, theirs in zip(tasks[:n_tasks], tasks[n_tasks:], strict=True):
            more = mine[..., :, None] - theirs[..., None, :]
            shares.append((np.sign(more).mean((-2, -1)) + 1) / 2)
        mean: Floats = np.mean(shares, axis=0)
        return mean

    return interval_of(statistic, [*scores, *others])


def performance_profile(scores: Scores, thresholds: npt.ArrayLike) -> Floats:
    """Return the share of runs above each threshold, averaged over tasks.

    Args:
        scores: one array for each task.
        thresholds: ``[K]``.

    Returns:
        ``[K] float64``.

    Raises:
        ConfigError: if there are no scores, or one is not finite.
    """
    at = np.asarray(thresholds, np.float64)
    above: Floats = np.mean([(task[:, None] > at).mean(0) for task in _checked(scores)], axis=0)
    return above


def _checked(scores: Scores) -> list[Floats]:
    tasks = [np.asarray(task, np.float64) for task in scores]
    if not tasks or any(task.ndim != 1 or not len(task) for task in tasks):
        shapes = [task.shape for task in tasks]
        raise ConfigError(f"pass one array [n_runs] of scores for each task, got shapes {shapes}")
    for number, task in enumerate(tasks):
        if not np.isfinite(task).all():
            raise ConfigError(f"the scores of task {number} must be finite, got {task.tolist()}")
    return tasks
