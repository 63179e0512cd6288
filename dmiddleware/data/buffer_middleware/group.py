"""What is done to groups after sampling with ``groupby``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from dmiddleware.data.buffer import BufferMiddleware
from dmiddleware.data.buffer_middleware.base import ActionMiddleware, Chain
from dmiddleware.data.deque_buffer import BufferedData

__all__ = ["group_sample", "padding"]


def group_sample(
    size_in_group: int, *, ordered_in_group: bool = True, max_use_in_group: bool = True
) -> BufferMiddleware:
    """Keep only some items of each group that ``buffer.sample(n, groupby=…)`` gives.

    Args:
        size_in_group: number of items to keep; a smaller group is kept whole.
        ordered_in_group: keep consecutive items, from a random one on; if False, random ones.
        max_use_in_group: begin where ``size_in_group`` items follow. If False, begin anywhere, so
            that the last items are as likely as others and some groups come out shorter.
    """
    return _GroupSample(size_in_group, ordered_in_group, max_use_in_group)


def padding(policy: Literal["random", "none"] = "random") -> BufferMiddleware:
    """Fill up the groups of a sample to the size of the largest.

    Args:
        policy: ``"random"`` repeats random items of the same group, ``"none"`` adds
            ``BufferedData(None, None, {})``.
    """
    if policy not in ("random", "none"):
        raise ValueError(f"policy is 'random' or 'none', got {policy!r}")
    return _Padding(policy)


class _GroupSample(ActionMiddleware):
    instead: ClassVar[str | None] = "build it with unroll_len to sample stretches of episodes"

    def __init__(self, size: int, ordered: bool, max_use: bool) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size_in_group is at least 1, got {size}")
        self._size = size
        self._ordered = ordered
        self._max_use = max_use

    @property
    def name(self) -> str:
        return "group_sample"

    def sample(self, chain: Chain, *, groupby: str | None = None, **kwargs: Any) -> Any:
        if groupby is None:
            raise ValueError(
                "group_sample works on groups; sample with groupby=<a key of meta>, or use a "
                "buffer without it"
            )
        groups = chain(groupby=groupby, **kwargs)
        return [self._keep(group) for group in groups]

    def _keep(self, group: list[BufferedData]) -> list[BufferedData]:
        generator = self.buffer.generator
        if not self._ordered:
            chosen = generator.choice(len(group), min(self._size, len(group)), replace=False)
            return [group[i] for i in chosen]
        last_start = max(len(group) - self._size, 0) if self._max_use else len(group) - 1
        start = int(generator.integers(last_start + 1))
        return group[start : start + self._size]


class _Padding(ActionMiddleware):
    instead: ClassVar[str | None] = "with unroll_len it pads sequences itself and gives a mask"

    def __init__(self, policy: str) -> None:
        super().__init__()
        self._policy = policy

    @property
    def name(self) -> str:
        return "padding"

    def sample(self, chain: Chain, **kwargs: Any) -> Any:
        groups = chain(**kwargs)
        if not groups or isinstance(groups[0], BufferedData):
            return groups
        longest = max(map(len, groups))
        return [group + self._filling(group, longest - len(group)) for group in groups]

    def _filling(self, group: list[BufferedData], n: int) -> list[BufferedData]:
        if self._policy == "none":
            return [BufferedData(None, None) for _ in range(n)]
        chosen = [group[i] for i in self.buffer.generator.integers(len(group), size=n)]
        return [BufferedData(item.data, item.index, dict(item.meta)) for item in chosen]
