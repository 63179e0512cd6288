"""Inject faults at full size: ``python -m tests.faults`` for all, or with names for some.

A run of all faults writes docs/faults.md. A run of some does so with ``--write``, and keeps the
other sections of the page. The exit code is 1 if a requirement is not met.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.faults.fault_list import FAULTS, Fault
from tests.faults.fault_result import FaultResult
from tests.faults.report import render_markdown, section, sections_of

REPORT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


def inject(fault: Fault) -> list[FaultResult]:
    """Inject one fault in all its variants; an error of the test counts as a failed requirement."""
    results = []
    for injection in fault.injections:
        started_at = time.monotonic()
        try:
            result = injection()
        except (RuntimeError, OSError, AssertionError) as error:
            over = [*getattr(injection, "args", ()), "-"][0]
            result = FaultResult(fault.what, over)
            result.check("the test completes", f"{type(error).__name__}: {error}", False)
        results.append(result)
        print(f"{result}\n  ({time.monotonic() - started_at:.0f} s)\n", flush=True)
    return results


def main() -> int:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of: {', '.join(names)}")
    parser.add_argument(
        "--write", action="store_true", help="write the page after a run of some faults, too"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"unknown faults: {', '.join(unknown)}; choose from {', '.join(names)}")
    chosen = set(arguments.names or names)
    page = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
    before, sections = sections_of(page), {}
    results: list[FaultResult] = []
    for fault in FAULTS:
        sections[fault.what] = before.get(fault.what, section([], why_not="not run yet"))
        if fault.name not in chosen:
            continue
        why_not = fault.why_not()
        measured = [] if why_not else inject(fault)
        sections[fault.what] = section(measured, why_not=why_not)
        results += measured
    if arguments.write or not arguments.names:
        REPORT.write_text(render_markdown(sections), encoding="utf-8")
        print(f"{REPORT} written")
    missed = [result for result in results if not result.holds]
    print(f"{len(results) - len(missed)} of {len(results)} injections meet their requirements")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
