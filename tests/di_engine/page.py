"""The page docs/di-engine.md: what became of each program, config and test of DI-engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from tests.di_engine.rows import Row, counts

__all__ = ["render"]

_BEGINNING: Final = """# DI-engine's programs, configs and tests here

This page is written by `python -m tests.di_engine CHECKOUT`, which runs what a checkout of
[DI-engine](https://github.com/opendilab/DI-engine) has, unmodified.
[](howto/from-di-engine.md) says how to run programs and configs of your own. Each line *runs*, is
*refused* with the reason, or *fails*.

"""

_PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "examples": (
        "Example programs",
        "Each program of `ding/example` runs as it is, for 20 seconds or to its stop value. Those "
        "that read checkpoints or data of others run after them, in one folder.",
    ),
    "goals": (
        "Stop values",
        "Examples on CartPole and Pendulum, with three seeds each, at most four minutes a run, and "
        "two of them under `ditask` in four processes.",
    ),
    "speed": (
        "Speed",
        "The loop of `ding/example/dqn.py`, here and in DI-engine 0.5.3 in an environment of its "
        "own, in turns, with one thread each.",
    ),
    "configs": (
        "Configs",
        "Each config file is compiled, its env and its policy are built, and it makes two updates, "
        "with two envs at most, small batches and short episodes. Configs that learn from recorded "
        "data get random rows of the right shapes, and those that imitate an expert get the "
        "checkpoint of an untrained policy with the expert's config.",
    ),
    "tests": (
        "DI-engine's own tests",
        "The test files of `ding/framework`, `worker`, `data`, `league`, `interaction`, "
        "`rl_utils` and `config`.",
    ),
}


def render(results: Mapping[str, list[Row]]) -> str:
    """Return the page."""
    parts = {name: results[name] for name in _PARTS if name in results}
    sections = [_section(name, rows) for name, rows in parts.items()]
    return _BEGINNING + _summary(parts) + "\n" + "\n".join(sections)


def _summary(parts: Mapping[str, list[Row]]) -> str:
    lines = ["| what | runs | refused | fails |", "| --- | --- | --- | --- |"]
    for name, rows in parts.items():
        tally = counts(rows)
        lines.append(
            f"| {_PARTS[name][0]} | {tally['runs']} | {tally['refused']} | {tally['fails']} |"
        )
    return "\n".join(lines) + "\n"


def _section(name: str, rows: list[Row]) -> str:
    title, text = _PARTS[name]
    if name == "configs":
        body = _by_group(rows)
    else:
        body = _table(
            ["", "", "what was seen"], [(row.name, row.outcome, row.reason) for row in rows]
        )
    return f"## {title}\n\n{text}\n\n{body}"


def _by_group(rows: list[Row]) -> str:
    """Return the counts by folder, and the reasons of those that do not run."""
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        groups.setdefault(row.group, Counter())[row.outcome] += 1
    outcomes = ("runs", "refused", "fails")
    tallies = [
        (group, *(str(groups[group][o] or "") for o in outcomes)) for group in sorted(groups)
    ]
    others = [(row.name, row.outcome, row.reason) for row in rows if row.outcome != "runs"]
    return (
        _table(["folder", *outcomes], tallies)
        + "\nThose that do not run:\n\n"
        + _table(["", "", "why"], others)
    )


def _table(head: list[str], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("*", "\\*")
