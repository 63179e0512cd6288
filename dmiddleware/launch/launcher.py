"""Turn the command line's options into a run: key, folders, ports and processes."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.descriptor_limit import descriptors_needed, raise_descriptor_limit
from dmiddleware.launch.display import choose_display
from dmiddleware.launch.guard import guard
from dmiddleware.launch.leftovers import new_mark
from dmiddleware.launch.main_function import check_main
from dmiddleware.launch.output import SteadyStream
from dmiddleware.launch.owned_folder import owned_folder
from dmiddleware.launch.plan import (
    LaunchRequest,
    NodeConfig,
    NodePlan,
    assign_roles,
    count_hubs,
    hub_index,
    needs_key,
    parse_roles,
    plan_nodes,
)
from dmiddleware.launch.platforms import (
    DEFAULT_PORT,
    Placement,
    count_copies,
    place,
)
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions
from dmiddleware.launch.variables import node_variables
from dmiddleware.pipeline import Role
from dmiddleware.router.protocol.topology import Scheme, count_listening
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.run_key import KEY_VARIABLE, check_key, make_key, read_key, write_key

__all__ = ["launch"]

_THIS_HOST: Final = "127.0.0.1"
_NODES_PER_HOST: Final = 1000
_FIRST_JOINED_BLOCK: Final = 1_000
_JOINED_BLOCKS: Final = 1_000_000
_N_PORTS: Final = 4000
_LOGS: Final = Path("logs")
_REDIS_USERNAME: Final = "DITASK_REDIS_USERNAME"
_REDIS_PASSWORD: Final = "DITASK_REDIS_PASSWORD"
_GUARD_S: Final = 2.0
"""Seconds after which nodes that should have ended without their launcher are killed."""


def launch(options: Mapping[str, Any], env: MutableMapping[str, str]) -> int:
    """Start the run that the command line describes, and return the exit code.

    Args:
        options: the command line's options by name.
        env: the environment variables, from which secrets are removed.

    Raises:
        LaunchError: if options contradict each other; nothing was started.
    """
    secret = _take_secrets(env)
    _check_text(options)
    mark = new_mark()
    stream = SteadyStream(sys.stdout)
    with owned_folder(Path(tempfile.gettempdir()), mark=mark) as run_folder:
        if run_folder is None:
            raise LaunchError(
                f"cannot write to the folder for temporary files, {tempfile.gettempdir()}; set "
                "TMPDIR to another one"
            )
        run_dir = run_folder.path
        scheme = "tls+tcp" if options["protocol"] == "tls+tcp" else "tcp"
        placement = place(options["platform"], env, port=_port(options), scheme=scheme)
        request = _request(options, placement, run_dir)
        ports, rendezvous_port = _free_ports(request)
        request = replace(request, rendezvous_port=rendezvous_port)
        plans = plan_nodes(request, free_ports=ports)
        elsewhere = dict(zip(request.elsewhere_ids, request.elsewhere, strict=True))
        variables = node_variables(options["env"], plans, elsewhere=elsewhere)
        raise_descriptor_limit(descriptors_needed(plans))
        check_main(options["main"], Path(options["package"]))
        is_alone = not request.joins and placement.count == 1
        key, is_new_key = _key(options, secret[KEY_VARIABLE], plans, is_alone=is_alone)
        tls, stamp = _tls(options), _stamp(placement, env)
        supervisor_options = SupervisorOptions(
            on_failure=options["on_failure"],
            max_restarts=options["max_restarts"],
            restart_window_s=options["restart_window"],
            startup_interval_s=options["startup_interval"],
            kill_after_s=options["kill_after"],
            hang_timeout_s=options["hang_timeout"],
            log_dir=_log_dir(options),
        )
        with owned_folder(_shared(options, plans), mark=mark) as shared:
            folders = [folder for folder in (run_folder, shared) if folder is not None]
            grace_s = supervisor_options.kill_after_s + _GUARD_S
            configs = [
                NodeConfig(
                    plan=plan,
                    main=options["main"],
                    arguments=options["arguments"],
                    package=str(Path(options["package"]).resolve()),
                    run_id=options["run_id"] or "run",
                    start_timeout_s=options["start_timeout"],
                    kill_after_s=supervisor_options.kill_after_s,
                    key_hex=key.hex(),
                    redis_username=secret[_REDIS_USERNAME] or None,
                    redis_password=secret[_REDIS_PASSWORD] or None,
                    mq_type=options["mq_type"],
                    tls=tls,
                    attached=request.joins,
                    may_grow=not is_new_key or request.protocol != "ipc",
                    stamp=stamp,
                    shared_memory="" if shared is None else str(shared.path),
                    variables=own,
                    run_dir=str(run_dir),
                    max_event_bytes=options["max_event_bytes"],
                    n_threads=_n_threads({**env, **own}, len(plans)),
                )
                for plan, own in zip(plans, variables, strict=True)
            ]
            with guard(mark, folders, grace_s=grace_s):
                with choose_display(stream) as display:
                    for plan in plans:
                        if plan.listen and request.protocol != "ipc":
                            display.note(f"node {plan.node_id} listens on {_where(plan)}")
                    if is_new_key and request.protocol != "ipc":
                        key_file = run_dir / "key"
                        write_key(key_file, key)
                        display.note(f"to join it from this host: --key-file {key_file}")
                    if options["platform"] == "local" and (n_copies := count_copies(env)) > 1:
                        display.note(
                            f"srun starts this command {n_copies} times, and each is a run of its "
                            "own; for one run, use --platform slurm with one task per host"
                        )
                    display.note(f"logs of the processes: {supervisor_options.log_dir}")
                    supervisor = Supervisor(
                        configs, options=supervisor_options, display=display, mark=mark
                    )
                    code = supervisor.run()
                for line in supervisor.conclusion:
                    display.note(line)
    _report_losses(stream, supervisor)
    return code


def _take_secrets(env: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the secrets from the environment, which every process of the run would inherit.

    The nodes receive them through a pipe.
    """
    names = (KEY_VARIABLE, _REDIS_USERNAME, _REDIS_PASSWORD)
    return {name: env.pop(name, "") for name in names}


