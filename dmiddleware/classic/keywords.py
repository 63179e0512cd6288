"""Arguments that can be passed by a second keyword, the one that DI-engine has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["also_named"]

F = TypeVar("F", bound=Callable[..., Any])


def also_named(**parameters: str) -> Callable[[F], F]:
    """Let a function take arguments by another keyword too.

    Args:
        parameters: for each further keyword, the name of the parameter.

    Example:
        >>> @also_named(file_name="file")
        ... def size_of(file):
        ...     return len(file)
        >>> size_of(file_name="abc"), size_of(file="abc"), size_of("abc")
        (3, 3, 3)
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for keyword in parameters.keys() & kwargs.keys():
                name = parameters[keyword]
                if name in kwargs:
                    raise TypeError(f"{function.__name__}() got both {name} and {keyword}")
                kwargs[name] = kwargs.pop(keyword)
            return function(*args, **kwargs)

        return renamed  # type: ignore[return-value]

    return decorate
