"""The page docs/faults.md and the command that writes it."""

from __future__ import annotations

from tests.faults.__main__ import REPORT, inject
from tests.faults.fault_list import FAULTS, Fault
from tests.faults.fault_result import FaultResult
from tests.faults.report import render_markdown, section, sections_of


def result_of(measured: float) -> FaultResult:
    result = FaultResult("kill -9", "ipc")
    result.at_most("node.left", measured, 1.0)
    return result


def test_a_requirement_is_met_or_not() -> None:
    text = section([result_of(0.25), result_of(3.0)])
    assert "| kill -9 | ipc | node.left ≤ 1 s | 0.25 s | yes |" in text
    assert "| kill -9 | ipc | node.left ≤ 1 s | 3 s | **no** |" in text


def test_a_page_can_be_read_back_by_its_headings() -> None:
    sections = {"a kill": section([result_of(0.25)]), "a soak": section([], why_not="no time")}
    page = render_markdown(sections)
    assert sections_of(page) == sections
    assert "Not measured: no time." in page
    assert sections_of("") == {}


def test_an_error_of_a_test_counts_as_a_failed_requirement() -> None:
    def breaks() -> FaultResult:
        raise TimeoutError("waited 30 s for node 1")

    results = inject(Fault("kill", "kill -9", (breaks, lambda: result_of(0.5))))
    assert [result.holds for result in results] == [False, True]
    assert "for node 1" in results[0].checks[0].measured


def test_every_fault_has_a_unique_name_and_injections() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.injections for fault in FAULTS)


def test_the_page_in_the_docs_has_the_form_that_the_command_writes() -> None:
    page = REPORT.read_text(encoding="utf-8")
    sections = sections_of(page)
    assert list(sections) == [fault.what for fault in FAULTS]
    measured_on = "Measured on "
    written = render_markdown(sections)
    assert [line for line in page.splitlines() if not line.startswith(measured_on)] == [
        line for line in written.splitlines() if not line.startswith(measured_on)
    ]
