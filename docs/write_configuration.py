"""Write the tables of options in reference/configuration.md: python docs/write_configuration.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dmiddleware.worker
from dmiddleware.classic import BUFFER_REGISTRY
from dmiddleware.classic.config import Configurable, config_table
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.settings import Settings, settings_table

PAGE = Path(__file__).parent / "reference" / "configuration.md"
MARKED = re.compile(r"(?<=<!-- options -->\n).*(?=<!-- end of options -->)", re.DOTALL)


def configured_classes() -> list[type]:
    """Return the settings of stock policies, the workers and the replay buffers."""
    policies = filter(is_stock, map(POLICY_REGISTRY.get, POLICY_REGISTRY))
    settings = dict.fromkeys(policy.settings_class() for policy in policies)
    public = [getattr(dmiddleware.worker, name) for name in dmiddleware.worker.__all__]
    workers = [thing for thing in public if inspect.isclass(thing)]
    return [
        *settings,
        *(w for w in workers if issubclass(w, Configurable) and not inspect.isabstract(w)),
        # Tests register policies and buffers of their own.
        *(one for one in map(BUFFER_REGISTRY.get, BUFFER_REGISTRY) if is_stock(one)),
    ]


def is_stock(cls: type) -> bool:
    """Return whether a class is part of the project."""
    return cls.__module__.startswith("dmiddleware.")


def table_of(cls: type) -> str:
    """Return the table of a class."""
    return settings_table(cls) if issubclass(cls, Settings) else config_table(cls)


def page_with_tables() -> str:
    """Return the page with current tables."""
    tables = [f"\n### {cls.__name__}\n\n{table_of(cls)}\n" for cls in configured_classes()]
    return MARKED.sub(lambda _: "".join(tables) + "\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
