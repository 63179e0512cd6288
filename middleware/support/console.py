"""The console for what a run shows."""

from __future__ import annotations

from rich.console import Console

__all__ = ["RunConsole"]


class RunConsole(Console):
    """A console that raises ``BrokenPipeError`` when nobody reads what it prints.

    That of rich ends the program.
    """

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught."""
        raise BrokenPipeError("nobody reads what is printed any more")
