"""``ding.framework.Parallel``: starts a program in several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import cloudpickle

from dmiddleware.ding.framework.events import EventLoop
from dmiddleware.ding.framework.global_task import _RouterFace
from dmiddleware.launch import launch
from dmiddleware.pipeline.current_node import current_node

__all__ = ["Parallel"]

_ENDLESS: Final = 10**9


class Parallel(_RouterFace):
    """This process's place in a run, and the way to start a run from Python.

    Events are for programs without a task; those with one use ``task.on`` and ``task.emit``.
    """

    _loop: EventLoop | None = None

    def on(self, event: str, fn: Callable[..., Any]) -> None:
        """Call a function at each event that another process emits."""
        self._events().on(event, fn)

    def once(self, event: str, fn: Callable[..., Any]) -> None:
        """Call a function at the next event that another process emits."""
        self._events().once(event, fn)

    def off(self, event: str, fn: Callable[..., Any] | None = None) -> None:
        """Call a function, or all, no longer."""
        self._events().off(event, fn)

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the handlers of an event in the other processes."""
        self._events().emit(event, *args, only_remote=True, **kwargs)

    @staticmethod
    def _events() -> EventLoop:
        if Parallel._loop is None:
            node = current_node()
            Parallel._loop = EventLoop("parallel", None if node is None else node.router)
        return Parallel._loop

    @classmethod
    def runner(
        cls,
        n_parallel_workers: int,
        mq_type: str = "nng",
        attach_to: Iterable[str] = (),
        protocol: str = "ipc",
        address: str | None = None,
        ports: int | Iterable[int] | None = None,
        topology: str = "mesh",
        labels: Iterable[str] = (),
        node_ids: int | Iterable[int] | None = None,
        auto_recover: bool = False,
        max_retries: float = float("inf"),
        startup_interval: float = 0,
        **others: Any,
    ) -> Callable[..., None]:
        """Return a function that runs a program in several processes, as ``ditask`` does.

        It raises a LaunchError if one of them fails.

        Args:
            n_parallel_workers: processes to start.
            mq_type: ``"nng"``.
            attach_to: addresses of processes of other runs to connect to.
            protocol: ``"ipc"`` or ``"tcp"``.
            address: the address to listen on, with ``"tcp"``.
            ports: the first port, or all.
            topology: ``"mesh"``, ``"star"`` or ``"alone"``.
            labels: names of the processes.
            node_ids: the first number, or all.
            auto_recover: start a process again that fails.
            max_retries: how often, at most.
            startup_interval: seconds between two starts.
            others: refused by the launcher, which names them.
        """
        options = {
            "ding": True,
            "parallel_workers": n_parallel_workers,
            "mq_type": mq_type,
            "protocol": protocol,
            "topology": topology,
            "attach_to": tuple(attach_to or ()),
            "labels": tuple(labels or ()),
            "address": address,
            "ports": _numbers(ports),
            "node_ids": _numbers(node_ids),
            "startup_interval": startup_interval,
            "on_failure": "restart" if auto_recover and max_retries else "abort",
            "max_restarts": int(min(max_retries, _ENDLESS)) or None,
            **others,
        }
        chosen = {name: value for name, value in options.items() if value not in (None, ())}

        def run(main: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
            program = partial(
                _call, sys.path, cloudpickle.dumps(partial(main, *arguments, **keywords))
            )
            with launch(program, roles=None, **chosen) as started:
                if started.wait():
                    started.result()  # which raises what has failed

        return run


def _call(import_path: list[str], program: bytes) -> Any:
    """Call a program whose modules may be where its parent finds them."""
    sys.path += [place for place in import_path if place not in sys.path]
    return cloudpickle.loads(program)()


def _numbers(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
