"""Write docs/faults.md from the results."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence

from tests.faults.fault_result import FaultResult

__all__ = ["machine", "render_markdown", "verdict", "section", "sections_of"]

_HEAD = """\
# Faults

What the router guarantees when processes die, hang or send garbage, and when networks break. `make
faults` injects every fault and writes this page. All nodes are separate processes, connected over
ipc or tcp. Each node records what it sends and receives in a ledger, and the figures are counted
from the ledgers alone.

How to read the figures:

- A message is *accepted* when `emit` has returned. Between peers that stay alive, or reconnect as
  the same process, every accepted message arrives once and in order.
- When a sender is killed, the messages that it had accepted but not yet delivered are lost. Those
  that its peer had acknowledged must have arrived, without a gap.
- When a receiver is killed, the messages that it had acknowledged but not yet handled are lost,
  unless they are acknowledged only when handled. Those that it had not acknowledged go to the
  process that replaces it. A receiver that raises is treated in the same way.
- Memory figures count memory in use. glibc also keeps some freed memory (about 10 MB with limits of
  64 MB), so the slow consumer runs with `MALLOC_MMAP_THRESHOLD_=131072`.
"""


def verdict(holds: bool | None) -> str:
    """Return whether a requirement is met, in words."""
    return {True: "yes", False: "**no**", None: "not measured"}[holds]


def machine() -> str:
    """Describe the machine."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores, {platform.system()}, Python {python}"


def section(results: Sequence[FaultResult], *, why_not: str = "") -> str:
    """Return one fault's section.

    Args:
        results: the results of its injections.
        why_not: why it was not measured; empty: it was.
    """
    if why_not:
        return f"Not measured: {why_not}."
    lines = [
        "| fault | transport | requirement | measured | met |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for check in result.checks:
            cells = (result.injected, result.transport, check.requirement, check.measured)
            lines.append(f"| {' | '.join(map(_cell, cells))} | {verdict(check.holds)} |")
    return "\n".join(lines)


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a page by heading; a run of some faults keeps the others."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return {head: body.strip() for head, body in zip(parts[::2], parts[1::2], strict=True)}


def render_markdown(sections: Mapping[str, str]) -> str:
    """Return the page with the given sections."""
    body = [f"## {head}\n\n{text}\n" for head, text in sections.items()]
    return "\n".join([_HEAD, f"Measured on {machine()}.\n", *body])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
