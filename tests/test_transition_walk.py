"""The walk of a transition is no longer than the page about it says."""

import re
from pathlib import Path

from tests.transition_walk import walk
from tests.walks import ROOT

PAGE = ROOT / "docs/decisions/the-walk-of-a-transition.md"


def test_the_walk_is_as_long_as_its_page_says(tmp_path: Path) -> None:
    found = re.search(r"(\d+) functions in\s+(\d+) files", PAGE.read_text())
    assert found is not None
    files = walk(tmp_path)
    assert (sum(map(len, files.values())), len(files)) == (int(found[1]), int(found[2]))
    assert int(found[1]) <= 100
    assert int(found[2]) <= 28
