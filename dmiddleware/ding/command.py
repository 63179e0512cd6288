"""The command ``ditask ding``."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Final

import click

from dmiddleware.ding.finder import NotHere, open_door
from dmiddleware.errors import ConfigError

__all__ = ["ding_command", "run_file", "run_module"]

_RUNNERS: Final = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames a program that ``python`` runs would not have in its tracebacks."""


def run_file(file: Path, arguments: Sequence[str]) -> None:
    """Run a program of DI-engine in this process, as ``python FILE`` does.

    Modules beside it can be imported, and so can those of the checkout of DI-engine that it is in.

    Args:
        file: the program.
        arguments: its arguments.

    Raises:
        ConfigError: if there is no such file, or it is not Python.
        BaseException: what the program raises.
    """
    code = _compiled(file)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(file.absolute()), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv[:] = [str(file), *arguments]
    _search_first(str(file.resolve().parent))
    open_door(file.parent)
    exec(code, main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as a program in this process, as ``python -m NAME`` does.

    Raises:
        ConfigError: if there is no such module.
        BaseException: what the program raises.
    """
    open_door(Path.cwd())
    _search_first(str(Path.cwd()))
    sys.argv[1:] = arguments
    try:
        is_there = find_spec(name) is not None
    except ModuleNotFoundError:
        is_there = False
    except NotHere as error:
        raise ConfigError(str(error)) from None
    if not is_there:
        raise ConfigError(
            f"found no module {name} in {Path.cwd()} or on the import path; to run a config of "
            "DI-engine, use ditask classic -c FILE"
        )
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _compiled(file: Path) -> CodeType:
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name the file in it that is the program")
    try:
        return compile(file.read_bytes(), str(file.absolute()), "exec", dont_inherit=True)
    except FileNotFoundError:
        raise ConfigError(f"found no file {file}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is not a program in Python: {error}") from None


def _search_first(folder: str) -> None:
    """Import modules from a folder first, in place of the folder of this command."""
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


@click.command(
    "ding",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "allow_interspersed_args": False,
    },
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is the name of a module.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ding_command(program: str, arguments: tuple[str, ...], *, is_module: bool) -> None:
    """Run a program of DI-engine as it is, as python PROGRAM does.

    It finds ding, ditk and the old gym here, and dizoo in the checkout of DI-engine that it is in.
    Nothing is installed. All arguments after PROGRAM are for the program.

    \b
      ditask ding ding/example/dqn.py
      ditask ding -m ding.example.dqn
    In several processes:
      ditask --ding --package . --main ding.example.dqn.main --parallel-workers 4
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    try:
        if is_module:
            run_module(program, arguments)
        else:
            run_file(Path(program), arguments)
    except ConfigError as error:
        if error.__traceback__ is not None and _is_of_program(error.__traceback__):
            _end(error)
        raise click.ClickException(str(error)) from error
    except Exception as error:  # noqa: BLE001 (a program may raise anything)
        _end(error)


def _end(error: Exception) -> None:
    """End with the traceback of an error, as Python ends a program.

    Raises:
        SystemExit: with exit code 1.
    """
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "dizoo":
        error.add_note(
            "dizoo is a part of DI-engine: run a program within its checkout, or put the checkout "
            "on PYTHONPATH"
        )
    traceback.print_exception(error.with_traceback(_of_program(error.__traceback__)))
    sys.exit(1)


def _of_program(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this command."""
    return next((f for f in _each(frames) if f.tb_frame.f_code.co_filename not in _RUNNERS), frames)


def _is_of_program(frames: TracebackType) -> bool:
    return any(frame.tb_frame.f_code.co_filename not in _RUNNERS for frame in _each(frames))


def _each(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next
