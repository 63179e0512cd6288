"""The temporary folders of a run: their permissions, and when they are removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmiddleware.launch.leftovers import new_mark
from dmiddleware.launch.owned_folder import owned_folder

MARK = new_mark()


def test_only_this_user_can_enter_it_and_it_is_removed(tmp_path: Path) -> None:
    with owned_folder(tmp_path, mark=MARK) as folder:
        assert folder is not None and folder.path.parent == tmp_path
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "1-0123456789abcdef.slab").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), owned_folder(tmp_path, mark=MARK):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_concurrent_runs_have_separate_folders(tmp_path: Path) -> None:
    with owned_folder(tmp_path, mark=MARK) as one, owned_folder(tmp_path, mark=MARK) as other:
        assert one is not None and one.path.is_dir()
        assert other is not None and other.path.is_dir()
        assert one != other


def test_without_a_usable_parent_there_is_no_folder(tmp_path: Path) -> None:
    with owned_folder(tmp_path / "nowhere", mark=MARK) as folder:
        assert folder is None
    with owned_folder(None, mark=MARK) as folder:
        assert folder is None


@pytest.mark.process
def test_the_next_run_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dmiddleware.launch.owned_folder import owned_folder\n"
        "with owned_folder(Path(sys.argv[1]), mark=sys.argv[2]) as folder:\n"
        "    (folder.path / 'slab').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path, MARK], timeout=80)
    (left,) = tmp_path.iterdir()
    assert (left / "slab").exists()
    with owned_folder(tmp_path, mark=MARK):
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
    with owned_folder(tmp_path, mark=MARK):
        pass
    assert set(tmp_path.iterdir()) == before - {forgotten}
