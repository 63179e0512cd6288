"""The base class of the buffers: buffer middleware around their actions, and a lock."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np

from dmiddleware.classic.arguments import check_count
from dmiddleware.data.buffer_state import generator_from_text, generator_to_text
from dmiddleware.errors import CheckpointMismatch
from dmiddleware.process.closing import Closing

__all__ = ["ACTIONS", "Buffer", "BufferMiddleware"]

ACTIONS = ("push", "sample", "update", "delete", "clear")
"""The actions that buffer middleware wraps."""

BufferMiddleware: TypeAlias = Callable[..., Any]
"""``middleware(action, chain, *args, **kwargs)``; calls ``chain(*args, **kwargs)`` to continue."""


class Buffer(Closing):
    """Base class of the buffers.

    A buffer middleware is called as ``middleware(action, chain, *args, **kwargs)`` with the
    action's name (one of :data:`ACTIONS`) and its arguments. It calls ``chain(*args, **kwargs)``,
    which runs the rest of the chain and finally the action, and returns the result. It may change
    arguments and result, call the chain several times, or not at all. The first one added is the
    outermost.

    A buffer middleware may also have ``attach(buffer)``, called by :meth:`use`, and
    ``state_dict()`` and ``load_state_dict(state)``, which become part of the buffer's state.

    Methods hold a lock, so several threads may share a buffer.

    Args:
        size: capacity in items.
        seed: seed of the buffer's random generator; None takes one from the system.
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
    def settings(self) -> dict[str, Any]:
        """The class and the arguments that are plain values."""
        return {"type": type(self).__name__, "size": self._size}

    @property
    def generator(self) -> np.random.Generator:
        """The buffer's random generator, which buffer middleware uses too."""
        return self._generator

    @property
    def lacks_priorities(self) -> bool:
        """Whether items are drawn by priority, but no priority was ever set."""
        return any(getattr(one, "lacks_priorities", False) for one in self._middleware)

    def __len__(self) -> int:
        raise NotImplementedError

    def count(self) -> int:
        """Return the number of items held."""
        return len(self)

    def use(self, middleware: BufferMiddleware) -> Self:
        """Add a buffer middleware, inside those added before.

        Returns:
            The buffer itself, so that calls can be chained.

        Raises:
            TypeError: if it is not callable, or does not work on this kind of buffer.
        """
        if isinstance(middleware, type):
            raise TypeError(
                f"buffer.use takes an object, not a class; write use({middleware.__name__}(...))"
            )
        if not callable(middleware):
            raise TypeError(
                "buffer middleware must be callable as middleware(action, chain, *args, **kwargs), "
                f"got {middleware!r:.100}; the stock ones are in dmiddleware.classic"
            )
        attach = getattr(middleware, "attach", None)
        if attach is not None:
            attach(self)
        self._middleware.append(middleware)
        return self

    def close(self) -> None:
        """Free what the buffer holds; may be called twice."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the buffer with everything it holds, its generator and its buffer middleware.

        Raises:
            TypeError: for a buffer whose storage is shared memory or files.
        """
        with self._lock:
            self._check_copyable()
            copied = type(self).__new__(type(self))
            memo[id(self)] = copied
            memo[id(self._lock)] = threading.RLock()
            vars(copied).update(
                {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
            )
        return copied

    def _check_copyable(self) -> None:
        """Raise a TypeError if the buffer cannot be copied."""

    def _through(self, action: str, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._chain(action, do)(*args, **kwargs)

    def _chain(self, action: str, do: Callable[..., Any]) -> Callable[..., Any]:
        """Return an action with the buffer middleware around it."""
        chain = do
        for middleware in reversed(self._middleware):
            chain = partial(middleware, action, chain)
        return chain

    def _common_state(self) -> dict[str, Any]:
        """Return the state of the generator and of the buffer middleware."""
        return {
            "generator": generator_to_text(self._generator),
            "middleware": [
                middleware.state_dict() if hasattr(middleware, "state_dict") else None
                for middleware in self._middleware
            ],
        }

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        if len(state["middleware"]) != len(self._middleware):
            raise CheckpointMismatch(
                f"the state comes from a buffer with {len(state['middleware'])} buffer middleware, "
                f"but this one has {len(self._middleware)}; add the same ones before loading"
            )
        self._generator = generator_from_text(state["generator"])
        for middleware, own in zip(self._middleware, state["middleware"], strict=True):
            if hasattr(middleware, "load_state_dict") and own is not None:
                middleware.load_state_dict(own)
