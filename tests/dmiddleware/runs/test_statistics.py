"""Statistics of a few runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.runs.statistics import (
    MOST_RUNS,
    detectable_difference,
    difference_of_means,
    interquartile_mean,
    interval_of,
    last_tenth,
    least_visible_difference,
    mean_score,
    performance_profile,
    probability_of_improvement,
    runs_to_detect,
)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    scores = np.array([1000.0, 2, 3, 4, 5, 6, 7, -1000])
    assert interquartile_mean([scores]) == np.mean([3, 4, 5, 6])
    assert interquartile_mean([scores[:4], scores[4:]]) == np.mean([3, 4, 5, 6])


def test_the_mean_score_weighs_tasks_alike() -> None:
    assert mean_score([np.array([0.0, 2, 4]), np.array([10.0])]) == 6


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    n_covered = 0
    for trial in range(200):
        scores = rng.normal(5.0, 2.0, 20)
        found = interval_of(mean_score, [scores], confidence=0.9, n_resamples=300, seed=trial)
        assert found.low <= found.value <= found.high
        n_covered += found.low <= 5.0 <= found.high
    assert 0.83 <= n_covered / 200 <= 0.95


def test_the_runs_of_each_task_are_drawn_separately() -> None:
    # Drawn together, the mean of two far tasks would vary by hundreds.
    near = [np.array([0.0, 1.0, 2.0]), np.array([1000.0, 1001.0, 1002.0])]
    found = interval_of(mean_score, near)
    assert found.value == 501
    assert 500 <= found.low < found.high <= 502


def test_a_task_with_one_run_adds_no_spread() -> None:
    found = interval_of(mean_score, [np.array([1.0]), np.array([2.0, 4.0])])
    assert found.value == 2
    assert 1.5 <= found.low < found.high <= 2.5
    alone = interval_of(mean_score, [np.array([1.0]), np.array([3.0])])
    assert alone.value == 2 and np.isnan([alone.low, alone.high]).all()


def test_the_same_seed_gives_the_same_interval() -> None:
    scores = [np.random.default_rng(1).normal(size=8)]
    assert interval_of(interquartile_mean, scores) == interval_of(interquartile_mean, scores)
    assert interval_of(interquartile_mean, scores, seed=1) != interval_of(
        interquartile_mean, scores
    )


def test_the_probability_of_improvement_is_the_share_of_pairs_with_ties_as_half() -> None:
    from scipy.stats import mannwhitneyu

    mine, theirs = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.0])
    found = probability_of_improvement([mine], [theirs])
    assert found.value == pytest.approx(mannwhitneyu(mine, theirs).statistic / 6)
    assert probability_of_improvement([mine, mine], [theirs, mine]).value == pytest.approx(
        (4.5 / 6 + 0.5) / 2
    )
    assert probability_of_improvement([[9, 8]], [[1, 2, 3]]) == (1, 1, 1)


def test_the_profile_is_the_share_of_runs_above_each_threshold() -> None:
    profile = performance_profile([[1, 2, 3, 4], [10]], [0, 2, 5, 20])
    assert profile.tolist() == [1, 0.75, 0.5, 0]


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        ([], "one array"),
        ([[]], "one array"),
        ([[1.0], 2.0], "one array"),
        ([[[1.0]]], "one array"),
        ([[1.0], [np.nan, 1.0]], "task 1 must be finite"),
        ([[np.inf]], "task 0 must be finite"),
    ],
)
def test_scores_that_cannot_be_used_are_refused(scores: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        interval_of(mean_score, scores)
    with pytest.raises(ConfigError, match=problem):
        performance_profile(scores, [0.0])


def test_sides_with_different_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same tasks: one side has 1, the other 2"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize(("n", "n_last"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_last_tenth_is_rounded_up(n: int, n_last: int) -> None:
    values = np.arange(n, dtype=np.float64) ** 2
    assert last_tenth(values) == values[-n_last:].mean()


def test_the_difference_of_means_is_that_of_all_runs_with_its_interval() -> None:
    found = difference_of_means([4.0, 5.0, 6.0], [1.0, 3.0])
    assert found.value == 3.0
    assert 1.0 <= found.low < 2.0 and 4.0 < found.high <= 5.0
    one = difference_of_means([4.0], [1.0])
    assert one.value == 3.0 and np.isnan(one.low)


def test_the_least_visible_difference_is_half_the_width_of_welchs_interval() -> None:
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(0)
    scores, others = rng.normal(5.0, 2.0, 4), rng.normal(5.0, 1.0, 7)
    interval = ttest_ind(scores, others, equal_var=False).confidence_interval()
    found = least_visible_difference(scores, others)
    assert found == pytest.approx((interval.high - interval.low) / 2)
    assert least_visible_difference([1.0], others) == np.inf
    assert least_visible_difference([500.0, 500.0], [500.0, 500.0]) == 0.0


def test_equal_learners_with_three_runs_are_told_apart_in_a_twentieth_of_the_cases() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.normal(size=(1000, 2, 3))
    n_seen = sum(
        abs(ours.mean() - theirs.mean()) > least_visible_difference(ours, theirs)
        for ours, theirs in pairs
    )
    assert 0.02 <= n_seen / 1000 <= 0.06


@pytest.mark.parametrize("difference", [0.8, 1.5, 3.0])
def test_as_many_runs_as_are_named_show_the_difference_four_times_in_five(
    difference: float,
) -> None:
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(0)
    scores = np.array([-1.0, 0.0, 1.0])  # of variance 1
    n = runs_to_detect(scores + difference, scores)
    assert n is not None and n > 2

    def share_shown(n: int) -> float:
        sides = rng.normal(difference, 1.0, (4000, n)), rng.normal(0.0, 1.0, (4000, n))
        return float((ttest_ind(*sides, axis=1, equal_var=False).pvalue < 0.05).mean())

    assert share_shown(n) > 0.77 and share_shown(n - 1) < 0.83


def test_the_detectable_difference_is_that_for_which_the_runs_suffice() -> None:
    rng = np.random.default_rng(0)
    sides = rng.normal(0.0, 3.0, 12), rng.normal(0.0, 3.0, 12)
    sides = tuple(side - side.mean() for side in sides)
    least = detectable_difference(*sides)
    assert least > least_visible_difference(*sides)
    assert runs_to_detect(sides[0] + least * 1.001, sides[1]) == 12
    assert runs_to_detect(sides[0] + least * 0.98, sides[1]) == 13


def test_there_is_no_number_of_runs_without_a_difference_or_a_spread() -> None:
    assert runs_to_detect([1.0, 2.0], [1.5, 1.5]) is None
    assert runs_to_detect([1.0], [2.0, 3.0]) is None
    assert detectable_difference([1.0], [2.0, 3.0]) == np.inf
    assert runs_to_detect([500.0, 500.0], [9.0, 9.0]) == 2
    assert detectable_difference([500.0, 500.0], [9.0, 9.0]) == 0.0
    assert runs_to_detect([0.0, 1.0], [1e-9, 1.0]) == MOST_RUNS
