"""Write the tables of metrics in reference/metrics.md: python docs/write_metrics.py."""

from __future__ import annotations

import re
from pathlib import Path

from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.policy.metrics import LEARNING_METRICS, metrics_table
from middleware.metrics import MIDDLEWARE_METRICS

PAGE = Path(__file__).parent / "reference" / "metrics.md"
MARKED = re.compile(r"(?<=<!-- metrics -->\n).*(?=<!-- end of metrics -->)", re.DOTALL)


def sections() -> dict[str, str]:
    """Return a table for each group of middleware, and for each stock algorithm, by heading."""
    found = {name: metrics_table(group) for name, group in MIDDLEWARE_METRICS.items()}
    stock = {name: POLICY_REGISTRY.get(name) for name in POLICY_REGISTRY}
    for name, policy in stock.items():
        if policy.__module__.startswith("dmiddleware."):  # tests register policies of their own
            reports = [LEARNING_METRICS[one] for one in policy.reports]
            found[f"{policy.__name__} (`{name}`)"] = metrics_table(reports, prefix="learn/")
    return found


def page_with_tables() -> str:
    """Return the page with current tables."""
    tables = "".join(f"\n## {name}\n\n{table}\n" for name, table in sections().items())
    return MARKED.sub(lambda _: tables + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
