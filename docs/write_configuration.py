"""Write the tables of options in reference/configuration.md: python docs/write_configuration.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dmiddleware.worker
from dmiddleware.classic import BUFFER_REGISTRY
from dmiddleware.config import Configurable, config_table
from dmiddleware.policy import POLICY_REGISTRY

PAGE = Path(__file__).parent / "reference" / "configuration.md"
MARKED = re.compile(r"(?<=<!-- options -->\n).*(?=<!-- end of options -->)", re.DOTALL)


def configured_classes() -> list[type]:
    """Return the stock policies, workers and replay buffers that a config describes."""
    policies = dict.fromkeys(map(POLICY_REGISTRY.get, POLICY_REGISTRY))
    public = [getattr(dmiddleware.worker, name) for name in dmiddleware.worker.__all__]
    workers = [thing for thing in public if inspect.isclass(thing)]
    return [
        *filter(is_stock, policies),
        *(w for w in workers if issubclass(w, Configurable) and not inspect.isabstract(w)),
        # Tests register policies and buffers of their own.
        *(one for one in map(BUFFER_REGISTRY.get, BUFFER_REGISTRY) if is_stock(one)),
    ]


def is_stock(cls: type) -> bool:
    """Return whether a class is part of the project."""
    return cls.__module__.startswith("dmiddleware.")


def page_with_tables() -> str:
    """Return the page with current tables."""
    tables = [f"\n### {cls.__name__}\n\n{config_table(cls)}\n" for cls in configured_classes()]
    return MARKED.sub(lambda _: "".join(tables) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
