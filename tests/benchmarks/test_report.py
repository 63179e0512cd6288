"""The benchmarks' own arithmetic: turns, ratios, bars and the page."""

from __future__ import annotations

import math

from dmiddleware.testing import Tape
from tests.benchmarks.__main__ import known
from tests.benchmarks.report import (
    Comparison,
    Grid,
    Row,
    Section,
    interleaved,
    median_and_spread,
    render_markdown,
    replace_sections,
    versions,
)
from tests.benchmarks.rival_environment import version_of
from tests.benchmarks.throughput_setting import Meter

# Ours takes half of the reference's time.
PAIR = Comparison(ours_s=1.0, reference_s=2.0, time_ratio=0.5, spread=0.1)


def test_the_sides_take_turns_in_going_first():
    tape = Tape()
    interleaved(lambda: tape("ours"), lambda: tape("theirs"), repeats=3, warmup=1)
    assert tape == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_ratio_is_that_of_the_turns():
    pair = interleaved(lambda: sum(range(40_000)), lambda: None, repeats=3)
    assert pair.ours_s > pair.reference_s
    assert pair.time_ratio > 1
    assert pair.spread >= 0


def test_times_are_per_operation_and_a_bar_is_an_upper_bound():
    row = Row.of_time("push", PAIR, calls=1000, against="arrays", at_most=0.5)
    assert math.isclose(row.ours, 1000.0)
    assert math.isclose(row.reference, 2000.0)
    assert (row.unit, row.ratio, row.bar, row.met) == ("µs", 0.5, "≤ 0.5x", True)
    assert Row.of_time("push", PAIR, calls=1, against="", at_most=0.4).verdict == "missed"


def test_rates_are_per_second_and_a_bar_is_a_lower_bound():
    row = Row.of_rate("train", PAIR, count=100, unit="updates/s", against="loop", at_least=2.0)
    assert (row.ours, row.reference, row.ratio) == (100.0, 50.0, 2.0)
    assert (row.bar, row.met) == ("≥ 2x", True)
    assert Row.of_rate("t", PAIR, count=1, unit="", against="", at_least=2.1).verdict == "missed"


def test_a_row_without_a_figure_is_neither_met_nor_missed():
    row = Row.missing("train", against="nobody", note="nobody is not installed")
    assert row.met is None
    assert row.verdict == "not measured"
    assert Row.of_time("push", PAIR, calls=1, against="").verdict == "-"


def test_the_page_has_every_row_with_its_bar_and_its_note():
    measured = Row.of_time("push", PAIR, calls=1000, against="arrays", at_most=2.0)
    missing = Row.missing("train", against="nobody", note="nobody is not installed")
    page = render_markdown(
        [Section("Buffers", "Rows of 4.", [measured, missing])],
        command="make bench",
        duration_s=120,
        packages=["no-such-package"],
    )
    assert "## Buffers\n\nRows of 4.\n" in page
    assert "| push | arrays | µs | 1,000 | 2,000 | 0.50x ± 10% | ≤ 2x | met |" in page
    assert "- train: nobody is not installed" in page
    assert "no-such-package not installed" in page
    assert "`make bench` (2 minutes)" in page


def test_a_table_without_a_reference_is_above_the_rows():
    grid = Grid(("collectors", "ours"), [("1", "2,000"), ("2", "3,000")])
    rows = [Row("push", "arrays", ours=1.0, reference=1.0, ratio=1.0, unit="µs")]
    page = render_markdown(
        [Section("Rates", "Text.", rows, grid)], command="make", duration_s=60, packages=()
    )
    table = "| collectors | ours |\n| --- | --- |\n| 1 | 2,000 |\n| 2 | 3,000 |\n"
    assert page.index("Text.") < page.index(table) < page.index("| push | arrays |")


def test_the_spread_is_half_the_quartile_range_relative_to_the_median():
    assert median_and_spread([8.0, 10.0, 14.0]) == (10.0, 0.15)
    assert median_and_spread([3.0]) == (3.0, 0.0)


def test_a_rate_is_measured_after_the_warm_up():
    times = iter([100.0, 101.0, 102.0, 104.0, 106.0])
    meter = Meter(2.0, 3.0, clock=lambda: next(times))
    assert [meter.rate(n) for n in (10, 20, 40, 60, 100)] == [None, None, None, None, 15.0]


def test_the_versions_of_other_libraries_are_pinned():
    assert version_of("ray[rllib]", "rllib")
    assert version_of("sample-factory", "sample-factory")


def test_a_package_that_is_there_has_its_version():
    assert versions(["numpy"])["numpy"][0].isdigit()


def test_benchmarks_are_found_by_their_names():
    assert {"dqn_chain", "rivals"} <= set(known())


def test_sections_measured_anew_replace_the_old_ones_and_the_others_stay():
    pages = []
    for figure in (1.0, 2.0):
        rows = [Row("push", "arrays", ours=figure, reference=1.0, ratio=figure, unit="µs")]
        sections = [Section("One", "Text.", rows), Section("Two", "", rows)]
        pages.append(render_markdown(sections, command="make", duration_s=60, packages=()))
    old, new = pages
    rows = [Row("push", "arrays", ours=2.0, reference=1.0, ratio=2.0, unit="µs")]
    both = [Section("One", "Text.", rows, machine="a PC"), Section("Two", "", rows)]
    new = new.replace("|\n\n## Two", "|\n\nThese figures were measured on a PC.\n\n## Two")
    assert replace_sections(old, []) == old
    assert replace_sections(old, both) == new
    mixed = replace_sections(old, both[1:])
    assert mixed.count("2.00x") == 1 and mixed.index("1.00x") < mixed.index("2.00x")
    assert replace_sections(mixed, both[:1]) == new
