"""The base of the stock middleware."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, TypeVar

from dmiddleware.pipeline import ChainView, Context, Task
from dmiddleware.settings import Settings
from middleware.context import OnlineRLContext
from middleware.support.part_name import PartSettings

__all__ = ["BaseMiddleware", "stock_middleware"]

C = TypeVar("C", bound=Context, contravariant=True)

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class BaseMiddleware(ABC, Generic[C]):
    """Base of middleware that are classes, typed with the context that they work on.

    A subclass writes :meth:`__call__`, and overrides what it needs of the rest: the declarations
    that :class:`~dmiddleware.pipeline.Declarations` explains, and the attributes below. One with a
    state also has ``state_dict()`` and ``load_state_dict(state)``.

    Attributes:
        settings: its options, which :class:`~middleware.Experiment` writes to ``config.yaml``.
        components: what else it writes there by name: objects with settings of their own, such as
            buffers, and plain values.
        snapshot_parts: objects whose state :class:`~middleware.SnapshotSaver` saves, by name.
        computes_n_step: whether the rows that it provides have n-step returns.
        metric_prefix: the word that the names of its metrics begin with, if no other middleware of
            the chain may use it.
    """

    default_context: ClassVar[type[Context]] = OnlineRLContext
    settings: Settings | Mapping[str, Any] = _NOTHING
    components: Mapping[str, Any] = _NOTHING
    snapshot_parts: Mapping[str, Any] = _NOTHING
    computes_n_step: bool = False
    metric_prefix: str | None = None

    @cached_property
    def part_name(self) -> str | None:
        """The named part of the chain that it belongs to: the option ``name``; None: no part."""
        return self.settings.name if isinstance(self.settings, PartSettings) else None

    @abstractmethod
    def __call__(self, ctx: C) -> Iterator[None] | None:
        """Do its part of a step; with one ``yield``, the rest runs on the way back."""

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Return what is wrong with the chain, each problem with its remedy; change nothing."""
        return ()

    def bind(self, chain: ChainView) -> None:
        """Take what it needs from the rest of the chain, before its set-up."""

    def setup(self, task: Task[Any]) -> None:
        """Get ready for the first step."""

    def close(self) -> None:
        """Release what it holds, also after an error; may be called twice."""


def stock_middleware(chain: ChainView) -> Iterator[BaseMiddleware[Any]]:
    """Yield the middleware of a chain that have this base, in order."""
    for part in chain.middleware:
        if isinstance(part, BaseMiddleware):
            yield part
