"""The page of faults, and what the command makes of results."""

from __future__ import annotations

from tests.faults.__main__ import inject
from tests.faults.fault_list import FAULTS, Fault
from tests.faults.fault_result import FaultResult
from tests.faults.report import render_markdown, section, sections_of


def result_of(measured: float) -> FaultResult:
    result = FaultResult("kill -9", "ipc")
    result.at_most("node.left", measured, 1.0)
    return result


def test_a_missed_demand_says_no_and_a_kept_one_yes() -> None:
    text = section([result_of(0.25), result_of(3.0)])
    assert "| kill -9 | ipc | node.left ≤ 1 s | 0.25 s | yes |" in text
    assert "| kill -9 | ipc | node.left ≤ 1 s | 3 s | **no** |" in text


def test_a_page_is_read_back_by_its_headings() -> None:
    sections = {"a kill": section([result_of(0.25)]), "a soak": section([], why_not="no time")}
    page = render_markdown(sections)
    assert sections_of(page) == sections
    assert "Not measured: no time." in page
    assert sections_of("") == {}


def test_a_test_that_breaks_counts_as_missed() -> None:
    def breaks() -> FaultResult:
        raise TimeoutError("node 1 was awaited for 30 s")

    results = inject(Fault("kill", "kill -9", (breaks, lambda: result_of(0.5))))
    assert [result.holds for result in results] == [False, True]
    assert "node 1 was awaited" in results[0].checks[0].measured


def test_every_fault_has_a_name_of_its_own_and_something_to_inject() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.injections for fault in FAULTS)
