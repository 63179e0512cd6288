"""What the launcher and a process of the run tell each other, a line of JSON at a time."""

from __future__ import annotations

import msgspec

from dmiddleware.router.transport.nng import TlsFiles

__all__ = ["NodeStatus", "NodeConfig"]


class NodeConfig(msgspec.Struct, kw_only=True):
    """What the launcher tells a process.

    Attributes:
        main: ``package.module.function``.
        package: folder to put first on the import path.
        run_id: of the run.
        node_id: of this process.
        roles: its roles.
        labels: its labels.
        listen: address to listen on; empty: none.
        dial: addresses to dial.
        n_peers: peers to wait for before the first step.
        start_timeout_s: how long to wait for them.
        key_hex: the run's key; empty: none.
        tls: certificates for ``tls+tcp``, or None.
        stamp: the same for all processes that one launcher starts, and for no others.
        attached: it joined a run that goes on without it: when it is told to end here, the others
            are left alone.
        shared_memory: folder for slabs of shared memory; empty: none.
        status_fd: where to write :class:`NodeStatus` lines.
    """

    main: str
    package: str
    run_id: str
    node_id: int
    roles: list[str]
    labels: list[str]
    listen: str
    dial: list[str]
    n_peers: int
    start_timeout_s: float
    key_hex: str
    tls: TlsFiles | None
    attached: bool = False
    stamp: str = ""
    shared_memory: str = ""
    status_fd: int


class NodeStatus(msgspec.Struct, kw_only=True):
    """How a process is getting on.

    Attributes:
        phase: ``starting``, ``running``, ``finished`` or ``failed``.
        address: where it listens.
        step: steps of its task.
        env_step: environment steps.
        train_iter: updates.
        blocked_s: seconds that it waited for peers: for their data, or for room at theirs.
        peers: how many peers are here.
        reason: why its task stopped.
        run_is_over: whether it was told that the whole run stops.
        error: the last line of its traceback.
    """

    phase: str
    address: str = ""
    step: int = 0
    env_step: int = 0
    train_iter: int = 0
    blocked_s: float = 0.0
    peers: int = 0
    reason: str = ""
    run_is_over: bool = False
    error: str = ""