def _check_text(options: Mapping[str, Any]) -> None:
    """Refuse options and folders that cannot be sent to the nodes."""
    texts = {"--" + name.replace("_", "-"): str(value) for name, value in options.items()}
    # These are not sent; see NodeConfig.
    texts = {name: text for name, text in texts.items() if name not in ("--arguments", "--env")}
    texts["the working directory"] = str(Path.cwd())
    texts["the folder for temporary files"] = tempfile.gettempdir()
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LaunchError(f"{name} is not valid UTF-8: {text!r}; use another name") from None


def _log_dir(options: Mapping[str, Any]) -> Path:
    """Return the folder for logs; without --log-dir, a new one."""
    if options["log_dir"] is not None:
        folder = Path(options["log_dir"])
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


def _request(options: Mapping[str, Any], placement: Placement, run_dir: Path) -> LaunchRequest:
    spec, protocol = _spec(options), _protocol(options)
    roles_of_hosts = [
        assign_roles(
            parse_roles(_roles_of_host(spec, host, placement.count, options)),
            options["parallel_workers"],
            host=host,
            n_hosts=placement.count,
        )
        for host in range(placement.count)
    ]
    if options["topology"] is None:
        has_coordinator = any(
            Role.COORDINATOR in names for host in roles_of_hosts for names in host
        )
        options = {**options, "topology": "mesh" if has_coordinator else "star"}
    hub_host = hub_index([tuple(chain.from_iterable(roles)) for roles in roles_of_hosts])
    has_hub = placement.index == hub_host
    hubs = [
        index for index, names in enumerate(roles_of_hosts[hub_host]) if Role.LEARNER in names
    ] or [0]
    redis = _redis(options, placement) if protocol == "redis" else ""
    attach_to = _attach_to(options)
    joins = bool(attach_to)
    ports = _numbers(options["ports"], "--ports")
    bind = options["bind"]
    if placement.count == 1:
        address = _address(options)
    else:
        _check_hosts(options)
        address = _THIS_HOST
        if protocol == "redis":
            addresses = [f"{redis}/{_NODES_PER_HOST * hub_host + hub}" for hub in hubs]
        else:
            addresses = [placement.hub_address(hub_host, number) for number in range(len(hubs))]
            address, bind = placement.address, bind or placement.bind
        if not has_hub and not joins:
            attach_to = tuple(addresses)
        if protocol != "redis":
            listens = options["topology"] == "mesh" or not attach_to
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
        main=options["main"],
        roles=roles,
        elsewhere=tuple(chain.from_iterable(roles_of_hosts)),
        elsewhere_ids=elsewhere_ids,
        n_before=n_before,
        has_hub=has_hub,
        protocol=protocol,
        address=address,
        bind=bind,
        ports=ports,
        topology=options["topology"],
        attach_to=attach_to,
        joins=joins,
        node_ids=_numbers(options["node_ids"], "--node-ids"),
        first_node_id=_NODES_PER_HOST * _block(placement, joins=joins),
        labels=_words(options["labels"]),
        run_dir=run_dir,
        redis=redis,
    )


