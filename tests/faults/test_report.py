"""The page docs/faults.md and the command that writes it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.__main__ import inject
from tests.faults.fault_list import FAULTS, GROUPS, Fault
from tests.faults.fault_result import Check, FaultResult
from tests.faults.process_cluster import TRANSPORTS
from tests.faults.report import PAGE, Measurement, read, record, render

LEFT = "node.left ≤ 1 s"


def result_of(measured: float, *, transport: str = "ipc", variant: str = "kill -9") -> FaultResult:
    result = FaultResult(variant, transport)
    result.at_most("node.left", measured, 1.0)
    return result


def measurement(
    *checks: Check, fault: str = "kill", transport: str = "ipc", date: str = "2026-01-01"
) -> Measurement:
    return Measurement(
        fault=fault,
        transport=transport,
        date=date,
        commit="0abc",
        machine="2 cores",
        checks=checks,
    )


def left(measured: float, variant: str = "kill -9") -> Check:
    return result_of(measured, variant=variant).checks[0]


def rows_of(*measurements: Measurement, transports: tuple[str, ...] = TRANSPORTS) -> list[str]:
    fault = Fault("kill", "a kill", transports, (lambda transport: result_of(0.5),))
    page = render({"Kills": (fault,)}, {(one.fault, one.transport): one for one in measurements})
    return page.partition("## Kills")[2].strip().splitlines()[2:]


def test_a_requirement_has_one_row_with_a_cell_for_each_transport() -> None:
    rows = rows_of(
        measurement(left(0.25)),
        measurement(left(3.0), transport="tcp", date="2026-01-03"),
        transports=("ipc", "tcp", "tls+tcp"),
    )
    cells = ["a kill", LEFT, "✓ 0.25 s", "**no**: 3 s", "not measured", "—"]
    assert rows == [f"| {' | '.join(cells)} | 2026-01-01, 0abc; 2026-01-03, 0abc |"]


def test_a_fault_that_was_never_measured_has_a_row() -> None:
    (row,) = rows_of(transports=("ipc",))
    assert row == "| a kill |  | not measured | — | — | — |  |"


def test_variants_that_meet_a_requirement_share_a_cell_with_the_largest_figure() -> None:
    (row,) = rows_of(measurement(left(0.25), left(0.75), left(0.5)))
    assert "| ✓ 3 of 3, 0.75 s |" in row
    texts = [Check("way", "0 lost", text, True) for text in ("9 accepted", "9 accepted", "7")]
    (row,) = rows_of(measurement(*texts))
    assert "| ✓ 3 of 3, 9 accepted; 7 |" in row


def test_a_variant_that_misses_a_requirement_is_named() -> None:
    (row,) = rows_of(measurement(left(0.25), left(3.0, "kill -9 of the | sender")))
    assert "| **no**, 1 of 2: kill -9 of the \\| sender: 3 s |" in row


def test_a_run_of_one_fault_over_one_transport_keeps_the_others(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert read(results) == {}
    old = [
        measurement(left(0.1), transport="ipc"),
        measurement(left(0.2), Check("way", "gone", "1", True), transport="tcp"),
        measurement(left(0.3), fault="soak"),
    ]
    for one in old:
        record(one, results)
    record(new := measurement(left(0.4), transport="tcp"), results)
    assert read(results) == {
        ("kill", "ipc"): old[0],
        ("kill", "tcp"): new,
        ("soak", "ipc"): old[2],
    }


def test_an_error_of_a_test_counts_as_a_failed_requirement() -> None:
    def breaks(transport: str) -> FaultResult:
        raise TimeoutError("waited 30 s for node 1")

    fault = Fault("kill", "kill -9", ("tcp",), (breaks, lambda over: result_of(0.5)))
    results = inject(fault, "tcp")
    assert [result.holds for result in results] == [False, True]
    assert "for node 1" in results[0].checks[0].measured
    assert results[0].transport == "tcp"


def test_every_fault_has_a_unique_name_and_variants_over_known_transports() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.variants and fault.transports for fault in FAULTS)
    assert {over for fault in FAULTS for over in fault.transports} <= set(TRANSPORTS)


def test_the_page_in_the_docs_shows_the_stored_results() -> None:
    stored = read()
    assert PAGE.read_text(encoding="utf-8") == render(GROUPS, stored)
    assert set(stored) <= {(fault.name, over) for fault in FAULTS for over in fault.transports}
