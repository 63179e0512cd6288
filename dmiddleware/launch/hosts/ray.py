"""Nodes as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.hosts.interface import (
    Ended,
    HostEvent,
    Note,
    Output,
    Reported,
    Started,
)
from dmiddleware.launch.hosts.ray_actor import RayNode, Slot
from dmiddleware.launch.options import Resources
from dmiddleware.launch.output import LineSplitter
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.status import NodeStatus
from dmiddleware.router.protocol.topology import socket_address

__all__ = ["RayHost", "folder_for_ray"]

_NEWS_S: Final = 10.0
_STOP_S: Final = 5.0
_AGAIN_S: Final = 0.2
_CONNECT_S: Final = 5.0
_N_CONTROL: Final = 4
_LONGEST_PARENT: Final = 25
"""Bytes of the path below which Ray's sockets have paths that the system can use."""
_JOB_CONFIG: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_DEFAULT: Final[Resources] = {"cpu": 1.0}
_RAY_NAMES: Final = {"cpu": "CPU", "gpu": "GPU"}


@dataclass(slots=True)
class _Actor:
    """The actor of one node.

    Attributes:
        node_id: the node.
        handle: the actor.
        slot: where it runs; None: not known (yet).
        config: what it runs; None: nothing yet.
        pending: its call that has not returned, by the name of the method.
        is_killed: whether this host has killed it.
        deadline: when it must be placed, on the monotonic clock.
    """

    node_id: int
    handle: Any
    listens: bool = False
    slot: Slot | None = None
    config: NodeConfig | None = None
    pending: dict[str, Any] = field(default_factory=dict)
    is_dead: bool = False
    deadline: float = 0.0
    lines: LineSplitter = field(default_factory=LineSplitter)


