"""A view on a part of a buffer."""

from __future__ import annotations

from typing import Any

from dmiddleware.data.buffer import Buffer, BufferMiddleware
from dmiddleware.data.buffer_middleware.base import ActionMiddleware, Chain

__all__ = ["sample_range_view"]


def sample_range_view(
    buffer: Buffer, start: int | None = None, end: int | None = None
) -> BufferMiddleware:
    """Draw only from a part of the buffer by age, as ``slice(start, end)`` names it.

    ``sample_range_view(buffer, -1000)`` draws from the thousand newest. A ``sample_range`` of the
    caller's counts within that part.

    Args:
        buffer: a buffer of either kind.
        start: position of the oldest item to draw, negative from the newest; None is the oldest.
        end: position behind the newest item to draw; None goes to the newest.
    """
    return _SampleRangeView(buffer, slice(start, end))


class _SampleRangeView(ActionMiddleware):
    def __init__(self, buffer: Buffer, view: slice) -> None:
        super().__init__(buffer)
        self._view = view

    @property
    def name(self) -> str:
        return "sample_range_view"

    def sample(
        self, chain: Chain, *args: Any, sample_range: slice | None = None, **kwargs: Any
    ) -> Any:
        view = self._view
        if sample_range is not None:
            part = range(len(self.buffer))[view][sample_range]
            view = slice(part.start, part.stop, part.step)
        return chain(*args, sample_range=view, **kwargs)
