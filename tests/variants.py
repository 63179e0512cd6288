"""Leave most variants of an expensive test to ``make test-slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

__all__ = ["mostly_slow"]

_Param = type(pytest.param())


def mostly_slow(values: Iterable[object], *, keep: int | Collection[int]) -> list[object]:
    """Return values for ``parametrize`` of which all but a few are marked as slow.

    Args:
        values: the values of a variant each; tuples for several names, or ``pytest.param``.
        keep: how many of the first values are not slow, or which ones, by their indexes.
    """
    kept = range(keep) if isinstance(keep, int) else keep
    return [value if at in kept else _slow(value) for at, value in enumerate(values)]


def _slow(value: object) -> object:
    if isinstance(value, _Param):
        marks = [*value.marks, pytest.mark.slow]
        return pytest.param(*value.values, marks=marks, id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
