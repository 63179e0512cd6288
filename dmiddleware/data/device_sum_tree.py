"""Prioritized draws on a device: a sum tree whose nodes are one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.data.samplers import PrioritySamplerSettings

__all__ = ["DeviceSumTree"]


class DeviceSumTree:
    """Draws slots in proportion to their priorities, as :class:`PrioritySampler` does.

    Node ``i`` is the sum of the nodes ``2 i`` and ``2 i + 1``; the leaves are the last half. Every
    operation works level by level on all of its slots at once, and reads nothing back.

    Args:
        size: number of slots.
        settings: the exponent of the priorities, and what is added to each.
        device: where the nodes are.
    """

    def __init__(self, size: int, settings: PrioritySamplerSettings, device: torch.device) -> None:
        self._alpha, self._eps = settings.alpha, settings.eps
        self._depth = max(size - 1, 1).bit_length()
        self._first = 1 << self._depth
        self._nodes = torch.zeros(2 * self._first, dtype=torch.float64, device=device)
        self._highest = torch.ones((), dtype=torch.float64, device=device)

    def fill(self, start: int, stop: int) -> None:
        """Give the slots from ``start`` to ``stop`` the highest priority so far."""
        self._fill(start, stop, (self._highest + self._eps) ** self._alpha)

    def empty(self, start: int, stop: int) -> None:
        """Never draw the slots from ``start`` to ``stop`` until they are filled again."""
        self._fill(start, stop, 0.0)

    def fill_where(self, start: int, chosen: torch.Tensor) -> None:
        """Give some of the slots from ``start`` on the highest priority so far.

        Args:
            start: the first of them.
            chosen: ``[n]`` bool; other slots keep what they have.
        """
        stop = start + len(chosen)
        mass = (self._highest + self._eps) ** self._alpha
        present = self._nodes[self._first + start : self._first + stop]
        self._fill(start, stop, torch.where(chosen, mass, present))

    def count(self) -> int:
        """Return how many slots can be drawn, which waits for the device."""
        return int((self._nodes[self._first :] > 0).sum())

    def _fill(self, start: int, stop: int, mass: torch.Tensor | float) -> None:
        first, last = self._first + start, self._first + stop - 1
        self._nodes[first : last + 1] = mass
        while first > 1:
            first, last = first >> 1, last >> 1
            below = self._nodes[2 * first : 2 * last + 2]
            self._nodes[first : last + 1] = below[::2] + below[1::2]

    def set(self, slot: torch.Tensor, priority: torch.Tensor, *, is_held: torch.Tensor) -> None:
        """Set the priorities of slots where ``is_held``; of equal slots, any one counts.

        Slots that are empty stay so.

        Args:
            slot: int64 ``[n]``.
            priority: ``[n]``; after one that is negative or not finite, all weights are NaN.
            is_held: ``[n]`` bool.
        """
        value = priority.to(self._nodes.dtype)
        value = value.where((value >= 0) & value.isfinite(), torch.nan)
        node = slot + self._first
        is_held = is_held & (self._nodes[node] != 0)
        self._highest = torch.maximum(self._highest, value.where(is_held, 0.0).amax())
        mass = ((value + self._eps) ** self._alpha).where(value.isfinite(), torch.nan)
        self._nodes[node] = torch.where(is_held, mass, self._nodes[node])
        for _ in range(self._depth):
            node = node >> 1
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def draw(
        self, n: int, beta: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw slots, one from each of ``n`` equal parts of the sum.

        Args:
            n: how many.
            beta: how much of the bias the weights correct.
            generator: draws on the device of the nodes.

        Returns:
            ``[n] int64``, and their weights ``[n] float32``, at most 1.
        """
        nodes = self._nodes
        lots = torch.rand(n, generator=generator, device=nodes.device, dtype=nodes.dtype)
        mass = (torch.arange(n, device=nodes.device) + lots) * (nodes[1] / n)
        node = torch.ones_like(mass, dtype=torch.int64)
        for _ in range(self._depth):
            mass_left = nodes[2 * node]
            # A slot without mass is never chosen, even if sums of the nodes are rounded.
            goes_right = (mass >= mass_left) & (nodes[2 * node + 1] > 0)
            mass = torch.where(goes_right, mass - mass_left, mass)
            node = 2 * node + goes_right
        drawn = nodes[node]
        weight = (drawn / drawn.amin()).pow(-beta)
        return node - self._first, weight.where(nodes[1].isfinite(), torch.nan).float()

    def state_dict(self) -> dict[str, Any]:
        """Return the masses and the highest priority, on the CPU."""
        return {"nodes": self._nodes.cpu().clone(), "highest": self._highest.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, of a tree of the same size."""
        self._nodes.copy_(state["nodes"])
        self._highest.copy_(state["highest"])