def _check_hosts(options: Mapping[str, Any]) -> None:
    """Check the options that have no use, or another one, if a platform runs several hosts."""
    if options["protocol"] == "ipc" and options["mq_type"] != "redis":
        raise LaunchError("--protocol ipc cannot connect hosts; use --protocol tcp or tls+tcp")
    if options["address"]:
        raise LaunchError(
            f"--address {options['address']} has no effect with --platform {options['platform']}, "
            "which names the hosts; use --bind to choose the address to listen on"
        )
    if options["topology"] == "alone":
        raise LaunchError(
            "--topology alone connects no hosts; with --platform use star (the default) or mesh"
        )


def _address(options: Mapping[str, Any]) -> str:
    """Return this host's address, as other hosts reach it."""
    address, bind = options["address"], options["bind"]
    if address:
        return str(address)
    if bind.strip("[]") in ("0.0.0.0", "::"):
        raise LaunchError(
            f"--bind {bind} listens on all addresses of this host; give the one that other hosts "
            "dial with --address"
        )
    return bind or _THIS_HOST


def _port(options: Mapping[str, Any]) -> int | None:
    """Return the hub's port on a platform, which the other hosts dial; None: the default."""
    ports, spec = _numbers(options["ports"], "--ports"), _spec(options)
    port: int | None = spec.get("port", ports[0] if ports else None)
    if ports and port != ports[0]:
        raise LaunchError(
            f'--ports {options["ports"]} and the "port" {port} in --platform-spec differ; give '
            "only one of them"
        )
    return port


def _where(plan: NodePlan) -> str:
    return f"{plan.advertise} (bound to {plan.listen})" if plan.advertise else plan.listen


def _attach_to(options: Mapping[str, Any]) -> tuple[str, ...]:
    attach_to = _words(options["attach_to"])
    for address in attach_to:
        if address.startswith("redis://") != (options["mq_type"] == "redis"):
            raise LaunchError(
                f"--attach-to {address} does not fit --mq-type {options['mq_type']}; use "
                "--mq-type redis with redis://… addresses, and only with these"
            )
        if address.startswith("tls+tcp://") and options["protocol"] != "tls+tcp":
            raise LaunchError(
                f"--attach-to {address} needs certificates; use --protocol tls+tcp with --tls-ca "
                "and --tls-cert"
            )
    return attach_to


def _protocol(options: Mapping[str, Any]) -> Scheme:
    protocol: Scheme = options["protocol"]
    if options["mq_type"] != "redis":
        return protocol
    if protocol != "ipc":
        raise LaunchError(f"--protocol {protocol} has no effect with --mq-type redis; leave it out")
    if importlib.util.find_spec("redis") is None:
        raise LaunchError(
            "--mq-type redis needs redis-py; install it with: pip install 'dmiddleware[redis]'"
        )
    return "redis"


def _redis(options: Mapping[str, Any], placement: Placement) -> str:
    """Return the prefix of the nodes' addresses in redis."""
    if placement.count > 1 and not options["run_id"]:
        raise LaunchError(
            "the hosts of a run find each other in redis by the run's name; give all of them the "
            "same --run-id"
        )
    run_id = options["run_id"] or f"run-{secrets.token_hex(4)}"
    return f"{options['redis_url'].rstrip('/')}/{run_id}"


def _block(placement: Placement, *, joins: bool) -> int:
    """Return which block of node ids belongs to this launcher.

    Launchers that join a run cannot know each other, so they choose a block at random.
    """
    if not joins or placement.count > 1:
        return placement.index
    return _FIRST_JOINED_BLOCK + secrets.randbelow(_JOINED_BLOCKS)


def _stamp(placement: Placement, env: Mapping[str, str]) -> str:
    """Return a name that all nodes of this run share, and no other run has."""
    job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID", "")
    if placement.count > 1 and job:
        # The launchers on the other hosts derive the same one.
        return f"slurm-{job}.{step}"
    return secrets.token_hex(16)


def _key(
    options: Mapping[str, Any],
    from_env: str,
    plans: list[NodePlan],
    *,
    is_alone: bool,
) -> tuple[bytes, bool]:
    """Return the run's key, and whether it was generated here.

    It comes from a file or the environment; for a run on a single host it is generated.
    """
    file = options["key_file"]
    if file is not None:
        return read_key(file), False
    if from_env:
        return check_key(from_env.encode(), source=KEY_VARIABLE), False
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


def _shared(options: Mapping[str, Any], plans: list[NodePlan]) -> Path | None:
    """Return the parent of the folder for shared memory; None: nothing would be shared."""
    if len(plans) == 1 or options["mq_type"] == "redis" or not options["shared_memory"]:
        return None
    return Path(options["shared_memory"]).resolve()


