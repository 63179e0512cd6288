from __future__ import annotations

import pytest

from dmiddleware.worker.learner import MovingAverages


def test_means_are_over_the_window_and_other_names_are_ignored():
    averages = MovingAverages(["loss", "lr"], window=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        averages.update({"loss": value, "other": 9.0})
    assert averages.mean("loss") == 3.0
    assert averages.latest("loss") == 4.0
    assert averages.means() == {"loss": 3.0}
    assert averages.names == ("loss", "lr")


def test_a_name_without_values_has_no_mean():
    averages = MovingAverages(["loss"], window=3)
    for ask in (averages.mean, averages.latest):
        with pytest.raises(ValueError, match="no value yet"):
            ask("loss")
        with pytest.raises(KeyError):
            ask("unknown")


def test_an_empty_window_is_rejected():
    with pytest.raises(ValueError, match="positive"):
        MovingAverages(["loss"], window=0)
