"""The face of ``ding.data.shm_buffer``: arrays that processes share."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["ShmBuffer", "ShmBufferContainer"]


class ShmBuffer:
    """An array that a process and its children share.

    Args:
        dtype: NumPy's type.
        shape: the shape.
        copy_on_get: whether :meth:`get` returns a copy, or the shared memory itself.
        ctype: ``torch.Tensor`` to get tensors; None: arrays.
    """

    def __init__(
        self,
        dtype: Any,
        shape: tuple[int, ...],
        copy_on_get: bool = True,
        ctype: type[torch.Tensor] | None = None,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self.copy_on_get, self.ctype = copy_on_get, ctype
        self.buffer = multiprocessing.Array("b", math.prod(self.shape) * self.dtype.itemsize)

    def fill(self, src_arr: np.ndarray) -> None:
        """Write an array."""
        np.copyto(self._view(), src_arr)

    def get(self) -> Any:
        """Read the array."""
        view = self._view().copy() if self.copy_on_get else self._view()
        return torch.from_numpy(view) if self.ctype is torch.Tensor else view

    def _view(self) -> np.ndarray:
        memory: Any = self.buffer.get_obj()
        view: np.ndarray = np.frombuffer(memory, self.dtype).reshape(self.shape)
        return view


class ShmBufferContainer:
    """A :class:`ShmBuffer`, or one for each key of a dictionary of shapes."""

    def __init__(self, dtype: Any, shape: Any, copy_on_get: bool = True) -> None:
        self._parts: Any = (
            {key: ShmBufferContainer(dtype[key], shape[key], copy_on_get) for key in shape}
            if isinstance(shape, Mapping)
            else ShmBuffer(dtype, shape, copy_on_get)
        )

    def fill(self, src_arr: Any) -> None:
        """Write an array, or one for each key."""
        if isinstance(self._parts, ShmBuffer):
            self._parts.fill(src_arr)
        else:
            for key, part in self._parts.items():
                part.fill(src_arr[key])

    def get(self) -> Any:
        """Read the array, or one for each key."""
        if isinstance(self._parts, ShmBuffer):
            return self._parts.get()
        return {key: part.get() for key, part in self._parts.items()}
