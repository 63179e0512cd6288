"""The shared-memory folder of a run: its permissions, and when it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmiddleware.launch.shared_folder import shared_folder


def test_only_this_user_can_enter_it_and_it_is_removed(tmp_path: Path) -> None:
    with shared_folder(tmp_path) as folder:
        assert folder is not None and folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "1-0123456789abcdef.slab").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), shared_folder(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_concurrent_runs_have_separate_folders(tmp_path: Path) -> None:
    with shared_folder(tmp_path) as one, shared_folder(tmp_path) as other:
        assert one is not None and one.is_dir()
        assert other is not None and other.is_dir()
        assert one != other


def test_without_a_usable_parent_there_is_no_folder(tmp_path: Path) -> None:
    with shared_folder(tmp_path / "nowhere") as folder:
        assert folder is None
    with shared_folder(None) as folder:
        assert folder is None


@pytest.mark.process
def test_the_next_run_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dmiddleware.launch.shared_folder import shared_folder\n"
        "with shared_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'slab').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], timeout=80)
    (left,) = tmp_path.iterdir()
    assert (left / "slab").exists()
    with shared_folder(tmp_path):
        assert not left.exists()


def test_folders_of_other_programs_are_kept(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "ditask-file").touch()
    (tmp_path / "ditask-without-lock").mkdir()
    (tmp_path / "ditask-link").symlink_to(tmp_path / "others")
    (tmp_path / "others" / "lock").touch()
    unfinished, forgotten = tmp_path / "ditask-new-1", tmp_path / "ditask-new-2"
    for folder in (unfinished, forgotten):
        folder.mkdir()
    os.utime(forgotten, (0, 0))
    before = set(tmp_path.iterdir())
    with shared_folder(tmp_path):
        pass
    assert set(tmp_path.iterdir()) == before - {forgotten}
