"""Read the fenced blocks of the Markdown pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<ticks>`{3,}|:{3,})(?P<info>.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: the page's path, relative to the repository.
        line: line number of its first line of content, from 1.
        language: the first word after the opening fence.
        options: the other words, ``key=value``.
        text: the content between the fences.
    """

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str


def pages() -> list[Path]:
    """Return all Markdown pages: those in the root folder, and docs/."""
    tops = sorted(ROOT.glob("*.md"))
    docs = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
    return tops + docs


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    content: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = FENCE.match(line)
        if opened is None:
            if match is not None:
                opened, content = (match["ticks"], match["info"].strip(), number + 1), []
        elif line.strip() == opened[0]:
            found.append(_block(name(path), opened[1], opened[2], content))
            opened = None
        else:
            content.append(line)
    if opened is not None:
        raise ValueError(f"{name(path)}:{opened[2]}: the block is never closed")
    return found


def _block(page: str, info: str, line: int, content: list[str]) -> Block:
    words = info.split()
    language = words[0] if words else ""
    options = dict(word.partition("=")[::2] for word in words[1:])
    return Block(page, line, language, options, "\n".join(content) + "\n")
