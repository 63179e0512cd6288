"""The base of buffer middleware that is an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dmiddleware.data.buffer import Buffer
from dmiddleware.data.deque_buffer import DequeBuffer
from dmiddleware.data.tensor_buffer import TensorBuffer

__all__ = ["ActionMiddleware", "Chain"]

Chain = Callable[..., Any]


class ActionMiddleware:
    """A middleware with a method for each action that it has to do with.

    A method ``push``, ``sample``, ``update``, ``delete`` or ``clear`` takes the chain and the
    action's arguments; actions without a method pass by.

    Attributes:
        instead: what to do for a TensorBuffer, if this middleware is not for it.
    """

    instead: ClassVar[str | None] = None

    def __init__(self, buffer: Buffer | None = None) -> None:
        self._buffer = buffer

    def __call__(self, action: str, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        """Run this middleware's part of an action."""
        method = getattr(self, action, None)
        return chain(*args, **kwargs) if method is None else method(chain, *args, **kwargs)

    def attach(self, buffer: Buffer) -> None:
        """Check that the buffer is one that this middleware serves.

        Raises:
            TypeError: if it is not.
            ValueError: if the middleware was made for another buffer.
        """
        if isinstance(buffer, TensorBuffer) and self.instead is not None:
            raise TypeError(f"{self.name} is not for a TensorBuffer: {self.instead}")
        if self._buffer is not None and self._buffer is not buffer:
            raise ValueError(f"{self.name} was made for another buffer; make one for each")
        self._buffer = buffer

    @property
    def name(self) -> str:
        """The name under which users know it."""
        return type(self).__name__

    @property
    def buffer(self) -> Buffer:
        """The buffer that it serves."""
        if self._buffer is None:
            raise ValueError(f"{self.name} serves no buffer yet; give it to buffer.use(…)")
        return self._buffer

    @property
    def deque(self) -> DequeBuffer:
        """The buffer that it serves, which is a DequeBuffer."""
        assert isinstance(self.buffer, DequeBuffer)  # attach refuses the other kind
        return self.buffer