class RayHost:
    """Runs each node as an actor with the resources of its role, in one placement group.

    Entering the ``with`` block connects to Ray; :meth:`place` then places the actors. The end of
    this process ends them.

    Args:
        address: the address of the cluster; ``""``: the one that runs here or that
            ``RAY_ADDRESS`` names, otherwise a new one on this host.
        folder: the folder for the files of a new one, which only this user can enter; None: none is
            started.
        package: the folder with the program, which Ray sends to its nodes.
        may_restart: whether Ray restarts actors that have died.
        timeout_s: how long Ray may take to place an actor.
    """

    def __init__(
        self,
        *,
        address: str,
        folder: Path | None = None,
        package: Path,
        may_restart: bool,
        timeout_s: float,
    ) -> None:
        # Ray would try for many minutes to reach a cluster that has ended.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
        try:
            import ray
        except ImportError:
            raise LaunchError(
                "--platform ray needs Ray; install it with: pip install 'dmiddleware[ray]'"
            ) from None
        self._ray = ray
        self._address = address
        self._folder = folder
        self._umask: int | None = None
        self._package = package
        self._may_restart = may_restart
        self._timeout_s = timeout_s
        self._actors: dict[int, _Actor] = {}
        # The addresses of the plan that are not true any more, and those in their place.
        self._moved: dict[str, str] = {}
        self._events: list[HostEvent] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _check_reachable(self._address or os.environ.get("RAY_ADDRESS", ""))
        environment: dict[str, Any] = {}
        if "working_dir" not in _job_environment():
            environment["working_dir"] = str(self._package.resolve())
        # Without it, Ray prints a notice about a coming change of its own.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            with _own_sigterm():
                self._connect(
                    runtime_env=environment,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    include_dashboard=False if not self._address else None,
                )
        except SystemExit:
            self._ray.shutdown()
            self._exit.close()
            raise
        except (ConnectionError, ValueError, RuntimeError) as error:
            self._exit.close()
            raise LaunchError(
                f"cannot connect to Ray at {self._address or 'its default address'}: "
                f"{_first_line(error)}; start a cluster with `ray start --head`, or name it with "
                "--address"
            ) from error
        self._exit.callback(self._ray.shutdown)
        return self

    def _connect(self, **options: Any) -> None:
        """Connect to a cluster, or start one whose files no other user can read or change."""
        if self._folder is None:
            self._ray.init(self._address or None, **options)
            return
        # Ray lets everybody write to its folders, so they are in one that others cannot enter. The
        # actors take the mask back.
        self._umask = os.umask(0o077)
        try:
            self._ray.init("local", _temp_dir=str(self._folder / "r"), **options)
        finally:
            os.umask(self._umask)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)
        self._exit.close()

    def place(
        self, nodes: Mapping[int, tuple[str, Resources]], listening: Sequence[int]
    ) -> dict[int, str]:
        """Place the actors of all nodes.

        Args:
            nodes: the name and the resources of each node, by its id.
            listening: the nodes that need an address.

        Returns:
            The addresses of the listening nodes, such as ``tcp://10.0.0.5:25515``.

        Raises:
            LaunchError: if the cluster has too few resources, with what is missing, or cannot
                place all actors in time.
        """
        ray = self._ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [_bundle({**_DEFAULT, **resources}) for _, resources in nodes.values()]
        names = [name for name, _ in nodes.values()]
        _check_room(names, bundles, ray.nodes())
        group = placement_group(bundles, strategy="PACK")
        self._exit.callback(_quietly, remove_placement_group, group)
        if not group.wait(self._timeout_s):
            raise LaunchError(
                f"Ray did not place the {len(bundles)} nodes within {self._timeout_s:g} s "
                f"(--start-timeout): they need {_described(_sum(bundles))}, and {_free(ray)} are "
                "free; end other jobs, add Ray nodes, or use smaller --roles"
            )
        for position, (node_id, bundle) in enumerate(zip(nodes, bundles, strict=True)):
            others = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU")}
            options = ray.remote(RayNode).options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                resources=others or None,
                max_restarts=-1 if self._may_restart else 0,
                max_task_retries=0,
                max_concurrency=1 + _N_CONTROL,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=position
                ),
            )
            actor = _Actor(node_id, options.remote(self._umask), node_id in listening)
            actor.pending["reserve"] = actor.handle.reserve.remote(0, listens=actor.listens)
            self._actors[node_id] = actor
        calls = [actor.pending.pop("reserve") for actor in self._actors.values()]
        try:
            slots = ray.get(calls, timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray could not start an actor: {_first_line(error)}") from error
        for actor, slot in zip(self._actors.values(), slots, strict=True):
            actor.slot = Slot(*slot)
        return {
            node_id: _address(actor.slot)
            for node_id, actor in self._actors.items()
            if actor.listens and actor.slot is not None
        }

    def describe(self) -> str:
        """Return how many hosts of the cluster the actors run on."""
        hosts = {actor.slot.host for actor in self._actors.values() if actor.slot is not None}
        address = self._ray.get_runtime_context().gcs_address
        nodes = "1 node" if len(hosts) == 1 else f"{len(hosts)} nodes"
        return f"{nodes} of the Ray cluster at {address}"

    def start(self, config: NodeConfig, *, n_restarts: int) -> None:
        """Run a node in its actor, which Ray has restarted if it had died."""
        actor = self._actors[config.plan.node_id]
        actor.config = config
        actor.lines = LineSplitter()
        if n_restarts == 0 and actor.slot is not None:
            self._run(actor)
            return
        if not actor.is_dead:
            # The program has failed, and its process may be in any state.
            self._ray.kill(actor.handle, no_restart=False)
        actor.is_dead = False
        actor.deadline = time.monotonic() + self._timeout_s
        self._reserve(actor)

    def events(self, timeout_s: float) -> Iterator[HostEvent]:
        """Return what the actors have printed and reported, and which have ended."""
        events, self._events = self._events, []
        yield from events
        calls = {
            call: (actor, name)
            for actor in self._actors.values()
            for name, call in actor.pending.items()
        }
        if not calls:
            time.sleep(0.0 if events else timeout_s)
            return
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0.0)
        if not ready and not events:
            ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        for call in ready:
            actor, name = calls[call]
            if actor.pending.get(name) is call:  # an earlier event may have replaced it
                yield from self._take(actor, name, call)
        yield from self._find_late()

    def stop(self, node_id: int, reason: str) -> None:
        """Ask an actor to stop its node."""
        actor = self._actors[node_id]
        if not actor.is_dead:
            actor.handle.stop.remote(reason)

    def kill(self, node_id: int) -> None:
        """Kill the process of an actor."""
        self._ray.kill(self._actors[node_id].handle, no_restart=not self._may_restart)

    def dump_stacks(self, node_id: int) -> None:
        """Let an actor print what its threads are doing."""
        self._actors[node_id].handle.dump_stacks.remote()

    def leave(self, reason: str, timeout_s: float) -> None:
        """Stop all nodes in order."""
        for node_id in self._actors:
            self.stop(node_id, reason)
        calls = [
            member.pending["run"] for member in self._actors.values() if "run" in member.pending
        ]
        with contextlib.suppress(Exception):
            self._ray.wait(calls, num_returns=len(calls), timeout=timeout_s)

    def _reserve(self, actor: _Actor) -> None:
        """Ask a restarted actor where it runs; its peers know its port, if it is free there."""
        port = 0 if actor.slot is None else actor.slot.port
        actor.pending = {"reserve": actor.handle.reserve.remote(port, listens=actor.listens)}

    def _run(self, actor: _Actor) -> None:
        assert actor.slot is not None and actor.config is not None
        where = f"process {actor.slot.pid} of Ray node {actor.slot.host}"
        self._events.append(Started(actor.node_id, where))
        config = msgspec.json.encode(_moved(actor.config, self._moved))
        actor.pending = {
            "run": actor.handle.run.remote(config),
            "news": actor.handle.news.remote(_NEWS_S),
        }

    def _take(self, actor: _Actor, name: str, call: Any) -> Iterator[HostEvent]:
        """Yield what the return of a call means, and make the next one."""
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if name == "reserve" and time.monotonic() < actor.deadline:
                time.sleep(_AGAIN_S)  # Ray has not restarted it yet
                self._reserve(actor)
            else:
                yield from self._take_death(actor, error)
            return
        del actor.pending[name]
        if name == "reserve":
            self._move(actor, Slot(*result))
            self._run(actor)
        elif name == "news":
            actor.pending["news"] = actor.handle.news.remote(_NEWS_S)
            yield from _news(actor, result)
        else:
            code, pickled = result
            yield from self._last_news(actor)
            actor.pending = {}
            assert actor.config is not None
            if pickled and actor.config.result_file:
                Path(actor.config.result_file).write_bytes(pickled)
            yield Ended(actor.node_id, code)

    def _last_news(self, actor: _Actor) -> Iterator[HostEvent]:
        """Yield what an actor whose program has ended still has to say."""
        try:
            # It returns at once, because the program has ended; another one has what came after.
            if "news" in actor.pending:
                yield from _news(actor, self._ray.get(actor.pending["news"], timeout=_STOP_S))
            last = actor.handle.news.remote(0.0)
            yield from _news(actor, self._ray.get(last, timeout=_STOP_S))
        except (self._ray.exceptions.RayError, TimeoutError):
            pass  # its process has ended meanwhile
        yield Output(actor.node_id, b"", actor.lines.end())

    def _take_death(self, actor: _Actor, error: Exception) -> Iterator[HostEvent]:
        actor.is_dead = True
        actor.pending = {}
        yield Output(actor.node_id, b"", actor.lines.end())
        yield Ended(actor.node_id, 1, _why_died(error, actor.slot))

    def _move(self, actor: _Actor, slot: Slot) -> None:
        """Tell all others where an actor listens now."""
        before, actor.slot = actor.slot, slot
        assert before is not None and actor.config is not None
        old, new = _address(before), _address(slot)
        if not actor.listens or old == new:
            return
        self._moved[actor.config.plan.listen] = new
        self._events.append(Note(f"{actor.config.plan} moved from {old} to {new}"))
        for member in self._actors.values():
            if member is not actor and "run" in member.pending:
                member.handle.redial.remote(old, new)

    def _find_late(self) -> Iterator[HostEvent]:
        """Give up actors that Ray cannot place again."""
        for actor in self._actors.values():
            if "reserve" in actor.pending and time.monotonic() > actor.deadline:
                actor.pending = {}
                actor.is_dead = True
                yield Ended(
                    actor.node_id,
                    1,
                    f"Ray has not restarted its actor within {self._timeout_s:g} s "
                    f"(--start-timeout); {_free(self._ray)} are free",
                )


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, which Ray replaces by one that exits with code 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def _news(actor: _Actor, news: Any) -> Iterator[HostEvent]:
    output, statuses = news
    if output:
        yield Output(actor.node_id, output, actor.lines.feed(output))
    for status in statuses:
        yield Reported(actor.node_id, msgspec.json.decode(status, type=NodeStatus))


