"""Train what docs/results.md reports, and write it: ``python -m tests.results [NAME …]``.

A training that has a record in tests/results/records is not repeated, and a long one continues
from its newest snapshot, so the command can be interrupted and started again. ``--compare`` trains
only what is compared with other libraries, and those libraries. The exit code is 1 when a training
failed or missed its bar.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.results import (
    agents,
    bars,
    classic_control,
    compare,
    continuous,
    explore,
    offline,
    onpolicy,
    qlearn,
    record,
    recurrent,
    report,
)
from tests.results.entry import Entry
from tests.results.training import TrainingError, train

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "results.md"
MODULES = (
    classic_control,
    continuous,
    qlearn,
    onpolicy,
    recurrent,
    explore,
    agents,
    offline,
)
"""The modules that list entries, in the order of the page."""


def all_entries() -> list[Entry]:
    """Return all entries.

    Raises:
        ValueError: if two entries have one name, and therefore one record.
    """
    entries = [entry for module in MODULES for entry in module.ENTRIES]
    names = [entry.name for entry in entries]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"several entries are called {', '.join(sorted(twice))}")
    return entries


def run(entries: list[Entry], *, again: bool, jobs: int = 1) -> list[str]:
    """Train what has no record, and return what failed.

    Args:
        entries: what to train; the shortest trainings run first.
        again: whether to repeat what has a record.
        jobs: how many trainings run at a time, if several with one thread each; those of several
            processes run alone.
    """
    ordered = sorted(entries, key=lambda entry: entry.minutes)
    missing = [
        (entry, seed)
        for entry in ordered
        for seed in entry.seeds
        if again or not record.path_of(entry.name, seed).exists()
    ]
    alone = [(entry, seed) for entry, seed in missing if entry.nodes > 1]
    others = [(entry, seed) for entry, seed in missing if entry.nodes == 1]

    def train_one(one: tuple[Entry, int]) -> str:
        return train_and_record(*one, again=again, alone=jobs == 1)

    with ThreadPoolExecutor(jobs) as pool:
        failures = list(pool.map(train_one, others))
    failures += map(train_one, alone)
    return [failure for failure in failures if failure]


def train_and_record(entry: Entry, seed: int, *, again: bool, alone: bool) -> str:
    """Train and save the record; return what failed, or nothing."""
    print(f"{entry.name}, seed {seed}: about {entry.minutes:g} min …", flush=True)
    try:
        outcome = train(entry, seed, again=again, alone=alone)
    except TrainingError as error:
        print(f"{entry.name}, seed {seed}: {error}", flush=True)
        return str(error)
    record.save(entry.name, outcome)
    told = f"{entry.figure} {outcome.figure:g} in {outcome.train_s:.0f} s"
    print(f"{entry.name}, seed {seed}: {told}", flush=True)
    return ""


def records_of(entry: Entry) -> list[record.Record]:
    """Return the records of an entry that exist."""
    return [one for seed in entry.seeds if (one := record.load(entry.name, seed)) is not None]


def write_page(entries: list[Entry], records: bars.Records) -> None:
    """Write the page and its pictures."""
    curves = {}
    for title, rows in report.sections_of(entries).items():
        word = re.sub(r"[^a-z0-9]+", "-", title.lower())
        picture = f"images/curves/{word}.png"
        if report.draw_curves(title, rows, records, DOCS / picture):
            curves[title] = picture
    comparison = compare.table(records)
    page = report.render(entries, records, curves, comparison=comparison)
    PAGE.write_text(page, encoding="utf-8")


def main() -> int:
    ours = all_entries()
    compared = compare.compared()
    # Two entries of one name are one training.
    entries = list({entry.name: entry for entry in [*compared, *ours]}.values())
    known = [entry.name for entry in entries]
    parser = argparse.ArgumentParser(prog="python -m tests.results", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which trainings; default: all")
    parser.add_argument("--list", action="store_true", help="list the trainings, and stop")
    parser.add_argument("--again", action="store_true", help="repeat those that have a record")
    parser.add_argument("--write", action="store_true", help="write the page, and train nothing")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="trainings at a time (default: 2)"
    )
    parser.add_argument(
        "--compare", action="store_true", help="only what is compared with other libraries"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(known))
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    if unknown:
        parser.error(f"no training is called {', '.join(unknown)}; --list lists them")
    if arguments.list:
        print_list(entries, arguments.jobs)
        return 0
    chosen = [entry for entry in entries if not arguments.names or entry.name in arguments.names]
    if arguments.compare:
        names = {entry.name for entry in compared}
        chosen = [entry for entry in chosen if entry.name in names]
    failed = [] if arguments.write else run(chosen, again=arguments.again, jobs=arguments.jobs)
    records = {entry.name: records_of(entry) for entry in entries}
    write_page(ours, records)
    for line in failed:
        print(f"failed: {line}")
    missed = [line for entry in chosen for line in bars.missed(entry, records)]
    missed += compare.missed([entry.name for entry in chosen], records)
    for line in missed:
        print(f"missed: {line}")
    return 1 if failed or missed else 0


def print_list(entries: list[Entry], jobs: int) -> None:
    """Print the trainings, which of their seeds have a record, and how long all of them take.

    A training with records takes what they took on average, another what its entry plans.
    """
    total = 0.0
    for entry in entries:
        done = records_of(entry)
        took = statistics.mean(one.train_s / 60 for one in done) if done else entry.minutes
        kind = "measured" if done else "planned"
        seeds = ", ".join(str(one.seed) for one in done) or "none"
        n = len(entry.seeds)
        print(f"{entry.name}: {n} of {took:.1f} min ({kind}); seeds with a record: {seeds}")
        total += n * took / (jobs if entry.nodes == 1 else 1)
    total += sum({entry.prepare: entry.prepare_minutes for entry in entries}.values()) / jobs
    print(f"{total / 60:.1f} h in all, with {jobs} at a time")


if __name__ == "__main__":
    sys.exit(main())
