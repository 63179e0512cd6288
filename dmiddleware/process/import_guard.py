"""Refuse programs that train while their module is imported.

A module without ``if __name__ == "__main__":`` runs its program wherever it is imported: in each
node of a run, before the function of ``--main`` runs it again, and in each process that unpickles
a function of the module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from dmiddleware.errors import LaunchError

__all__ = ["refuse_at_import", "refusing_at_import"]

_refused: Final[ContextVar[frozenset[str]]] = ContextVar("dmiddleware.refused", default=frozenset())


@contextlib.contextmanager
def refusing_at_import(*what: str) -> Iterator[None]:
    """Let :func:`refuse_at_import` refuse these things in this block.

    A process that ``multiprocessing`` has started, and that imports the main module again, refuses
    everything anyway.
    """
    token = _refused.set(_refused.get() | frozenset(what))
    try:
        yield
    finally:
        _refused.reset(token)


def refuse_at_import(what: str) -> None:
    """Refuse something that modules should not do while they are imported.

    Args:
        what: the thing, with its verb, such as "runs a task".

    Raises:
        LaunchError: if a module is being imported where that is refused; it names the line.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        is_module = frame.f_code.co_name == "<module>" and name != "__main__"
        if is_module and (what in _refused.get() or name == "__mp_main__"):
            raise LaunchError(
                f"{frame.f_code.co_filename}:{frame.f_lineno} {what} while its module is imported, "
                "so every process that imports the module would do it, too; move the code into a "
                'function, such as that of --main, and call it only if __name__ == "__main__"'
            )
        frame = frame.f_back  # type: ignore[assignment]
