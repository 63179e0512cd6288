"""The table of faults, as text and as docs/faults.md."""

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

What the router promises when processes die, hang or lie, and when networks break; measured by
`make faults`, which writes this page. The nodes are processes of their own, over ipc and tcp. Each
writes down what it sends and what it gets, and only these ledgers are judged.

What the figures say and what they do not:

- A message is *accepted* when `emit` has returned. Between peers that live, or come back as the
  same process, all accepted messages arrive, once and in order.
- A sender that is killed takes along what it had accepted and not delivered; what was acknowledged
  to it must be there, with no gap.
- A receiver that is killed takes along what it had acknowledged and not handled. What it had not
  acknowledged goes to the process that takes its place.
- Memory counts what is held. glibc keeps some freed memory on top (about 10 MB at bounds of 64 MB),
  so the row of the slow consumer runs with `MALLOC_MMAP_THRESHOLD_=131072`.
"""


def verdict(holds: bool | None) -> str:
    """Say whether a demand holds."""
    return {True: "yes", False: "**no**", None: "not measured"}[holds]


def machine() -> str:
    """Describe where it was measured."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores, {platform.system()}, Python {python}"


def section(results: Sequence[FaultResult], *, why_not: str = "") -> str:
    """Write what one fault came to.

    Args:
        results: what was measured.
        why_not: why nothing was.
    """
    if why_not:
        return f"Not measured: {why_not}."
    lines = ["| injected | over | demanded | measured | holds |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        for check in result.checks:
            cells = (result.injected, result.transport, check.demanded, check.measured)
            lines.append(f"| {' | '.join(map(_cell, cells))} | {verdict(check.holds)} |")
    return "\n".join(lines)


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of a page by their headings, so that a run of some keeps the others."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return {head: body.strip() for head, body in zip(parts[::2], parts[1::2], strict=True)}


def render_markdown(sections: Mapping[str, str]) -> str:
    """Write the page: a section for each fault, by its heading."""
    body = [f"## {head}\n\n{text}\n" for head, text in sections.items()]
    return "\n".join([_HEAD, f"Measured on {machine()}.\n", *body])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
