"""The walk of an event is no longer than the page about it says."""

import re
from pathlib import Path

from tests.event_walk import walk
from tests.walks import ROOT

PAGE = ROOT / "docs/decisions/the-walk-of-an-event.md"


def test_the_walk_is_as_long_as_its_page_says(tmp_path: Path) -> None:
    found = re.search(r"(\d+) functions in\s+(\d+) files", PAGE.read_text())
    assert found is not None
    files = walk(tmp_path)
    # A few functions are called or not, depending on which thread comes first.
    assert sum(map(len, files.values())) <= int(found[1]) <= 83
    assert len(files) <= int(found[2]) <= 20
