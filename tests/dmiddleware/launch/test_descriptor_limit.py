"""The limit of open files is raised for the run, or the run is refused before it starts."""

from __future__ import annotations

import resource
import subprocess
import textwrap
from pathlib import Path

import pytest

from dmiddleware.errors import LaunchError
from dmiddleware.launch.descriptor_limit import descriptors_needed, raise_descriptor_limit
from dmiddleware.launch.plan import NodePlan
from tests.dmiddleware.launch.ditask_process import DITASK

PROGRAM = """
    import resource
    from dmiddleware import Context, Task

    def main():
        with Task(Context()) as task:
            task.use(lambda ctx: None).run(max_step=1)
            print("limit:", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


def run(folder: Path, n_workers: int, *, soft: int, hard: int) -> tuple[int, str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    options = ("--main", "program.main", "--parallel-workers", str(n_workers))
    ended = subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", *DITASK, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_low_soft_limit_is_raised_for_the_launcher_and_its_nodes(tmp_path: Path) -> None:
    code, text = run(tmp_path, 5, soft=20, hard=1000)
    assert code == 0, text
    assert text.count("limit: 1000") == 5


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_run_that_needs_more_files_than_the_hard_limit_starts_nothing(tmp_path: Path) -> None:
    code, text = run(tmp_path, 1000, soft=64, hard=512)
    assert code == 1
    assert "ulimit -Hn 5256" in text and "[node" not in text


def test_the_hub_of_a_large_star_needs_the_most_descriptors() -> None:
    hub = NodePlan(0, n_peers=1000)
    assert descriptors_needed([hub]) > 4000
    assert descriptors_needed([NodePlan(0)]) < 512


def test_a_high_limit_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the limit was changed")

    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "setrlimit", refuse)
    for limit in ((1 << 20, 1 << 20), (unlimited, unlimited)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: limit)
        raise_descriptor_limit(1000)


def test_a_limit_is_raised_as_far_as_the_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    for hard in (2000, 8192, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        raise_descriptor_limit(1500)
    assert raised == [(2000, 2000), (4096, 8192), (4096, resource.RLIM_INFINITY)]


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(LaunchError, match=r"up to 5000 .*allows 1024"):
        raise_descriptor_limit(5000)