def _moved(config: NodeConfig, moved: Mapping[str, str]) -> NodeConfig:
    """Return the configuration with the addresses of today in place of those of the plan."""
    plan = config.plan
    today = replace(
        plan,
        listen=moved.get(plan.listen, plan.listen),
        dial=tuple(moved.get(address, address) for address in plan.dial),
    )
    run = msgspec.structs.replace(config.run, nodes=(today,))
    return msgspec.structs.replace(config, run=run)


def _address(slot: Slot) -> str:
    return socket_address("tcp", slot.host, slot.port)


def _bundle(resources: Resources) -> dict[str, float]:
    return {_RAY_NAMES.get(name, name): float(n) for name, n in resources.items() if n}


def _check_room(
    names: Sequence[str], bundles: Sequence[Mapping[str, float]], ray_nodes: Sequence[Any]
) -> None:
    """Refuse what the cluster could not place even if it were idle.

    Raises:
        LaunchError: with what is missing.
    """
    alive = [node["Resources"] for node in ray_nodes if node["Alive"]]
    for name, bundle in zip(names, bundles, strict=True):
        if not any(all(node.get(key, 0.0) >= n for key, n in bundle.items()) for node in alive):
            raise LaunchError(
                f"no node of the Ray cluster has {_described(bundle)} for {name}; the largest of "
                f"its {len(alive)} nodes have {_largest(alive)}; ask for less with --resources, or "
                "add a larger node"
            )
    total = _sum(bundles)
    have = _sum(alive)
    lacking = {key: n - have.get(key, 0.0) for key, n in total.items() if n > have.get(key, 0.0)}
    if lacking:
        raise LaunchError(
            f"the Ray cluster lacks {_described(lacking)}: the run's {len(bundles)} nodes need "
            f"{_described(total)}, and its {len(alive)} nodes have "
            f"{_described({key: have.get(key, 0.0) for key in total})}; use smaller --roles or "
            "--resources, or add nodes"
        )


