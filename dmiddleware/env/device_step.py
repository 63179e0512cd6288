"""One step of a vector env whose observations are tensors, without a value that the host reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmiddleware.env.batching import NestedArrays

__all__ = ["DeviceStep"]


@dataclass(slots=True)
class DeviceStep:
    """What a step returned, tensors of the envs' device; nobody writes to them again.

    Attributes:
        ready_obs: ``[E, …]`` tensors, or nested dicts and tuples of them: what to act on next.
        next_obs: ``[E, …]``, the true successors; the same object as ``ready_obs`` if the vector
            env returned no final observations.
        reward: ``[E] float32``, or ``[E, A]`` of several agents.
        done: ``[E] bool``, terminated or truncated.
        terminated: ``[E] bool``.
        truncated: ``[E] bool``.
        valid: ``[E] bool``, which rows are transitions; None: all of them.
        infos: the vector env's infos.
        last_infos: infos that are those of the last step where an episode ended; None: the vector
            env returned those of the next episode only.
        ready_infos: the infos that came with ``ready_obs``.
        has_final_obs: whether ``next_obs`` is right where an episode ended.
    """

    ready_obs: NestedArrays
    next_obs: NestedArrays
    reward: Any
    done: Any
    terminated: Any
    truncated: Any
    valid: Any
    infos: Mapping[str, Any]
    last_infos: Mapping[str, Any] | None
    ready_infos: Any
    has_final_obs: bool
