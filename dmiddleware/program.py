"""Run a program from its command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from dmiddleware.command_line import arguments_of, called_as
from dmiddleware.process.ctrl_c import exit_after_ctrl_c

__all__ = ["run_program"]

R = TypeVar("R")


def run_program(main: Callable[..., R], arguments: Sequence[str] | None = None) -> R:
    """Call a program with the arguments of its command line.

    The options are the parameters of the function, see :mod:`dmiddleware.command_line`. ``--config
    FILE`` takes the values of an earlier run's ``config.yaml``, or of any YAML file, as defaults.
    :class:`~middleware.Experiment` saves what the program was called with::

        def main(seed: Whole = 0, policy: DQNSettings = DQNSettings(n_step=3)) -> None:
            ...

        if __name__ == "__main__":
            run_program(main)

    Args:
        main: the program. Its parameters are annotated, and the section ``Args:`` of its docstring
            says what they mean; those that are settings have a default.
        arguments: the command line; None: ``sys.argv``.

    Returns:
        What the program returns.

    Raises:
        SystemExit: with 2, after a message, for an unknown option or a wrong value; with 0, after
            the help; with 130, after Ctrl-C.
        BaseException: what the program raises.
    """
    options = arguments_of(main, sys.argv[1:] if arguments is None else list(arguments))
    with called_as(main, options), exit_after_ctrl_c():
        return main(**options)
