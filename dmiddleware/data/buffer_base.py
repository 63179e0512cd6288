"""What both kinds of buffer share: middleware around their actions, and a lock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

__all__ = ["ACTIONS", "Buffer", "BufferMiddleware", "generator_from_text", "generator_to_text"]

ACTIONS = ("push", "sample", "update", "delete", "clear")
"""The actions that buffer middleware wraps."""

BufferMiddleware: TypeAlias = Callable[..., Any]
"""``middleware(action, chain, *args, **kwargs)``; calls ``chain(*args, **kwargs)`` to go on."""


class Buffer:
    """Base of the buffers: holds middleware and a lock.

    A middleware is called as ``middleware(action, chain, *args, **kwargs)`` with the action's name
    (one of :data:`ACTIONS`) and its arguments. It calls ``chain(*args, **kwargs)``, which runs the
    rest of the chain and at last the action itself, and returns the result; it may change
    arguments and result, call the chain several times, or not at all. The first one used is the
    outermost.

    Methods exclude one another, so several threads may share a buffer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._middleware: list[BufferMiddleware] = []

    def use(self, middleware: BufferMiddleware) -> Self:
        """Add a middleware, inside of those added before.

        Returns:
            The buffer itself, so that calls can be chained.

        Raises:
            TypeError: if it is not callable.
        """
        if not callable(middleware):
            raise TypeError(
                f"buffer middleware is called with (action, chain, *args, **kwargs), but "
                f"{middleware!r} is not callable; pass a function, or the result of one of the "
                "factories in dmiddleware.data.buffer_middleware"
            )
        self._middleware.append(middleware)
        return self

    def close(self) -> None:
        """Give back what the buffer holds; calling it twice does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _through(self, action: str, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chain = do
        for middleware in reversed(self._middleware):
            chain = partial(middleware, action, chain)
        return chain(*args, **kwargs)


def generator_to_text(generator: np.random.Generator) -> str:
    """Return the state of a generator as JSON (its integers have more than 64 bits)."""
    return json.dumps(generator.bit_generator.state)


def generator_from_text(text: str) -> np.random.Generator:
    """Return a generator in the state that :func:`generator_to_text` wrote."""
    bit_generator = np.random.PCG64()
    bit_generator.state = json.loads(text)
    return np.random.Generator(bit_generator)
