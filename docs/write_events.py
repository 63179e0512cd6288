"""Write the table of events in reference/events.md: python docs/write_events.py."""

from __future__ import annotations

import re
from pathlib import Path

from middleware.exchange.events import events_table

PAGE = Path(__file__).parent / "reference" / "events.md"
MARKED = re.compile(r"(?<=<!-- events -->\n).*(?=<!-- end of events -->)", re.DOTALL)


def page_with_table() -> str:
    """Return the page with the current table."""
    return MARKED.sub(lambda _: f"\n{events_table()}\n\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
