"""What both kinds of buffer share: middleware around their actions, and a lock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from dmiddleware.errors import CheckpointMismatch

__all__ = ["ACTIONS", "Buffer", "BufferMiddleware", "check_count"]

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

    A middleware object may also offer ``attach(buffer)``, called by :meth:`use`, and
    ``state_dict()`` and ``load_state_dict(state)``, which then are part of the buffer's state.

    Methods exclude one another, so several threads may share a buffer.

    Args:
        size: capacity in items.
        seed: seed of the buffer's own random generator; None takes one from the system.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = check_count("size", size)
        self._lock = threading.RLock()
        self._middleware: list[BufferMiddleware] = []
        if seed is not None:
            check_count("seed", seed, at_least=0)
        self._generator = np.random.default_rng(seed)

    @property
    def size(self) -> int:
        """Capacity in items."""
        return self._size

    @property
    def generator(self) -> np.random.Generator:
        """The buffer's own random generator; middleware draws from it too."""
        return self._generator

    def __len__(self) -> int:
        raise NotImplementedError

    def count(self) -> int:
        """Return the number of items held."""
        return len(self)

    def use(self, middleware: BufferMiddleware) -> Self:
        """Add a middleware, inside of those added before.

        Returns:
            The buffer itself, so that calls can be chained.

        Raises:
            TypeError: if it is not callable, or not meant for this kind of buffer.
        """
        if not callable(middleware):
            raise TypeError(
                f"buffer middleware is called with (action, chain, *args, **kwargs), but "
                f"{middleware!r} is not callable; pass a function, or the result of one of the "
                "factories in dmiddleware.data.buffer_middleware"
            )
        attach = getattr(middleware, "attach", None)
        if attach is not None:
            attach(self)
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
        with self._lock:
            chain = do
            for middleware in reversed(self._middleware):
                chain = partial(middleware, action, chain)
            return chain(*args, **kwargs)

    def _common_state(self) -> dict[str, Any]:
        """Return the state of the generator and of the middleware."""
        return {
            "generator": _generator_to_text(self._generator),
            "middleware": [
                middleware.state_dict() if hasattr(middleware, "state_dict") else None
                for middleware in self._middleware
            ],
        }

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        if len(state["middleware"]) != len(self._middleware):
            raise CheckpointMismatch(
                f"the state is that of a buffer with {len(state['middleware'])} middleware, this "
                f"one has {len(self._middleware)}; use the same ones before loading"
            )
        self._generator = _generator_from_text(state["generator"])
        for middleware, own in zip(self._middleware, state["middleware"], strict=True):
            if hasattr(middleware, "load_state_dict") and own is not None:
                middleware.load_state_dict(own)


def check_count(name: str, value: object, *, at_least: int = 1) -> int:
    """Return an integer argument, checked.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r:.100}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return int(value)


def _generator_to_text(generator: np.random.Generator) -> str:
    """Return the state of a generator as JSON (its integers have more than 64 bits)."""
    return json.dumps(generator.bit_generator.state)


def _generator_from_text(text: str) -> np.random.Generator:
    """Return a generator in the state that :func:`_generator_to_text` wrote."""
    bit_generator = np.random.PCG64()
    bit_generator.state = json.loads(text)
    return np.random.Generator(bit_generator)
