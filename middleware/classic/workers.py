"""Collectors and learners that talk to their coordinator over the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.worker.comm import (
    COMM_COLLECTOR_REGISTRY,
    COMM_LEARNER_REGISTRY,
    BaseCommCollector,
    BaseCommLearner,
    LinkServer,
    Store,
)
from dmiddleware.worker.comm.comm_worker import CommWorker
from middleware.classic.router_link import RouterLink

__all__ = ["RouterCollector", "RouterLearner"]

_CHECK_S = 60.0


class _RouterWorker(CommWorker[Any]):
    """A worker whose messages and data travel through the router.

    Args:
        cfg: what differs from ``default_config()``.
        task: carries the events; None: a new one on the router of the current node.

    Raises:
        ConfigError: for an unusable config, or without a router.
    """

    def __init__(
        self, cfg: Mapping[str, Any] | None = None, *, task: Task[Any] | None = None
    ) -> None:
        super().__init__(cfg)
        self._link = RouterLink(self.kind, task=task, timeout_s=self._cfg.timeout_s)
        self._server = LinkServer(self, self._link)

    def _open_store(self) -> Store:
        return self._link.store

    def start(self) -> None:
        """Start to answer the coordinator; a second call does nothing."""
        super().start()
        self._server.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the run is over, or this process is asked to stop.

        Args:
            timeout_s: the most seconds to wait; None means no limit.

        Returns:
            Whether it is.
        """
        if timeout_s is not None:
            return self._link.wait_until_stopped(timeout_s)
        while not self._link.wait_until_stopped(_CHECK_S):
            pass
        return True

    def close(self) -> None:
        """Abandon the current task, and end; may be called twice."""
        try:
            super().close()
        finally:
            self._server.close()


@COMM_COLLECTOR_REGISTRY.register("router")
class RouterCollector(_RouterWorker, BaseCommCollector):
    """Runs the collector tasks of a coordinator that is reached through the router.

    Args:
        cfg: what differs from ``default_config()``.
        task: carries the events; None: a new one on the router of the current node.

    Raises:
        ConfigError: for an unusable config, or without a router.
    """


@COMM_LEARNER_REGISTRY.register("router")
class RouterLearner(_RouterWorker, BaseCommLearner):
    """Runs the learner tasks of a coordinator that is reached through the router.

    Args:
        cfg: what differs from ``default_config()``.
        task: carries the events; None: a new one on the router of the current node.

    Raises:
        ConfigError: for an unusable config, or without a router.
    """

    def start(self) -> None:
        """Start to answer the coordinator; a second call does nothing.

        Raises:
            ConfigError: if this is one of several ranks.
        """
        super().start()
        if self.world_size > 1:
            self.close()
            raise ConfigError(
                f"this learner is one of {self.world_size} ranks, and type 'router' cannot combine "
                "them; use type 'flask_fs' and a LearnerAggregator"
            )
