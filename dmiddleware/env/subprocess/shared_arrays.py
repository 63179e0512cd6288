"""The memory that a manager shares with the processes of its envs."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.batching import NestedArrays, map_space
from dmiddleware.env.team import reward_shape_of

__all__ = ["SharedArrays"]

_ALIGNMENT = 64


class SharedArrays:
    """Arrays with one row per env, shared between processes.

    The memory is an unnamed file, which disappears when the last process that has it open ends,
    however it ends. Messages between the processes order reads and writes, without locks.

    Args:
        observation_space: of a single env.
        action_space: of a single env.
        env_num: the number of rows.
        fd: the file that another process made; None makes a new one. The object owns it.

    Attributes:
        action: ``[E, …]``, nested like the action space; written by the manager.
        next_obs: ``[E, …]``, nested like the observation space: the successors.
        first_obs: ``[E, …]``, nested like the observation space: first obs of new episodes.
        reward: ``[E] float64``, or ``[E, A]`` for several agents.
        terminated: ``[E] bool``.
        truncated: ``[E] bool``.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        env_num: int,
        *,
        fd: int | None = None,
    ) -> None:
        shapes: list[tuple[tuple[int, ...], np.dtype[Any]]] = []

        def reserve(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
            shapes.append(((env_num, *shape), dtype))
            return len(shapes) - 1

        parts = {
            "action": map_space(reserve, action_space),
            "next_obs": map_space(reserve, observation_space),
            "first_obs": map_space(reserve, observation_space),
            "reward": reserve(reward_shape_of(observation_space), np.dtype(np.float64)),
            "terminated": reserve((), np.dtype(np.bool_)),
            "truncated": reserve((), np.dtype(np.bool_)),
        }
        offsets, size = _layout(shapes)
        self._fd = _unnamed_file(size) if fd is None else fd
        # The arrays keep the map alive; it need not be closed.
        memory = mmap.mmap(self._fd, size)
        arrays = [
            np.ndarray(shape, dtype, buffer=memory, offset=offset)
            for (shape, dtype), offset in zip(shapes, offsets, strict=True)
        ]
        views = {name: _resolved(part, arrays) for name, part in parts.items()}
        self.action: NestedArrays = views["action"]
        self.next_obs: NestedArrays = views["next_obs"]
        self.first_obs: NestedArrays = views["first_obs"]
        self.reward: npt.NDArray[np.float64] = views["reward"]
        self.terminated: npt.NDArray[np.bool_] = views["terminated"]
        self.truncated: npt.NDArray[np.bool_] = views["truncated"]

    def fileno(self) -> int:
        """Return the file's descriptor, to be sent to another process."""
        return self._fd

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _layout(shapes: list[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for shape, dtype in shapes:
        offsets.append(end)
        n_bytes = math.prod(shape) * dtype.itemsize
        end += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, mmap.PAGESIZE)


def _unnamed_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("dmiddleware-env")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _resolved(part: Any, arrays: list[npt.NDArray[Any]]) -> NestedArrays:
    if isinstance(part, dict):
        return {key: _resolved(item, arrays) for key, item in part.items()}
    if isinstance(part, tuple):
        return tuple(_resolved(item, arrays) for item in part)
    return arrays[part]
