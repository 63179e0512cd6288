"""Values as YAML: how files and command lines write numbers, None, lists and dictionaries.

Numbers are those of Python: ``1e-3`` and ``1e6`` are floats, though YAML 1.1 takes them for text,
and ``12:30`` and ``2026-11-28`` are text, though YAML 1.1 takes them for a number and a date. None
is ``None`` or ``null``.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

__all__ = ["read_yaml", "yaml_text"]

_TAG: Final = "tag:yaml.org,2002:"
_DIGITS: Final = r"\d+(?:_\d+)*"
_INT: Final = re.compile(rf"[-+]?(?:{_DIGITS}|0x[\da-fA-F]+|0o[0-7]+|0b[01]+)$")
_FLOAT: Final = re.compile(
    rf"(?:[-+]?(?:(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?\d+)?|\.?(?:inf|Inf|INF))"
    r"|\.?(?:nan|NaN|NAN))$"
)
_NULL: Final = re.compile(r"(?:~|null|Null|NULL|None|)$")
_RARE_BREAK: Final = re.compile("[\x85\u2028\u2029]")
_REPLACED: Final = {f"{_TAG}{name}" for name in ("int", "float", "null", "timestamp")}
_RESOLVERS: Final = (
    (f"{_TAG}int", _INT, "-+0123456789"),
    (f"{_TAG}float", _FLOAT, "-+0123456789.inIN"),
    (f"{_TAG}null", _NULL, ["~", "n", "N", ""]),
)


def read_yaml(text: str) -> Any:
    """Return the value that a text has.

    Raises:
        yaml.YAMLError: if it is not valid YAML.

    Example:
        >>> read_yaml("{goal: 1e-3, sizes: [64, 1e6], seed: None, at: 12:30}")
        {'goal': 0.001, 'sizes': [64, 1000000.0], 'seed': None, 'at': '12:30'}
    """
    return yaml.load(text, Loader=_Loader)


def yaml_text(value: Any, **options: Any) -> str:
    """Return the text from which :func:`read_yaml` reads a value again.

    Args:
        value: numbers, texts, None, lists and dictionaries.
        **options: of ``yaml.dump``.
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options))


class _Loader(yaml.SafeLoader):
    """Reads numbers as Python does."""

    yaml_implicit_resolvers = {
        letter: [resolver for resolver in resolvers if resolver[0] not in _REPLACED]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Return an integer, also one with a prefix such as ``0x``."""
        text = str(self.construct_scalar(node))
        return int(text, 0 if re.match(r"[-+]?0[xob]", text) else 10)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        """Return a float."""
        text = str(self.construct_scalar(node)).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that this module, or YAML 1.1, would read as something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return a text; rare breaks of lines are escaped, which YAML would read as a space."""
        style = '"' if _RARE_BREAK.search(data) else None
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_float)
for _tag, _pattern, _letters in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list(_letters))
