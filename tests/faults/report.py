"""Keep the results of all faults in results.jsonl, and write docs/faults.md from them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.faults.fault_list import Fault
from tests.faults.fault_result import Check
from tests.faults.process_cluster import ROOT, TRANSPORTS

__all__ = ["PAGE", "RESULTS", "Measurement", "commit", "machine", "read", "record", "render"]

PAGE = ROOT / "docs" / "faults.md"
RESULTS = Path(__file__).with_name("results.jsonl")

_HEAD = """\
# Faults

What the router guarantees when processes die, hang or send garbage, and when networks break. `make
faults` injects every fault and writes this page. All nodes are separate processes. Each node
records what it sends and receives in a ledger, and the figures are counted from the ledgers alone.

How to read the tables:

- A cell shows what was measured: ✓ if the requirement is met, **no** if it is not. "4 of 4" means
  that a fault has four variants, such as both directions, that all meet the requirement; the cell
  then shows the largest figure.
- "—" means that the fault is not injected over this transport. Peers share memory only after they
  have authenticated, so strangers, hostile peers and broken networks never reach it. Trainings run
  over ipc and tcp.
- Over tls+tcp, hostile peers have a valid certificate but not the key, so that their bytes reach
  the router. Random bytes and silent connections also meet TLS itself.
- In the column "shared memory", every frame between two nodes goes through it, whatever its size.
  By default only frames from 512 KB do, as in the section on shared memory.
- A message is *accepted* when `emit` has returned. Between peers that stay alive, or reconnect as
  the same process, every accepted message arrives once and in order. Messages that are duplicated,
  out of order or damaged count as faults, and are shown if there are any.
- When a sender is killed, the messages that it had accepted but not yet delivered are lost. Those
  that its peer had acknowledged must have arrived, without a gap.
- When a receiver is killed, the messages that it had acknowledged but not yet handled are lost,
  unless they are acknowledged only when handled. Those that it had not acknowledged go to the
  process that replaces it. A receiver that raises is treated in the same way.
- After the date is the commit that was measured. A row is measured again when something changes
  that it may depend on.
- Memory figures count memory in use. glibc also keeps some freed memory (about 10 MB with limits of
  64 MB), so the slow consumer runs with `MALLOC_MMAP_THRESHOLD_=131072`. Shared memory has a limit
  of its own, and is counted separately.
"""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One fault over one transport, with all its variants.

    Attributes:
        fault: the fault's name.
        transport: one of :data:`tests.faults.process_cluster.TRANSPORTS`.
        date: the day on which it was measured.
        commit: the commit that was measured, see :func:`commit`.
        machine: see :func:`machine`.
        checks: the requirements and figures.
    """

    fault: str
    transport: str
    date: str
    commit: str
    machine: str
    checks: tuple[Check, ...]


Measurements = Mapping[tuple[str, str], Measurement]


def machine() -> str:
    """Describe the machine."""
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def commit() -> str:
    """Return the short name of the commit, with a plus sign if the code has changed since."""
    named = ["git", "rev-parse", "--short=8", "HEAD"]
    name = subprocess.run(named, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    changed = ["git", "diff", "--quiet", "HEAD", "--", "dmiddleware", "middleware"]
    return name.strip() + "+" * subprocess.run(changed, cwd=ROOT, check=False).returncode


def read(results: Path = RESULTS) -> dict[tuple[str, str], Measurement]:
    """Return the measurements of a file by fault and transport."""
    raw = results.read_bytes() if results.exists() else b""
    found = (msgspec.json.decode(line, type=Measurement) for line in raw.splitlines())
    return {(one.fault, one.transport): one for one in found}


def record(measurement: Measurement, results: Path = RESULTS) -> None:
    """Replace the measurement of one fault over one transport; the others stay."""
    kept = read(results)
    kept[measurement.fault, measurement.transport] = measurement
    lines = [msgspec.json.encode(kept[key]) + b"\n" for key in sorted(kept)]
    results.write_bytes(b"".join(lines))


def render(groups: Mapping[str, Sequence[Fault]], measurements: Measurements) -> str:
    """Return the page: a table for each group, a column for each transport."""
    machines = "; ".join(sorted({one.machine for one in measurements.values()}))
    lines = [_HEAD, f"Measured on {machines}."]
    for heading, faults in groups.items():
        lines += ["", f"## {heading}", "", _row("fault", "requirement", *TRANSPORTS, "measured on")]
        lines.append(_row(*["---"] * (3 + len(TRANSPORTS))))
        lines += [row for fault in faults for row in _rows(fault, measurements)]
    return "\n".join([*lines, ""])


def _rows(fault: Fault, measurements: Measurements) -> list[str]:
    """Return one row for each requirement of a fault."""
    found = {
        transport: measurements[fault.name, transport]
        for transport in fault.transports
        if (fault.name, transport) in measurements
    }
    measured = sorted({f"{one.date}, {one.commit}" for one in found.values()})
    ends = [fault.what, "; ".join(measured)]
    requirements = dict.fromkeys(
        check.requirement for one in found.values() for check in one.checks
    )
    rows = []
    for requirement in requirements or [""]:
        cells = [
            _cell(fault, transport, requirement, found.get(transport)) for transport in TRANSPORTS
        ]
        rows.append(_row(ends[0], requirement, *cells, ends[1]))
        ends = ["", ""]
    return rows


def _cell(fault: Fault, transport: str, requirement: str, measurement: Measurement | None) -> str:
    if transport not in fault.transports:
        return "—"
    if measurement is None:
        return "not measured"
    checks = [check for check in measurement.checks if check.requirement == requirement]
    missed = [check for check in checks if not check.holds]
    if not checks:
        return "—"
    if missed and len(checks) == 1:
        return f"**no**: {missed[0].measured}"
    if missed:
        found = "; ".join(f"{check.variant}: {check.measured}" for check in missed)
        return f"**no**, {len(missed)} of {len(checks)}: {found}"
    count = f"{len(checks)} of {len(checks)}, " if len(checks) > 1 else ""
    return f"✓ {count}{_joined(checks)}"


def _joined(checks: Sequence[Check]) -> str:
    """Return the largest figure, or each text once."""
    values = [check.value for check in checks if check.value is not None]
    if len(values) == len(checks):
        return checks[values.index(max(values))].measured
    return "; ".join(dict.fromkeys(check.measured for check in checks))


def _row(*cells: str) -> str:
    texts = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(texts)} |"