def _sum(all_resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for resources in all_resources for name in resources)
    return {name: sum(resources.get(name, 0.0) for resources in all_resources) for name in names}


def _largest(alive: Sequence[Mapping[str, float]]) -> str:
    return _described(
        {key: max(resources.get(key, 0.0) for resources in alive) for key in ("CPU", "GPU")}
    )


def _described(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{n:g} {name}" for name, n in resources.items())


def _free(ray: Any) -> str:
    free = ray.available_resources()
    return _described({name: free.get(name, 0.0) for name in ("CPU", "GPU")})


def _why_died(error: Exception, slot: Slot | None) -> str:
    """Return what Ray knows about the death of an actor, in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [
        line for line in lines if "died" in line or "killed" in line or "exit" in line.lower()
    ]
    where = "" if slot is None else f" on Ray node {slot.host}"
    return f"its actor died{where}: {(reasons[-1] if reasons else _first_line(error))[:300]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def folder_for_ray(address: str) -> Path | None:
    """Return where to make a folder for the files of a new cluster; None: there is a cluster.

    Args:
        address: the address of the cluster, as for :class:`RayHost`.
    """
    root = os.environ.get("RAY_TMPDIR", "")
    of_ray = Path(root or tempfile.gettempdir()) / "ray"
    # `ray start` has noted the cluster of this host there.
    if address or os.environ.get("RAY_ADDRESS") or (of_ray / "ray_current_cluster").exists():
        return None
    is_short = len(os.fsencode(of_ray.parent)) <= _LONGEST_PARENT
    return of_ray.parent if root or is_short else Path("/tmp")


def _check_reachable(address: str) -> None:
    """Refuse the address of a cluster at which nothing listens.

    Raises:
        LaunchError: with the address.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return  # such as auto, or an address that Ray resolves
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            pass
    except OSError as error:
        raise LaunchError(
            f"cannot reach a Ray cluster at {address} ({error}); start one with `ray start "
            "--head`, or name another one with --address"
        ) from error


def _job_environment() -> Mapping[str, Any]:
    """Return the environment that `ray job submit` has given to this job."""
    with contextlib.suppress(ValueError):
        config = json.loads(os.environ.get(_JOB_CONFIG) or "{}")
        return dict(config.get("runtime_env") or {})
    return {}


def _quietly(function: Any, *args: Any) -> None:
    with contextlib.suppress(Exception):
        function(*args)
