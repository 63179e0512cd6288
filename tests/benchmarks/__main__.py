"""Run all benchmarks, or those that are named: ``python -m tests.benchmarks [NAME …]``.

All of them write docs/benchmarks.md; some of them only print, or, with ``--write``, replace their
sections of it. A benchmark that fills in another page does so at the same time. The exit code is 1
when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import platform
import sys
import time
from pathlib import Path

# numpy and torch read this when they load their libraries, so set it before importing them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from tests.benchmarks.report import (
    Grid,
    Page,
    Section,
    machine,
    print_sections,
    render_markdown,
    replace_sections,
    use_one_thread,
)

HERE = Path(__file__).resolve().parent
REPORT = HERE.parents[1] / "docs" / "benchmarks.md"
PACKAGES = ("torch", "numpy", "gymnasium", "stable-baselines3", "tianshou", "cpprb", "pynng", "ray")


def known() -> list[str]:
    """Names of the benchmarks: ``chain`` for ``bench_chain.py``."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def measure(name: str) -> Section:
    """Run one benchmark."""
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    title, _, text = inspect.cleandoc(module.__doc__ or name).partition("\n")
    found = module.rows()
    rows, more = found if isinstance(found, tuple) else (found, None)
    page = more if isinstance(more, Page) else None
    grid = more if isinstance(more, Grid) else None
    return Section(title.rstrip("."), text.strip(), rows, grid, page)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of: {', '.join(known())}")
    parser.add_argument(
        "--write", action="store_true", help="write the page, even if only some benchmarks run"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(known()))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; known: {', '.join(known())}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    use_one_thread()
    start = time.perf_counter()
    sections = []
    for name in arguments.names or known():
        began = time.perf_counter()
        section = measure(name)
        sections.append(section)
        print_sections([section], console)
        console.print(f"  ({name}: {time.perf_counter() - began:.0f} s)\n", highlight=False)
    if not arguments.names:
        text = render_markdown(
            sections,
            command="make bench",
            duration_s=time.perf_counter() - start,
            packages=PACKAGES,
        )
    elif arguments.write:
        where = f"{machine()}, Python {platform.python_version()}"
        sections = [dataclasses.replace(section, machine=where) for section in sections]
        text = replace_sections(REPORT.read_text(encoding="utf-8"), sections)
    if not arguments.names or arguments.write:
        written = {REPORT: text}
        for page in [section.page for section in sections if section.page is not None]:
            written[page.path] = page.fill(page.path.read_text(encoding="utf-8"))
        for path, content in written.items():
            path.write_text(content, encoding="utf-8")
            console.print(f"written: {path}", highlight=False)
    missed = [row.name for section in sections for row in section.rows if row.met is False]
    if missed:
        console.print(f"bars missed: {', '.join(missed)}", style="bold red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
