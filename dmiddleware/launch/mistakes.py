"""Which errors are mistakes that every start of a program would repeat."""

from __future__ import annotations

import traceback
from typing import Final

from dmiddleware.code_mistakes import ERRORS_OF_PEERS, is_code_mistake
from dmiddleware.launch.program_lines import is_of_program

__all__ = ["is_mistake"]

_INPUT_ERRORS: Final = (
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
)
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
    if isinstance(error, ERRORS_OF_PEERS):
        return False
    if is_code_mistake(error):
        return True
    is_own = isinstance(error, ValueError) and _is_raised_by_program(error)
    return not in_step and not is_own and isinstance(error, _INPUT_ERRORS)


def _is_raised_by_program(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_of_program(frames[-1].filename)
