"""Which errors are mistakes that every start of a program would repeat."""

from __future__ import annotations

import traceback
from typing import Final

from dmiddleware.errors import (
    ChainError,
    ConfigError,
    EventError,
    LaunchError,
    RouterError,
    SpaceError,
    StructureError,
)
from dmiddleware.launch.program_lines import is_of_program
from dmiddleware.terminal import needs_terminal

__all__ = ["is_mistake"]

_OF_THE_CODE: Final = (
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    NotImplementedError,
    ChainError,
    ConfigError,
    LaunchError,
    SpaceError,
    StructureError,
)
_OF_WHAT_IT_WAS_GIVEN: Final = (
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
)
_OF_PEERS: Final = (RouterError, EventError)
_OF_ENVS: Final = "gymnasium.error"
"""The module of the errors of Gymnasium, which says so if an env does not exist for example."""
_USAGE: Final = 2


def is_mistake(error: BaseException, *, in_step: bool) -> bool:
    """Return whether every start of a program would raise an error that came before its first end.

    A restart cures crashes: lost connections, a device or a machine that fails, a lack of memory.
    It does not cure a mistake in the code, nor a wrong argument or a missing file. Once the program
    takes a step, data may be the reason for the latter. A ``ValueError`` that the program raises
    itself may have any reason; what it calls raises one for a wrong argument.

    Args:
        error: what ended the program before it had done one step.
        in_step: whether it had begun one.
    """
    if isinstance(error, SystemExit):
        # Python prints a text, as for wrong arguments.
        return error.code == _USAGE or (isinstance(error.code, str) and not in_step)
    if isinstance(error, _OF_PEERS):
        return False
    if _is_in_code(error):
        return True
    is_own = isinstance(error, ValueError) and _is_raised_by_program(error)
    return not in_step and not is_own and isinstance(error, _OF_WHAT_IT_WAS_GIVEN)


def _is_raised_by_program(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_of_program(frames[-1].filename)


def _is_in_code(error: BaseException | None) -> bool:
    """Return whether an error is a mistake in the code, contains one, or was raised from one."""
    if error is None or isinstance(error, _OF_PEERS):
        return False
    if isinstance(error, BaseExceptionGroup) and any(map(_is_in_code, error.exceptions)):
        return True
    if isinstance(error, _OF_THE_CODE) or type(error).__module__ == _OF_ENVS:
        return True
    # With `from None`, the context is what the error was raised for.
    replaced = error.__context__ if error.__suppress_context__ else None
    return needs_terminal(error) or _is_in_code(error.__cause__ or replaced)
