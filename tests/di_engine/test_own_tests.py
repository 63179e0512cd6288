"""The runner of a checkout's own tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.di_engine.__main__ import keep_by_group, read_results
from tests.di_engine.own_tests import run
from tests.di_engine.rows import Row, counts


def _write(checkout: Path, file: str, text: str) -> None:
    path = checkout / "ding" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.process
def test_each_test_of_a_checkout_gets_a_row_with_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "def test_skips(): pytest.skip('no accelerator')\n\n"
        "def test_of_a_package_that_the_user_adds(): import added_by_the_user\n\n"
        "def test_of_a_package_that_nobody_has(): import no_such_package.part\n",
    )
    _write(tmp_path, "../of_the_user/added_by_the_user.py", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "of_the_user"))
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
        "test_variants.py::test_of_a_package_that_the_user_adds",
        "test_variants.py::test_of_a_package_that_nobody_has",
    ]
    assert [row.outcome for row in rows] == [
        *("fails", "runs", "fails", "refused", "runs", "refused")
    ]
    assert "no_such_module" in rows[0].reason
    assert rows[2].reason == "assert 2 == 1"
    assert rows[3].reason == "Skipped: no accelerator"
    assert rows[5].reason == "it needs the package no_such_package, which is not installed"
    assert counts(rows) == {"runs": 2, "refused": 2, "fails": 2}


@pytest.mark.process
def test_processes_that_a_test_starts_find_ding_and_a_conftest_may_be_refused(
    tmp_path: Path,
) -> None:
    _write(
        tmp_path,
        "data/tests/test_spawned.py",
        "import multiprocessing\n"
        "from ding import __TITLE__\n\n"
        "def check(): assert __TITLE__ == 'DI-engine'\n\n"
        "def test_it():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=check)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n",
    )
    _write(tmp_path, "league/tests/conftest.py", "from ding.framework import NNGMQ\n")
    _write(tmp_path, "league/tests/test_queue.py", "def test_it(): ...\n")
    spawned, refused = run(tmp_path, ("data", "league"))
    assert spawned.outcome == "runs"
    assert (refused.outcome, "message queue" in refused.reason) == ("refused", True)


def test_a_run_that_is_cut_keeps_the_rows_of_each_group_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part() -> Iterator[Row]:
        yield Row("a1", "a", "runs")
        yield Row("a2", "a", "runs")
        yield Row("b1", "b", "runs")
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.di_engine.__main__._RESULTS", tmp_path / "results.json")
    earlier = [Row("a0", "a", "fails"), Row("c1", "c", "refused")]
    with pytest.raises(KeyboardInterrupt):
        keep_by_group("tests", part(), {"tests": earlier, "goals": earlier})
    kept = read_results()
    assert [row.name for row in kept["tests"]] == ["a1", "a2", "c1"]
    assert kept["goals"] == earlier


def test_counts_have_all_outcomes() -> None:
    assert counts([Row("a", "data", "runs")]) == {"runs": 1, "refused": 0, "fails": 0}
