"""Turn the command line's options into a run: key, folders, ports and processes."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.descriptor_limit import descriptors_needed, raise_descriptor_limit
from dmiddleware.launch.display import BothDisplays, Display, choose_display
from dmiddleware.launch.early_imports import early_imports
from dmiddleware.launch.guard import guard
from dmiddleware.launch.hosts.interface import Host
from dmiddleware.launch.hosts.local import LocalHost
from dmiddleware.launch.leftovers import new_mark
from dmiddleware.launch.main_function import check_main
from dmiddleware.launch.options import LaunchOptions, RoleCounts, parse_roles
from dmiddleware.launch.output import SteadyStream
from dmiddleware.launch.owned_folder import OwnedFolder, owned_folder
from dmiddleware.launch.plan import (
    DEFAULT_RUN_ID,
    LaunchRequest,
    NodeConfig,
    NodePlan,
    RunPlan,
    assign_roles,
    default_topology,
    hub_index,
    listening_nodes,
    needs_key,
    plan_at,
    plan_nodes,
)
from dmiddleware.launch.platforms import Placement, count_copies, place, slurm_step
from dmiddleware.launch.ports import free_ports, port_of_run
from dmiddleware.launch.resources import check_resource_roles, local_shares, resources_of
from dmiddleware.launch.roles import leads
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions
from dmiddleware.launch.variables import node_variables
from dmiddleware.process.signals import HeldSignals
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.run_key import KEY_VARIABLE, check_key, make_key, read_key, write_key

__all__ = ["Program", "execute"]

_THIS_HOST: Final = "127.0.0.1"
_NODES_PER_HOST: Final = 1000
_FIRST_JOINED_BLOCK: Final = 1_000
_JOINED_BLOCKS: Final = 1_000_000
_LOGS: Final = Path("logs")
_GUARD_S: Final = 2.0
"""Seconds after which nodes that should have ended without their launcher are killed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is not imported by its name, and where its results go.

    Attributes:
        pickled: the function, as cloudpickle has saved it; empty: it is imported by its name.
        imports: what its nodes will import, such as ``torch``.
        results: the folder for what it returns in each node, ``<node id>.pickle``; None: nowhere.
    """

    pickled: bytes = b""
    imports: Sequence[str] = ()
    results: Path | None = None

    def result_file(self, node_id: int) -> str:
        """Return the file for what a node returns; empty: none."""
        return "" if self.results is None else str(self.results / f"{node_id}.pickle")


_PROGRAM_OF_OPTIONS: Final = Program()


def execute(
    options: LaunchOptions,
    env: MutableMapping[str, str],
    *,
    program: Program = _PROGRAM_OF_OPTIONS,
    display: Display | None = None,
) -> int:
    """Start a run, watch it until it has ended, and return the exit code.

    Args:
        options: what to run, and how.
        env: the environment variables, from which the key is removed.
        program: the program, if it is not only a name.
        display: shows the run too, beside standard output.

    Raises:
        LaunchError: if options contradict each other; nothing was started.
    """
    # Every process of the run would inherit it; the nodes receive it through a pipe.
    given_key = env.pop(KEY_VARIABLE, "")
    mark = new_mark()
    stream = SteadyStream(sys.stdout)
    prepare = _on_ray if options.platform == "ray" else _on_this_host
    with owned_folder(Path(tempfile.gettempdir()), mark=mark) as folder:
        if folder is None:
            raise LaunchError(
                f"cannot write to the folder for temporary files, {tempfile.gettempdir()}; set "
                "TMPDIR to another one"
            )

        def note_signal(reason: str) -> None:
            stream.write(f"[ditask] the run was stopped: {reason}\n")

        signals = HeldSignals(note_signal)
        start = _Start(options, env, given_key, mark, folder, program, signals)
        with _prepared(prepare(start), signals) as ready:
            supervisor_options = SupervisorOptions(
                on_failure=options.on_failure,
                max_restarts=options.max_restarts,
                restart_window_s=options.restart_window,
                startup_interval_s=options.startup_interval,
                kill_after_s=options.kill_after,
                hang_timeout_s=options.hang_timeout,
                log_dir=_log_dir(options),
            )
            with choose_display(stream) as shown:
                display = shown if display is None else BothDisplays(shown, display)
                for note in (*ready.notes, f"logs of the processes: {supervisor_options.log_dir}"):
                    display.note(note)
                supervisor = Supervisor(
                    ready.configs, host=ready.host, options=supervisor_options, display=display
                )
                code = supervisor.run()
            for line in supervisor.conclusion:
                display.note(line)
    _report_losses(stream, supervisor)
    return code


@dataclass(frozen=True, slots=True)
class _Start:
    """What a run starts with."""

    options: LaunchOptions
    env: Mapping[str, str]
    given_key: str
    mark: str
    folder: OwnedFolder
    program: Program
    signals: HeldSignals

    @property
    def step(self) -> str:
        """The step of a Slurm job in which the launcher runs as its platform; empty: none."""
        return slurm_step(self.env) if self.options.platform == "slurm" else ""

    @property
    def run_id(self) -> str:
        """The name of the run: that of the step is part of it, unless it joins another run."""
        step = "" if self.options.attach_to else self.step
        return "-".join(name for name in (self.options.run_id, step) if name) or DEFAULT_RUN_ID

    def run_plan(self, key: bytes, **differences: Any) -> RunPlan:
        """Return what the nodes have in common."""
        options = self.options
        return RunPlan(
            **{
                "nodes": (),
                "run_id": self.run_id,
                "key_hex": key.hex(),
                "start_timeout_s": options.start_timeout,
                "tls": _tls(options),
                "max_event_bytes": options.max_event_bytes,
                "launch": options.recorded(),
                "ding": options.ding,
                **differences,
            }
        )

    def node_config(
        self, run: RunPlan, plan: NodePlan, variables: dict[str, str], **more: Any
    ) -> NodeConfig:
        """Return the configuration of one node."""
        options = self.options
        return NodeConfig(
            run=msgspec.structs.replace(run, nodes=(plan,)),
            main=options.main,
            pickled_program=self.program.pickled,
            result_file=self.program.result_file(plan.node_id),
            arguments=options.arguments,
            kill_after_s=options.kill_after,
            variables=variables,
            **more,
        )


@dataclass(frozen=True, slots=True)
class _Ready:
    """Nodes that can be started, their host, and notes to show before."""

    host: Host
    configs: list[NodeConfig]
    notes: list[str]


@contextlib.contextmanager
def _prepared(
    preparation: contextlib.AbstractContextManager[_Ready], signals: HeldSignals
) -> Iterator[_Ready]:
    """Prepare a run; a signal that comes meanwhile ends it in order."""
    with contextlib.ExitStack() as stack:
        with signals:
            ready = stack.enter_context(preparation)
        yield ready


@contextlib.contextmanager
def _on_this_host(start: _Start) -> Iterator[_Ready]:
    """Prepare the processes of this host, which are all of them, or a part on a platform."""
    options, env, run_dir = start.options, start.env, start.folder.path
    scheme = "tls+tcp" if options.protocol == "tls+tcp" else "tcp"
    port = options.hub_port
    if port is None and start.step:
        port = port_of_run(start.step)
    placement = place(options.platform, env, port=port, scheme=scheme)
    request = _request(options, placement, run_dir)
    ports, rendezvous_port = free_ports(request)
    request = replace(request, rendezvous_port=rendezvous_port)
    plans = plan_nodes(request, free_ports=ports)
    elsewhere = dict(zip(request.elsewhere_ids, request.elsewhere, strict=True))
    variables = node_variables(options.env, plans, elsewhere=elsewhere)
    raise_descriptor_limit(descriptors_needed(plans))
    imports = start.program.imports
    if not start.program.pickled:
        check_main(options.main, options.package, options.arguments)
        imports = early_imports(options.main, options.package, ding=options.ding)
    shares = local_shares(options.role_resources, plans, env)
    is_alone = not request.joins and placement.count == 1
    key, is_new_key = _key(options, start.given_key, plans, is_alone=is_alone)
    notes = []
    for plan in plans:
        if plan.listen and request.protocol != "ipc":
            name = f" (--run-id {start.run_id})" if start.step else ""
            notes.append(f"node {plan.node_id} listens on {_where(plan)}{name}")
    if is_new_key and request.protocol != "ipc":
        key_file = run_dir / "key"
        write_key(key_file, key)
        notes.append(f"to join it from this host: --key-file {key_file}")
    if options.platform == "local" and (n_copies := count_copies(env)) > 1:
        notes.append(
            f"srun starts this command {n_copies} times, and each is a run of its own; for one "
            "run, use --platform slurm with one task per host"
        )
    with owned_folder(_shared(options, plans), mark=start.mark) as shared:
        run = start.run_plan(
            key,
            run_token=_run_token(start.step, placement, env),
            attached=request.joins,
            # Kubernetes stops single pods and replaces them.
            replaced=options.platform == "k8s" and placement.count > 1,
            may_grow=not is_new_key or request.protocol != "ipc",
            shared_memory="" if shared is None else str(shared.path),
        )
        configs = []
        for plan, its_variables, share in zip(plans, variables, shares, strict=True):
            its_variables = {**share, **its_variables}
            configs.append(
                start.node_config(
                    run,
                    plan,
                    its_variables,
                    package=str(options.package.resolve()),
                    run_dir=str(run_dir),
                )
            )
        folders = [path for path in (start.folder, shared) if path is not None]
        grace_s = options.kill_after + _GUARD_S
        with (
            guard(start.mark, folders, grace_s=grace_s),
            LocalHost(start.mark, configs=configs, imports=imports) as host,
        ):
            yield _Ready(host, configs, notes)


@contextlib.contextmanager
def _on_ray(start: _Start) -> Iterator[_Ready]:
    """Prepare actors of a Ray cluster."""
    from dmiddleware.launch.hosts.ray import RayHost, folder_for_ray

    options = start.options
    assigned = assign_roles(options.role_counts, options.parallel_workers)
    topology = options.topology or default_topology(assigned)
    listening = listening_nodes(assigned, topology)
    check_resource_roles(options.role_resources, assigned)
    unplaced = plan_at(assigned, {})
    variables = node_variables(options.env, unplaced)
    if not start.program.pickled:
        check_main(options.main, options.package, options.arguments)
    key = _given_key(options, start.given_key) or make_key()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(owned_folder(folder_for_ray(options.address), mark=start.mark))
        host = RayHost(
            address=options.address,
            folder=None if folder is None else folder.path,
            package=options.package,
            may_restart=options.on_failure == "restart",
            timeout_s=options.start_timeout,
        )
        # Before Ray's threads, because it forks.
        folders = [path for path in (start.folder, folder) if path is not None]
        stack.enter_context(guard(start.mark, folders, grace_s=options.kill_after + _GUARD_S))
        stack.enter_context(host)
        nodes = {
            plan.node_id: (str(plan), resources_of(options.role_resources, plan.roles))
            for plan in unplaced
        }
        with start.signals.interruptible():
            addresses = host.place(nodes, listening)
        plans = plan_at(
            assigned, {index: addresses[index] for index in listening}, labels=options.labels
        )
        run = start.run_plan(key, run_token=secrets.token_hex(16))
        configs = [
            start.node_config(run, plan, its_variables, package=".", directory=str(Path.cwd()))
            for plan, its_variables in zip(plans, variables, strict=True)
        ]
        yield _Ready(host, configs, [f"{len(plans)} actors on {host.describe()}"])


def _log_dir(options: LaunchOptions) -> Path:
    """Return the folder for logs; without --log-dir, a new one."""
    if options.log_dir is not None:
        folder = Path(options.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"cannot make the folder --log-dir {folder} ({error.strerror}); give another one"
            ) from error
        return folder
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    for folder in (_LOGS / name, *(_LOGS / f"{name}-{number}" for number in range(2, 1000))):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        return folder
    return Path(tempfile.mkdtemp(prefix="logs-of-ditask-"))


def _report_losses(stream: SteadyStream, supervisor: Supervisor) -> None:
    """Report what the launcher could not write, on standard error."""
    losses = [f"could not write to {log.path}: {log.error}" for log in supervisor.lost_logs()]
    if stream.n_lost:
        losses.append(
            f"could not write {stream.n_lost} lines or updates to standard output: {stream.error}"
        )
    if supervisor.display_error is not None:
        losses.append(f"could not show all output: {supervisor.display_error!r}")
    errors = SteadyStream(sys.stderr)
    for loss in losses:
        errors.write(f"[ditask] {loss}\n")


def _request(options: LaunchOptions, placement: Placement, run_dir: Path) -> LaunchRequest:
    roles_of_hosts = [
        assign_roles(
            _roles_of_host(options, host, placement.count),
            options.parallel_workers,
            host=host,
            n_hosts=placement.count,
        )
        for host in range(placement.count)
    ]
    topology = options.topology or default_topology(tuple(chain.from_iterable(roles_of_hosts)))
    hub_host = hub_index([tuple(chain.from_iterable(roles)) for roles in roles_of_hosts])
    has_hub = placement.index == hub_host
    hubs = [index for index, names in enumerate(roles_of_hosts[hub_host]) if leads(names)] or [0]
    attach_to, ports, bind = options.attach_to, options.ports, options.bind
    joins = bool(attach_to)
    if placement.count == 1:
        address = options.host_address()
    else:
        options.check_for_hosts()
        address, bind = placement.address, bind or placement.bind
        if not has_hub and not joins:
            attach_to = tuple(
                placement.hub_address(hub_host, number) for number in range(len(hubs))
            )
        listens = topology == "mesh" or not attach_to
        ports = (ports or (placement.port,)) if listens else ()
    elsewhere_ids = tuple(
        _NODES_PER_HOST * host + number
        for host, roles in enumerate(roles_of_hosts)
        if host != placement.index
        for number in range(len(roles))
    )
    n_before = sum(map(len, roles_of_hosts[: placement.index]))
    roles = roles_of_hosts.pop(placement.index)
    return LaunchRequest(
        main=options.main,
        roles=roles,
        elsewhere=tuple(chain.from_iterable(roles_of_hosts)),
        elsewhere_ids=elsewhere_ids,
        n_before=n_before,
        has_hub=has_hub,
        protocol=options.protocol,
        address=address,
        bind=bind,
        ports=ports,
        topology=topology,
        attach_to=attach_to,
        joins=joins,
        node_ids=options.node_ids,
        first_node_id=_NODES_PER_HOST * _block(placement, joins=joins),
        labels=options.labels,
        run_dir=run_dir,
    )


def _roles_of_host(options: LaunchOptions, index: int, count: int) -> RoleCounts:
    """Return a host's roles: its entry in the platform's spec, or ``--roles``."""
    per_host = options.platform_spec.roles
    if per_host is None:
        return options.role_counts
    if len(per_host) != count:
        raise LaunchError(
            f'--platform-spec: "roles" needs one entry for each of the {count} hosts, '
            f"got {list(per_host)!r}"
        )
    if not per_host[index]:
        raise LaunchError(
            f'--platform-spec: "roles" is empty for host {index}; name roles, as in "collector=2"'
        )
    return parse_roles(per_host[index])


def _where(plan: NodePlan) -> str:
    return f"{plan.advertise} (bound to {plan.listen})" if plan.advertise else plan.listen


def _block(placement: Placement, *, joins: bool) -> int:
    """Return which block of node ids belongs to this launcher.

    Launchers that join a run cannot know each other, so they choose a block at random.
    """
    if not joins or placement.count > 1:
        return placement.index
    return _FIRST_JOINED_BLOCK + secrets.randbelow(_JOINED_BLOCKS)


def _run_token(step: str, placement: Placement, env: Mapping[str, str]) -> str:
    """Return what all nodes of this start of the run share, and no other start has."""
    if placement.count > 1 and step:
        # The launchers on the other hosts derive the same one.
        return f"{step}.{env.get('SLURM_RESTART_COUNT', '0')}"
    return secrets.token_hex(16)


def _given_key(options: LaunchOptions, from_env: str) -> bytes:
    """Return the key in the file or the environment; empty: neither has one."""
    if options.key_file is not None:
        return read_key(options.key_file)
    return check_key(from_env.encode(), source=KEY_VARIABLE) if from_env else b""


def _key(
    options: LaunchOptions,
    from_env: str,
    plans: list[NodePlan],
    *,
    is_alone: bool,
) -> tuple[bytes, bool]:
    """Return the run's key, and whether it was generated here.

    It comes from a file or the environment; for a run on a single host it is generated.
    """
    if key := _given_key(options, from_env):
        return key, False
    if needs_key(plans):
        raise LaunchError(
            f"other hosts can reach this run, so it needs a key; set {KEY_VARIABLE} or pass "
            "--key-file on every host (make a key with: openssl rand -hex 32)"
        )
    if is_alone:
        return make_key(), True
    raise LaunchError(
        "joining a run requires its key; start both sides with the same --key-file, or with "
        f"{KEY_VARIABLE} set to the same value"
    )


def _shared(options: LaunchOptions, plans: list[NodePlan]) -> Path | None:
    """Return the parent of the folder for shared memory; None: nothing would be shared."""
    if len(plans) == 1 or not options.shared_memory:
        return None
    return Path(options.shared_memory).resolve()


def _tls(options: LaunchOptions) -> TlsFiles | None:
    if options.protocol != "tls+tcp":
        return None
    return TlsFiles(ca=options.tls_ca, cert_and_key=options.tls_cert, server_name=options.tls_name)
