"""The command that copies the examples out of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dmiddleware.launch.cli import ditask

ROOT = Path(__file__).resolve().parents[2]


def call(*words: str) -> Result:
    return CliRunner().invoke(ditask, ["examples", *words])


def test_the_examples_are_copied_and_run(tmp_path: Path) -> None:
    result = call(str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    copied = tmp_path / "new" / "examples"
    assert f"cd {tmp_path / 'new'} && python -m examples.cartpole_dqn" in result.output
    theirs = {one.name: one.read_text() for one in (ROOT / "examples").glob("*.py")}
    assert {one.name: one.read_text() for one in copied.iterdir()} == theirs


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    result = call(str(tmp_path))
    assert result.exit_code == 1 and "exists; name another folder" in result.output
    assert not list((tmp_path / "examples").iterdir())


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_package_has_them(tmp_path: Path) -> None:
    source, prefix = tmp_path / "source", tmp_path / "prefix"
    for name in ("dmiddleware", "middleware", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([*pip, "wheel", *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--ignore-installed", "--no-deps", "--prefix", str(prefix), str(wheel)],
        check=True,
    )
    (installed,) = prefix.glob("lib/python*/site-packages")
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from dmiddleware.example_programs "
    code += "import copy_examples; from pathlib import Path; copy_examples(Path('copied'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    theirs = {one.name for one in (ROOT / "examples").glob("*.py")}
    assert {one.name for one in (tmp_path / "copied" / "examples").iterdir()} == theirs
