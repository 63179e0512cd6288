"""Inject faults at full size: ``python -m tests.faults`` for all, or with names for some.

A run of all faults updates docs/faults.md. A run of some does so with ``--write``, and keeps the
other figures of the page. The exit code is 1 if a requirement is not met.
"""

from __future__ import annotations

import argparse
import datetime
import time

from tests.faults.fault_list import FAULTS, GROUPS, Fault
from tests.faults.fault_result import FaultResult
from tests.faults.process_cluster import TRANSPORTS
from tests.faults.report import PAGE, Measurement, commit, machine, read, record, render


def inject(fault: Fault, transport: str) -> list[FaultResult]:
    """Inject all variants of a fault; an error of the test counts as a failed requirement."""
    results = []
    for injection in fault.variants:
        started_at = time.monotonic()
        try:
            result = injection(transport)
        except (RuntimeError, OSError, AssertionError) as error:
            result = FaultResult(fault.what, transport)
            result.check("the test completes", f"{type(error).__name__}: {error}", False)
        results.append(result)
        print(f"{result}\n  ({time.monotonic() - started_at:.0f} s)\n", flush=True)
    return results


def main() -> int:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of: {', '.join(names)}")
    parser.add_argument(
        "--over", action="append", choices=TRANSPORTS, help="only over this transport"
    )
    parser.add_argument(
        "--write", action="store_true", help="update the page after a run of some faults, too"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"unknown faults: {', '.join(unknown)}; choose from {', '.join(names)}")
    over = arguments.over or TRANSPORTS
    chosen = [
        fault
        for fault in FAULTS
        if fault.name in (arguments.names or names) and set(fault.transports) & set(over)
    ]
    if not chosen:
        parser.error(f"none of these faults is injected over {' or '.join(over)}")
    writes = arguments.write or not (arguments.names or arguments.over)
    results: list[FaultResult] = []
    for fault in chosen:
        if reason := fault.why_not():
            print(f"{fault.name}: not measured, {reason}\n")
            continue
        for transport in fault.transports:
            if transport not in over:
                continue
            measured = inject(fault, transport)
            results += measured
            if writes:
                _write(fault, transport, measured)
    missed = [result for result in results if not result.holds]
    print(f"{len(results) - len(missed)} of {len(results)} injections meet their requirements")
    return 1 if missed else 0


def _write(fault: Fault, transport: str, results: list[FaultResult]) -> None:
    checks = tuple(check for result in results for check in result.checks)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    record(
        Measurement(
            fault=fault.name,
            transport=transport,
            date=date,
            commit=commit(),
            machine=machine(),
            checks=checks,
        )
    )
    PAGE.write_text(render(GROUPS, read()), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
