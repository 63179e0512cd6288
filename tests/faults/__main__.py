"""Inject the faults with their full figures: ``python -m tests.faults`` for all, or names of some.

A run of all writes docs/faults.md; one of some does so with ``--write``, and keeps what the page
says of the others. The exit code is 1 when a demand is missed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.faults.report import render_markdown, section, sections_of
from tests.faults.row import Row
from tests.faults.table import FAULTS, Fault

REPORT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


def inject(fault: Fault) -> list[Row]:
    """Inject one fault in all its ways; what breaks the test itself is a demand that is missed."""
    rows = []
    for injection in fault.injections:
        began = time.monotonic()
        try:
            row = injection()
        except (RuntimeError, OSError, AssertionError) as error:
            over = [*getattr(injection, "args", ()), "-"][0]
            row = Row(fault.what, over)
            row.check("the nodes get through it", f"{type(error).__name__}: {error}", False)
        rows.append(row)
        print(f"{row}\n  ({time.monotonic() - began:.0f} s)\n", flush=True)
    return rows


def main() -> int:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of: {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write the page, even of some only")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no fault is called {', '.join(unknown)}; known: {', '.join(names)}")
    chosen = set(arguments.names or names)
    page = REPORT.read_text(encoding="utf-8") if REPORT.exists() else ""
    before, sections = sections_of(page), {}
    rows: list[Row] = []
    for fault in FAULTS:
        sections[fault.what] = before.get(fault.what, section([], why_not="not run yet"))
        if fault.name not in chosen:
            continue
        why_not = fault.why_not()
        measured = [] if why_not else inject(fault)
        sections[fault.what] = section(measured, why_not=why_not)
        rows += measured
    if arguments.write or not arguments.names:
        REPORT.write_text(render_markdown(sections), encoding="utf-8")
        print(f"{REPORT} written")
    missed = [row for row in rows if not row.holds]
    print(f"{len(rows) - len(missed)} of {len(rows)} rows hold")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
