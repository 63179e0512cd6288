"""Copies between a buffer and its users."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dmiddleware.data.batch import Batch, map_leaves
from dmiddleware.data.buffer import BufferMiddleware
from dmiddleware.data.buffer_middleware.base import ActionMiddleware, Chain
from dmiddleware.data.deque_buffer import BufferedData

__all__ = ["clone_object"]


def clone_object() -> BufferMiddleware:
    """Copy items on their way in and out, so that no one changes what the buffer holds by accident.

    Without it a DequeBuffer holds, and gives out, the very objects that were pushed. Tensors are
    cloned without their gradient's history, everything else is copied deeply.
    """
    return _CloneObject()


class _CloneObject(ActionMiddleware):
    instead: ClassVar[str | None] = "it copies rows on push and sample anyway; leave this out"

    @property
    def name(self) -> str:
        return "clone_object"

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> Any:
        return chain(_clone(data), meta=_clone(meta))

    def update(
        self, chain: Chain, index: int, data: Any = None, meta: Mapping[str, Any] | None = None
    ) -> Any:
        return chain(index, data=_clone(data), meta=_clone(meta))

    def sample(self, chain: Chain, **kwargs: Any) -> Any:
        return _clone(chain(**kwargs))


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Batch):
        return map_leaves(_clone, value)
    if isinstance(value, BufferedData):
        return BufferedData(_clone(value.data), value.index, _clone(value.meta))
    if type(value) is dict:
        return {key: _clone(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_clone(item) for item in value)
    return copy.deepcopy(value)
