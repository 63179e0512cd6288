"""The description of a chain: a table of its middleware."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dmiddleware.pipeline.plan import PlanItem

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ChainTable", "ChainRow", "aligned", "describe_chain"]

_HEADINGS = ("#", "middleware", "roles", "reads", "writes", "here", "defined in")


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One row of the table.

    Attributes:
        path: the middleware's number.
        name: its name.
        roles: the roles in which it is active; none means all.
        reads: the fields that it declares to read.
        writes: the fields that it declares to write.
        active: whether it runs in this task's roles.
        locked: whether it holds a lock while it runs.
        location: where it is defined.
    """

    path: str
    name: str
    roles: tuple[str, ...]
    reads: Collection[str]
    writes: Collection[str]
    active: bool
    locked: bool
    location: str

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the row's cells."""
        indent = "  " * self.path.count(".")
        return (
            self.path,
            f"{indent}{self.name}{' (locked)' if self.locked else ''}",
            ", ".join(self.roles) or "all",
            ", ".join(self.reads),
            ", ".join(self.writes),
            "active" if self.active else "inactive",
            self.location,
        )


@dataclass(frozen=True)
class ChainTable:
    """The middleware of a chain as a table.

    ``str()`` returns plain text; rich prints it as a table.

    Attributes:
        title: the title of the table.
        rows: one for each middleware, in order; the members of a group follow it.
    """

    title: str
    rows: Sequence[ChainRow]

    def __str__(self) -> str:
        lines = [_HEADINGS, *(row.cells() for row in self.rows)]
        return "\n".join([self.title, *aligned(lines, str.ljust)])

    def __rich__(self) -> Table:
        # rich takes longer to import than the whole pipeline, and few runs print this table.
        from rich.table import Table

        table = Table(title=self.title)
        for heading in _HEADINGS:
            table.add_column(heading, overflow="fold", no_wrap=heading in ("#", "here"))
        for row in self.rows:
            cells = (cell.replace(", ", "\n") for cell in row.cells())
            table.add_row(*cells, style=None if row.active else "dim")
        return table


def aligned(lines: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> Iterator[str]:
    """Yield lines of text with their cells in columns; ``justify`` pads all but the first cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (justify(cell, width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def describe_chain(title: str, items: Iterable[PlanItem]) -> ChainTable:
    """Describe a chain.

    Args:
        title: the title of the table.
        items: the plan.
    """
    return ChainTable(title, tuple(_rows(items)))


def _rows(items: Iterable[PlanItem]) -> Iterator[ChainRow]:
    for item in items:
        yield ChainRow(
            item.path,
            item.name,
            item.roles,
            item.reads,
            item.writes,
            item.active,
            item.entry.lock is not None,
            item.location,
        )
        yield from _rows(item.children)
