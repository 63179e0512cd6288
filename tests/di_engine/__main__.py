"""Run everything of a checkout of DI-engine, and write docs/di-engine.md.

``python -m tests.di_engine CHECKOUT`` runs all parts, and with ``--only PART`` one of them. What a
part has found is kept in results.json beside this file, so that the page always has all parts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

from tests.di_engine import configs, examples, goals, own_tests, speed
from tests.di_engine.page import render
from tests.di_engine.rows import Row, counts

_RESULTS: Final = Path(__file__).with_name("results.json")
_PAGE: Final = Path(__file__).parents[2] / "docs" / "di-engine.md"


def main() -> None:
    parts: dict[str, Callable[[Path], Iterable[Row]]] = {
        "examples": examples.run,
        "goals": goals.run,
        "configs": configs.run,
        "tests": own_tests.run,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.di_engine", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", choices=[*parts, "speed"], action="append")
    parser.add_argument(
        "--di-engine", type=Path, help="the Python of an environment with DI-engine, for its speed"
    )
    options = parser.parse_args()
    checkout = options.checkout.absolute()
    if options.di_engine is not None:
        parts["speed"] = lambda checkout: [speed.run(checkout, options.di_engine.absolute())]
    results = read_results()
    for name in options.only or parts:
        rows = keep_by_group(name, parts[name](checkout), results)
        print(name, counts(rows), flush=True)
    _PAGE.write_text(render(results), encoding="utf-8")


def keep_by_group(name: str, part: Iterable[Row], results: dict[str, list[Row]]) -> Iterable[Row]:
    """Run a part and write its rows after each group, which replace those of an earlier run."""
    earlier, rows = results.get(name, []), list[Row]()
    for group, of_group in groupby(part, key=lambda row: row.group):
        rows += of_group
        earlier = [row for row in earlier if row.group != group]
        results[name] = [*rows, *earlier]
        write_results(results)
    results[name] = rows
    write_results(results)
    return rows


def read_results() -> dict[str, list[Row]]:
    """Return the rows of each part that has run."""
    if not _RESULTS.exists():
        return {}
    saved = json.loads(_RESULTS.read_text(encoding="utf-8"))
    return {name: [Row(**row) for row in rows] for name, rows in saved.items()}


def write_results(results: Mapping[str, list[Row]]) -> None:
    """Keep the rows of each part."""
    plain = {name: [asdict(row) for row in rows] for name, rows in results.items()}
    _RESULTS.write_text(json.dumps(plain, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
