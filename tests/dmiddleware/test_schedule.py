import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.errors import ConfigError
from dmiddleware.rl import Counters, Schedule
from dmiddleware.settings import plain_values

FINITE = st.floats(-1e6, 1e6)
TYPES = ("linear", "exponential", "cosine")


def values(schedule, *counts):
    return [schedule(count) for count in counts]


def test_a_constant_never_changes():
    assert values(Schedule.constant(0.3), 0, 10**9) == [0.3, 0.3]


def test_a_linear_schedule_goes_straight_and_stays():
    schedule = Schedule.linear(1.0, 0.05, decay=100)
    assert values(schedule, 0, 50, 100, 10**9) == [1.0, 0.525, 0.05, 0.05]


def test_an_exponential_schedule_has_1_over_e_of_the_way_left_after_decay():
    schedule = Schedule.exponential(1.0, 0.1, decay=100)
    assert values(schedule, 0, 100, 10**9) == pytest.approx([1.0, 0.1 + 0.9 / math.e, 0.1])


def test_a_cosine_schedule_is_half_a_period():
    schedule = Schedule.cosine(1.0, 0.0, decay=4)
    expected = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert values(schedule, *range(5)) == pytest.approx(expected)
    assert values(schedule, 4, 100) == [0.0, 0.0]


def test_a_piecewise_schedule_connects_its_points():
    schedule = Schedule.piecewise([(10, 1.0), (20, 0.5), (20, 0.2), (40, 0.0)])
    assert values(schedule, 0, 10, 15, 19.99) == pytest.approx([1.0, 1.0, 0.75, 0.5], abs=1e-3)
    assert values(schedule, 20, 30, 40, 99) == pytest.approx([0.2, 0.1, 0.0, 0.0])


@given(
    start=FINITE,
    end=FINITE,
    decay=st.floats(1e-3, 1e6),
    counts=st.lists(st.floats(-10, 1e7), min_size=2, max_size=5),
    kind=st.sampled_from(TYPES),
)
def test_every_schedule_moves_from_start_to_end_without_turning(start, end, decay, counts, kind):
    schedule = Schedule(kind, start, end, decay)
    low, high = schedule.bounds
    slack = 1e-9 * (1 + abs(start) + abs(end))
    seen = values(schedule, *sorted(counts))
    assert all(low - slack <= value <= high + slack for value in seen)
    for before, after in itertools.pairwise(seen):
        assert (after - before) * (end - start) >= -slack * (1 + abs(end - start))
    assert schedule(-5) == schedule(0) == pytest.approx(start, rel=1e-9, abs=slack)


@pytest.mark.parametrize("by", ["env_step", "update", "progress"])
def test_a_schedule_reads_its_own_counter(by):
    schedule = Schedule.linear(1.0, 0.0, by=by)
    others = dict.fromkeys(("env_step", "update", "progress"), 1.0)
    assert schedule.at(Counters(**{**others, by: 0.25})) == 0.75


def test_a_counter_that_nobody_counts_is_an_error():
    with pytest.raises(ConfigError, match="by progress needs that counter"):
        Schedule.linear(1.0, 0.0, by="progress").at(Counters(env_step=3, update=1))
    assert Schedule.constant(2.0).at(Counters()) == 2.0


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.constant(0.5),
        Schedule.linear(1.0, 0.0, decay=7, by="update"),
        Schedule.exponential(1.0, 0.2, decay=7),
        Schedule.cosine(1.0, 0.2, by="progress"),
        Schedule.piecewise([(0, 1.0), (5, 0.1)], by="update"),
    ],
    ids=lambda one: one.type,
)
def test_a_schedule_is_rebuilt_from_the_config_that_it_is_saved_as(schedule):
    saved = plain_values({"learning_rate": schedule})["learning_rate"]
    assert type(saved) is dict
    assert Schedule.of(saved) == schedule
    assert Schedule.of(schedule) is schedule


def test_a_number_is_a_constant_and_a_dictionary_is_linear_by_default():
    assert Schedule.of(0.5) == Schedule.constant(0.5)
    short = {"start": 1.0, "end": 0.5, "decay": 10}
    assert Schedule.of(short) == Schedule.linear(1.0, 0.5, decay=10)
    assert Schedule.of({**short, "type": "exp"}) == Schedule.exponential(1.0, 0.5, decay=10)
    assert Schedule.of({"type": "constant", "start": 0.5, "end": 0.1}) == Schedule.constant(0.5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"start": 1.0}, "needs start and end"),
        ({"start": 1.0, "end": 0.0, "decay": 0}, "decay must be positive, got 0"),
        ({"start": 1.0, "end": math.inf}, "end must be a finite number, got inf"),
        ({"start": True, "end": 0.0}, "start must be a finite number, got True"),
        ({"start": 1.0, "end": 0.0, "decays": 3}, "'decays'; did you mean: decay"),
        ({"start": 1.0, "end": 0.0, "type": "square"}, "type must be one of .* got 'square'"),
        ({"start": 1.0, "end": 0.0, "by": "epoch"}, "by must be one of .* got 'epoch'"),
        ({"start": 1.0, "end": 0.0, "points": [(0, 1.0)]}, "only a piecewise schedule"),
        ({"type": "piecewise"}, "at least one point"),
        ({"type": "piecewise", "points": [(3, 1.0), (2, 0.5)]}, "in order"),
        ({"type": "piecewise", "points": [(3, 1.0, 2.0)]}, r"pair \(count, value\)"),
        ({"type": "piecewise", "points": ["ab"]}, r"pair \(count, value\)"),
        ("fast", "start must be a finite number, got 'fast'"),
    ],
)
def test_what_is_no_schedule_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        Schedule.of(setting)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("linear(1e-3, 0, 1000)", Schedule.linear(1e-3, 0, decay=1000)),
        (" cosine(1, 0.5, by=progress) ", Schedule.cosine(1, 0.5, by="progress")),
        ("exponential(1, end=0, decay=1e4)", Schedule.exponential(1, 0, decay=1e4)),
        ("constant(-3)", Schedule.constant(-3)),
        ("piecewise([(0, 1), (9, 0.1)])", Schedule.piecewise([(0, 1), (9, 0.1)])),
    ],
)
def test_a_schedule_is_read_from_text_and_written_as_text(text, schedule):
    assert Schedule.parse(text) == schedule
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("line(1, 0)", "linear, exponential, cosine"),
        ("linear(1, 0", "must be like linear"),
        ("linear", "must be like linear"),
        ("1e-3", "must be like linear"),
        ("linear(1, 0, 2, by, 5)", "must be like linear"),
        ("linear(1, 0, 2, 'hour')", "a schedule's by must be one of"),
        ("linear(1)", "needs start and end"),
        ("linear(1, 0, dcay=2)", "did you mean: decay"),
        ("linear(print(), 0)", "must be like linear"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Schedule.parse(text)