def _n_threads(env: Mapping[str, str], n_nodes: int) -> int:
    """Return each node's share of the cores, or 0 for what torch or OMP_NUM_THREADS chooses.

    OpenMP's threads wait actively for each other. Where several processes have more threads than
    there are cores, each of them is many times slower.
    """
    if n_nodes == 1 or "OMP_NUM_THREADS" in env:
        return 0
    n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, n_cores // n_nodes)


def _tls(options: Mapping[str, Any]) -> TlsFiles | None:
    ca, cert = options["tls_ca"], options["tls_cert"]
    if options["protocol"] != "tls+tcp":
        if ca or cert:
            raise LaunchError("--tls-ca and --tls-cert are for --protocol tls+tcp")
        return None
    for option, file in (("--tls-ca", ca), ("--tls-cert", cert)):
        if not file or not Path(file).is_file():
            raise LaunchError(f"--protocol tls+tcp needs {option}, a PEM file; got {file!r}")
    return TlsFiles(ca=ca, cert_and_key=cert, server_name=options["tls_name"])


def _roles_of_host(
    spec: Mapping[str, Any], index: int, count: int, options: Mapping[str, Any]
) -> str:
    """Return a host's roles: its entry in the platform's spec, or ``--roles``."""
    per_host = spec.get("roles")
    if per_host is None:
        return str(options["roles"])
    if not isinstance(per_host, list) or len(per_host) != count:
        raise LaunchError(
            f'--platform-spec: "roles" needs one entry for each of the {count} hosts, '
            f"got {per_host!r}"
        )
    if not per_host[index]:
        raise LaunchError(
            f'--platform-spec: "roles" is empty for host {index}; name roles, as in "collector=2"'
        )
    return str(per_host[index])


def _spec(options: Mapping[str, Any]) -> dict[str, Any]:
    text = options["platform_spec"]
    if not text:
        return {}
    if options["platform"] == "local":
        raise LaunchError("--platform-spec is for --platform slurm or k8s")
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise LaunchError(f"--platform-spec is not valid JSON: {error}") from error
    unknown = set(spec) - {"roles", "port"} if isinstance(spec, dict) else {str(spec)}
    if unknown:
        raise LaunchError(
            f"--platform-spec takes the keys roles and port, got {', '.join(sorted(unknown))}"
        )
    port = spec.get("port", DEFAULT_PORT)
    if type(port) is not int or not 0 < port < 65536:
        raise LaunchError(f'--platform-spec: "port" must be a number from 1 to 65535, got {port!r}')
    return dict(spec)


def _free_ports(request: LaunchRequest) -> tuple[list[int], int]:
    """Find ports that are free on this host: one per node that will listen, and one for learners.

    They are below the range from which systems choose ports for outgoing connections: such a
    connection could otherwise take the port of a node that is being restarted. The search starts at
    a random port, so runs that start together choose different ones.
    """
    wanted = count_listening(
        request.topology, len(request.roles), request.attach_to, count_hubs(request)
    )
    if request.protocol in ("ipc", "redis"):
        wanted = 0
    elif request.ports:
        _check_ports(request, wanted)
        wanted = 0
    ports: list[int] = []
    first = secrets.randbelow(_N_PORTS)
    for offset in range(_N_PORTS):
        port = DEFAULT_PORT + (first + offset) % _N_PORTS
        is_last = len(ports) == wanted
        host = _THIS_HOST if is_last else request.bind or request.address
        if port in request.ports or not _is_free(host, port):
            continue
        if is_last:
            return ports, port
        ports.append(port)
    return ports, 0


def _check_ports(request: LaunchRequest, n_listening: int) -> None:
    """Refuse ports that are taken: the processes of this run would join the one that has them."""
    last, n_more = request.ports[-1], max(n_listening - len(request.ports), 0)
    ports = (*request.ports[:n_listening], *range(last + 1, last + 1 + n_more))
    host = request.bind or request.address
    for port in (port for port in ports if port < 65536):
        try:
            _probe(host, port, reuse=True)
        except OSError as error:
            # The nodes report other errors when they listen.
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"port {port} of {host} is in use, maybe by another run of this program; give "
                    "other --ports, or stop that run"
                ) from error


def _is_free(host: str, port: int) -> bool:
    try:
        _probe(host, port, reuse=False)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise LaunchError(
            f"cannot listen on {host} ({error.strerror}); give an address of this host with "
            "--address, and if other hosts reach it by another one, the local one with --bind"
        ) from error
    return True


def _probe(host: str, port: int, *, reuse: bool) -> None:
    """Bind a socket to a port and close it.

    Args:
        host: the local address.
        port: the port.
        reuse: whether the port may have connections that were closed a short time ago.

    Raises:
        OSError: if that is not possible.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        if reuse:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() for word in words):
        raise LaunchError(f"{option} must be a list of numbers such as 1,2,3, got {text!r}")
    return tuple(map(int, words))
