"""The runner of a checkout's own tests."""

from pathlib import Path

import pytest

from tests.di_engine.own_tests import run
from tests.di_engine.rows import Row, counts


def _write(checkout: Path, file: str, text: str) -> None:
    path = checkout / "ding" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.process
def test_each_test_of_a_checkout_gets_a_row_with_what_became_of_it(tmp_path: Path) -> None:
    _write(tmp_path, "../pytest.ini", "[pytest]\nno_such_option = 1\n")
    _write(
        tmp_path,
        "config/tests/test_variants.py",
        "import pytest\n"
        "import ding\n\n"
        "@pytest.mark.parametrize('number', [1, 2])\n"
        "def test_runs(number): assert ding.__TITLE__ == 'DI-engine'\n\n"
        "@pytest.mark.parametrize('number', [1, 2])\n"
        "def test_fails(number): assert number == 1\n\n"
        "def test_skips(): pytest.skip('no accelerator')\n",
    )
    _write(
        tmp_path,
        "config/tests/test_missing.py",
        "from ding.no_such_module import thing\n\nclass TestThing:\n    def test_it(self): ...\n",
    )
    rows = list(run(tmp_path, ("config",)))
    names = [row.name.removeprefix("ding/config/tests/") for row in rows]
    assert names == [
        "test_missing.py::TestThing::test_it",
        "test_variants.py::test_runs",
        "test_variants.py::test_fails",
        "test_variants.py::test_skips",
    ]
    assert [row.outcome for row in rows] == ["fails", "runs", "fails", "refused"]
    assert "no_such_module" in rows[0].reason
    assert rows[2].reason == "assert 2 == 1"
    assert rows[3].reason == "Skipped: no accelerator"
    assert counts(rows) == {"runs": 1, "refused": 1, "fails": 2}


def test_counts_have_all_outcomes() -> None:
    assert counts([Row("a", "data", "runs")]) == {"runs": 1, "refused": 0, "fails": 0}
