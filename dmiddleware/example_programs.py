"""The command ``ditask examples``."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

import click

from dmiddleware.errors import ConfigError, DMiddlewareError

__all__ = ["copy_examples", "examples_command"]

_PLACE: Final = "share/dmiddleware/examples/"
"""Where pip puts them, below the folder of the environment; see pyproject.toml."""


def copy_examples(folder: Path) -> list[Path]:
    """Copy the example programs to the new folder ``examples`` in a folder; return their paths.

    Raises:
        ConfigError: if there is such a folder, or the examples were not installed.
    """
    target = folder / "examples"
    if target.exists():
        raise ConfigError(f"{target} exists; name another folder, or move it away")
    sources = _sources()
    target.mkdir(parents=True)
    return [Path(shutil.copy(source, target)) for source in sources]


def _sources() -> list[Path]:
    """Return the files of the clone from which this package is imported, or of its installation."""
    clone = Path(__file__).parents[1] / "examples"
    if (clone.parent / "pyproject.toml").is_file():
        return sorted(clone.glob("*.py"))
    files = distribution("dmiddleware").files or []
    ours = (file for file in files if _PLACE in file.as_posix() and file.suffix == ".py")
    paths = [Path(str(file.locate())).resolve() for file in ours]
    if not any(file.is_file() for file in paths):
        raise ConfigError("the examples were not installed with dmiddleware; install it again")
    return sorted(paths)


@click.command("examples", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
def examples_command(folder: Path) -> None:
    """Copy the example programs to FOLDER/examples, to run and change them.

    \b
      ditask examples .
      python -m examples.cartpole_dqn
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    try:
        copied = copy_examples(folder)
    except (DMiddlewareError, OSError) as error:
        raise click.ClickException(str(error)) from error
    programs = [file for file in copied if "__main__" in file.read_text(encoding="utf-8")]
    where = "" if folder.samefile(".") else f"cd {folder} && "
    click.echo(f"wrote {len(programs)} programs to {folder / 'examples'}; the first one to run:")
    click.echo(f"  {where}python -m examples.cartpole_dqn")
