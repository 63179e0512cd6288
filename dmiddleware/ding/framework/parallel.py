"""``ding.framework.Parallel``: starts a program in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dmiddleware.ding.framework.global_task import _RouterFace
from dmiddleware.launch import launch

__all__ = ["Parallel"]


class Parallel(_RouterFace):
    """This process's place in a run, and the way to start a run from Python."""

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
            max_retries: how often.
            startup_interval: seconds between two starts.
            others: refused by the launcher, which names them.
        """
        options = {
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
            "on_failure": "restart" if auto_recover else "abort",
            **others,
        }
        chosen = {name: value for name, value in options.items() if value not in (None, ())}

        def run(main: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
            program = partial(main, *arguments, **keywords)
            with launch(program, roles=None, **chosen) as started:
                started.wait()

        return run


def _numbers(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
