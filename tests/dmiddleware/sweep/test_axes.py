"""The settings that a sweep varies: names, values, and the folders of their runs."""

from __future__ import annotations

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.sweep.axes import Choices, Span, folder_name, grid, option_words, read_axes

OPTIONS = {
    "seed": False,
    "policy.learning_rate": False,
    "policy.compile": True,
    "policy.eps": False,
    "learner.batch_size": False,
    "buffer.batch_size": False,
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0:3", Choices(("0", "1", "2"), 0)),
        ("seed=-1:1", Choices(("-1", "0"), -1)),
        ("seed=7", Choices(("7",))),
        ("learning_rate=1e-4, 3e-4", Choices(("1e-4", "3e-4"))),
        ("learning_rate=log:1e-5:1e-2", Span(1e-5, 1e-2, "log")),
        ("learning_rate=0.9:0.99", Span(0.9, 0.99, "linear")),
        ("eps=linear(1, 0, 1e5),0.1", Choices(("linear(1, 0, 1e5)", "0.1"))),
    ],
)
def test_values_are_a_list_a_range_of_integers_or_a_span(text: str, values: Choices | Span) -> None:
    (axis,) = read_axes([text], OPTIONS)
    assert axis.values == values


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("policy.learning_rate", "policy.learning_rate"),
        ("policy.learning-rate", "policy.learning_rate"),
        ("learning_rate", "policy.learning_rate"),
        ("learner.batch_size", "learner.batch_size"),
    ],
)
def test_the_last_part_of_a_name_is_enough_if_it_is_unique(name: str, option: str) -> None:
    assert read_axes([f"{name}=1"], OPTIONS)[0].option == option


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["lerning_rate=1"], "did you mean learning_rate"),
        (["policy.learning_rat=1"], "did you mean policy.learning_rate"),
        (["batch_size=1"], "name one of learner.batch_size, buffer.batch_size"),
        (["learning_rate=1", "policy.learning_rate=2"], "is set twice"),
        (["seed=1,1"], "given twice"),
        (["seed=1,,2"], "empty"),
        (["seed=3:3"], "the range is empty"),
        (["learning_rate=log:0:1"], "0 < LOW"),
        (["learning_rate=0.5:0.1"], "LOW:HIGH"),
        (["seed"], "NAME=VALUES"),
        (["seed="], "NAME=VALUES"),
    ],
)
def test_what_has_no_meaning_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_axes(texts, OPTIONS)


def test_a_grid_has_all_combinations_and_the_last_option_changes_fastest() -> None:
    axes = read_axes(["learning_rate=1e-4,3e-4", "seed=0:2"], OPTIONS)
    assert [tuple(values.values()) for values in grid(axes)] == [
        ("1e-4", "0"),
        ("1e-4", "1"),
        ("3e-4", "0"),
        ("3e-4", "1"),
    ]


def test_a_grid_has_no_span() -> None:
    with pytest.raises(ConfigError, match="--sampler optuna"):
        grid(read_axes(["learning_rate=log:1e-5:1e-2"], OPTIONS))


def test_values_are_the_arguments_of_a_program() -> None:
    axes = read_axes(["learning_rate=1e-4", "compile=true,False"], OPTIONS)
    on, off = grid(axes)
    assert option_words(axes, on) == ["--policy.learning-rate", "1e-4", "--policy.compile"]
    assert option_words(axes, off)[2:] == ["--policy.no-compile"]
    with pytest.raises(ConfigError, match="must be true or false, got '2'"):
        option_words(axes, {**on, "policy.compile": "2"})


def test_a_folder_is_named_after_the_values() -> None:
    values = {"policy.learning_rate": "1e-4", "env.id": "ALE/Pong-v5", "seed": "-1"}
    assert folder_name(values) == "learning_rate-1e-4_id-ALE-Pong-v5_seed-1"
    both = {"learner.batch_size": "1", "buffer.batch_size": "2"}
    assert folder_name(both) == "learner.batch_size-1_buffer.batch_size-2"


def test_long_names_are_cut_and_stay_different() -> None:
    one, other = (folder_name({"env.id": "x" * 200 + end}) for end in "ab")
    assert one != other
    assert max(len(one), len(other)) < 140
