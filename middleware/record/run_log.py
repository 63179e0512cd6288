"""The text log of a run, beside which warnings still reach the terminal."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from dmiddleware.best_effort import BestEffort
from dmiddleware.process.closing import Closing

__all__ = ["RunLog"]

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunLog(Closing):
    """Writes what is logged, and what ``warnings.warn`` shows, to a file.

    Python prints warnings of programs that have set up no logging. It would stop as soon as the
    file is a handler, so this hands them on to where Python prints them, ``logging.lastResort``:
    the terminal, above a live progress bar.

    The file may be incomplete when the disk is full.

    Args:
        path: the file; it is continued if it exists.
    """

    def __init__(self, path: Path) -> None:
        self._handler = _LogFile(path)
        self._root = logging.getLogger()
        self._level = self._root.level
        self._root.addHandler(self._handler)
        self._root.setLevel(min(self._level, logging.INFO) if self._level else logging.INFO)
        self._show_before = warnings.showwarning
        # One object, because each access to a method returns another one.
        self._showing = self._show
        warnings.showwarning = self._showing

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show what ``warnings.warn`` was given as before, and write it to the file."""
        self._show_before(message, category, filename, lineno, file, line)
        is_logged = self._show_before.__module__ == "logging"  # by logging.captureWarnings
        if self._handler in self._root.handlers and not is_logged:
            text = f"{category.__name__}: {message}"
            record = logging.LogRecord(
                "py.warnings", logging.WARNING, filename, lineno, "%s:%d: %s",
                (filename, lineno, text), None,
            )  # fmt: skip
            self._handler.write(record)

    def close(self) -> None:
        """Close the file, and leave logging as it was."""
        if self._handler not in self._root.handlers:
            return
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level)
        if warnings.showwarning is self._showing:  # otherwise somebody calls it who replaced it
            warnings.showwarning = self._show_before
        self._handler.close_file()


class _LogFile(logging.FileHandler):
    """The file, which hands on what Python would print if there were no such file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter(_FORMAT))
        self._best_effort = BestEffort(f"write the text log {path}")

    def handle(self, record: logging.LogRecord) -> Any:
        """Write a record, and print it if it is a warning that no other handler gets."""
        passed = self.write(record)
        last = logging.lastResort
        if last is not None and record.levelno >= last.level:
            handlers = list(_handlers_for(record))
            others = [handler for handler in handlers if not isinstance(handler, _LogFile)]
            if not others and handlers[:1] == [self]:  # of two runs, one prints it
                last.handle(record)
        return passed

    def write(self, record: logging.LogRecord) -> Any:
        """Write a record only."""
        return super().handle(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name in logging)
        """Warn of the first line that cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        with self._best_effort:
            raise error

    def close_file(self) -> None:
        """Close the file, even if the rest cannot be written."""
        with self._best_effort:
            self.close()


def _handlers_for(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Yield the handlers that get a record, as ``Logger.callHandlers`` finds them."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None
