"""Check that most expressions of each algorithm have a type.

``python -m tests.typed_algorithms REPORT`` reads the ``any-exprs.txt`` that mypy writes with
``--any-exprs-report``, and lists the algorithms in which fewer than 95% have one. ``make check``
runs it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

LEAST_PERCENT = 95.0
PACKAGES = ("dmiddleware/policy", "dmiddleware/reward")
ALGORITHM = re.compile(r"^class \w+Policy\(|self\.\w+\.step\(", re.MULTILINE)
ROW = re.compile(r"^\s*(?P<module>[\w.]+)\s+\d+\s+\d+\s+(?P<percent>[\d.]+)%$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.typed_algorithms", description=__doc__)
    parser.add_argument("report", type=Path, help="any-exprs.txt of mypy")
    report = parser.parse_args().report.read_text(encoding="utf-8")
    percents = {row["module"]: float(row["percent"]) for row in ROW.finditer(report)}
    modules = algorithms()
    low = [module for module in modules if percents.get(module, 0.0) < LEAST_PERCENT]
    for module in low:
        print(
            f"{percents.get(module, 0.0):.2f}% of the expressions of {module} have a type, but at "
            f"least {LEAST_PERCENT:g}% must; annotate what its networks return, such as "
            "`output: dict[str, torch.Tensor] = self.actor.module(obs)`"
        )
    if not low:
        print(f"at least {LEAST_PERCENT:g}% of each of {len(modules)} algorithms have a type")
    return bool(low)


def algorithms() -> list[str]:
    """Return the modules that define a policy, or make steps of a component."""
    return [
        ".".join(path.with_suffix("").parts)
        for package in PACKAGES
        for path in sorted(Path(package).glob("*.py"))
        if ALGORITHM.search(path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    sys.exit(main())
