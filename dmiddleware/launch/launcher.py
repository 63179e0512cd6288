"""From the command line's options to a run: keys, folders, ports, processes."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dmiddleware.errors import LaunchError
from dmiddleware.launch.display import choose_display
from dmiddleware.launch.plan import (
    LaunchRequest,
    NodePlan,
    count_processes,
    needs_key,
    parse_roles,
    plan_nodes,
)
from dmiddleware.launch.platforms import DEFAULT_PORT, Placement, place
from dmiddleware.launch.shared_folder import shared_folder
from dmiddleware.launch.status import NodeConfig
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions
from dmiddleware.router.protocol.topology import Protocol
from dmiddleware.router.transport.nng import TlsFiles

__all__ = ["launch"]

KEY_VARIABLE: Final = "DITASK_KEY"
_SHORTEST_KEY: Final = 32
_NODES_PER_HOST: Final = 1000
_FIRST_JOINED_BLOCK: Final = 1_000
_JOINED_BLOCKS: Final = 1_000_000
_N_PORTS: Final = 4000
_RUN_DIR_PREFIX: Final = "ditask-"


def launch(options: Mapping[str, Any], env: Mapping[str, str]) -> int:
    """Run what the command line asks for; returns the exit code.

    Args:
        options: the command line's options by name.
        env: the environment's variables.

    Raises:
        LaunchError: if options cannot work together; nothing was started.
    """
    with _run_dir() as run_dir:
        scheme = "tls+tcp" if options["protocol"] == "tls+tcp" else "tcp"
        port = _spec(options).get("port")
        placement = place(options["platform"], env, port=port, scheme=scheme)
        request = _request(options, placement, run_dir)
        plans = plan_nodes(request, free_ports=_free_ports(request))
        joins = _joins(options)
        key, invented = _key(options, env, plans, alone=not joins and placement.count == 1)
        stamp = _stamp(placement, env)
        configs = [_config(options, plan, key, attached=joins, stamp=stamp) for plan in plans]
        console = Console(stderr=False)
        with shared_folder(_shared(options, plans)) as shared, choose_display(console) as display:
            for config in configs:
                config.shared_memory = "" if shared is None else str(shared)
            for plan in plans:
                if plan.listen and request.protocol != "ipc":
                    display.note(f"node {plan.node_id} listens on {plan.listen}")
            if invented and request.protocol != "ipc":
                display.note(f"to join it from this host: --key-file {_write_key(run_dir, key)}")
            supervisor = Supervisor(
                configs,
                plans,
                options=SupervisorOptions(
                    on_failure=options["on_failure"],
                    max_restarts=options["max_restarts"],
                    startup_interval_s=options["startup_interval"],
                ),
                display=display,
            )
            return supervisor.run()


def _request(options: Mapping[str, Any], placement: Placement, run_dir: Path) -> LaunchRequest:
    spec = _spec(options)
    roles = options["roles"]
    address, protocol = options["address"], _protocol(options)
    redis = _redis(options, placement) if protocol == "redis" else ""
    attach_to = _attach_to(options)
    ports = _numbers(options["ports"], "--ports")
    if placement.count > 1:
        if protocol == "ipc":
            raise LaunchError("several hosts cannot meet over ipc; use --protocol tcp or tls+tcp")
        roles = _of_host(spec, placement.index, placement.count, options)
        if protocol == "redis":
            attach_to = (*attach_to, *((f"{redis}/0",) if placement.index else ()))
        else:
            address, ports = placement.address, ports or (placement.port,)
            attach_to = (*attach_to, *placement.attach_to)
    request = LaunchRequest(
        main=options["main"],
        package=options["package"],
        roles=parse_roles(roles),
        parallel_workers=options["parallel_workers"],
        protocol=protocol,
        address=address,
        ports=ports,
        topology=options["topology"],
        attach_to=attach_to,
        node_ids=_numbers(options["node_ids"], "--node-ids"),
        first_node_id=_NODES_PER_HOST * _block(options, placement),
        labels=_words(options["labels"]),
        run_dir=run_dir,
        redis=redis,
        on_failure=options["on_failure"],
        max_restarts=options["max_restarts"],
    )
    if placement.index:
        return request
    elsewhere = [
        replace(request, roles=parse_roles(_of_host(spec, index, placement.count, options)))
        for index in range(1, placement.count)
    ]
    return replace(request, n_elsewhere=sum(map(count_processes, elsewhere)))


def _joins(options: Mapping[str, Any]) -> bool:
    """Tell whether these processes join a run that goes on without them."""
    return bool(_words(options["attach_to"]))


def _attach_to(options: Mapping[str, Any]) -> tuple[str, ...]:
    attach_to = _words(options["attach_to"])
    for address in attach_to:
        if address.startswith("redis://") != (options["mq_type"] == "redis"):
            raise LaunchError(
                f"--attach-to {address} and --mq-type {options['mq_type']} do not fit together; "
                "redis://… addresses go with --mq-type redis, and only they"
            )
        if address.startswith("tls+tcp://") and options["protocol"] != "tls+tcp":
            raise LaunchError(
                f"--attach-to {address} needs certificates; use --protocol tls+tcp with --tls-ca "
                "and --tls-cert"
            )
    return attach_to


def _protocol(options: Mapping[str, Any]) -> Protocol:
    protocol: Protocol = options["protocol"]
    if options["mq_type"] != "redis":
        return protocol
    if protocol != "ipc":
        raise LaunchError(
            f"--protocol {protocol} is for --mq-type nng; with redis there is nothing to choose"
        )
    if importlib.util.find_spec("redis") is None:
        raise LaunchError(
            "--mq-type redis needs redis-py; install it: pip install 'dmiddleware[redis]'"
        )
    return "redis"


def _redis(options: Mapping[str, Any], placement: Placement) -> str:
    """Return what the addresses of this run's nodes in redis begin with."""
    if placement.count > 1 and not options["run_id"]:
        raise LaunchError(
            "the hosts of a run find each other in redis by its name; give all the same --run-id"
        )
    run_id = options["run_id"] or f"run-{secrets.token_hex(4)}"
    return f"{options['redis_url'].rstrip('/')}/{run_id}"


def _block(options: Mapping[str, Any], placement: Placement) -> int:
    """Return which thousand of node ids is this launcher's; one that joins takes any."""
    if not _joins(options) or placement.count > 1:
        return placement.index
    return _FIRST_JOINED_BLOCK + secrets.randbelow(_JOINED_BLOCKS)


def _config(
    options: Mapping[str, Any], plan: NodePlan, key: bytes, *, attached: bool, stamp: str
) -> NodeConfig:
    return NodeConfig(
        main=options["main"],
        package=str(Path(options["package"]).resolve()),
        run_id=options["run_id"] or "run",
        node_id=plan.node_id,
        roles=list(plan.roles),
        labels=list(plan.labels),
        listen=plan.listen,
        dial=list(plan.dial),
        n_peers=plan.n_peers,
        start_timeout_s=options["start_timeout"],
        key_hex=key.hex(),
        tls=_tls(options),
        attached=attached,
        stamp=stamp,
        status_fd=-1,
    )


def _stamp(placement: Placement, env: Mapping[str, str]) -> str:
    """Return a word that the processes of this run have in common with no other run's."""
    job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID", "")
    if placement.count > 1 and job:
        # The launchers on the other hosts find the same.
        return f"slurm-{job}.{step}"
    return secrets.token_hex(16)


def _key(
    options: Mapping[str, Any],
    env: Mapping[str, str],
    plans: list[NodePlan],
    *,
    alone: bool,
) -> tuple[bytes, bool]:
    """Return the run's key, and whether it is new.

    It comes from a file, from the environment, or, on one host, from nowhere.
    """
    file = options["key_file"]
    text = env.get(KEY_VARIABLE, "").encode() if file is None else file.read_bytes().strip()
    if text or file is not None:
        if len(text) < _SHORTEST_KEY:
            raise LaunchError(
                f"the key in {file or KEY_VARIABLE} has {len(text)} characters, at least "
                f"{_SHORTEST_KEY} are needed; make one with: openssl rand -hex 32"
            )
        return text, False
    if alone and not needs_key(plans):
        return secrets.token_hex(32).encode(), True
    if needs_key(plans):
        raise LaunchError(
            f"other hosts can reach this run, so it needs a key; set {KEY_VARIABLE} or give "
            "--key-file on every host (make a key with: openssl rand -hex 32)"
        )
    raise LaunchError(
        f"to join a run that goes on already, this side needs its key; start both with the same "
        f"--key-file, or with {KEY_VARIABLE} set to the same value"
    )


def _shared(options: Mapping[str, Any], plans: list[NodePlan]) -> Path | None:
    """Return where to make the folder for shared memory; None: nobody would share it."""
    if len(plans) == 1 or options["mq_type"] == "redis" or not options["shared_memory"]:
        return None
    return Path(options["shared_memory"]).resolve()


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


def _of_host(spec: Mapping[str, Any], index: int, count: int, options: Mapping[str, Any]) -> str:
    """Return the roles of a host's processes: its entry of the platform's spec, or --roles."""
    per_host = spec.get("roles")
    if per_host is None:
        return str(options["roles"])
    if not isinstance(per_host, list) or len(per_host) != count:
        raise LaunchError(
            f'--platform-spec: "roles" needs one entry for each of the {count} hosts, '
            f"got {per_host!r}"
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
        raise LaunchError(f"--platform-spec is no JSON: {error}") from error
    unknown = set(spec) - {"roles", "port"} if isinstance(spec, dict) else {str(spec)}
    if unknown:
        raise LaunchError(f"--platform-spec: known are roles and port, got {sorted(unknown)}")
    port = spec.get("port", DEFAULT_PORT)
    if type(port) is not int or not 0 < port < 65536:
        raise LaunchError(f'--platform-spec: "port" is a number from 1 to 65535, got {port!r}')
    return dict(spec)


def _free_ports(request: LaunchRequest) -> list[int]:
    """Find ports that are free on this host, for as many processes as can be asked for.

    Not those that the system would give: it gives the same to who dials, and a process that is
    started again would find its own taken. They begin anywhere, so that runs that are started at
    the same time do not find the same.
    """
    if request.protocol in ("ipc", "redis") or request.ports or request.topology == "alone":
        return []
    count = sum(n for _, n in request.roles) or request.parallel_workers or 1
    wanted = 1 if request.topology == "star" else count
    ports: list[int] = []
    first = secrets.randbelow(_N_PORTS)
    for offset in range(_N_PORTS):
        if len(ports) == wanted:
            break
        port = DEFAULT_PORT + (first + offset) % _N_PORTS
        if _is_free(request.address, port):
            ports.append(port)
    return ports


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise LaunchError(
                f"nothing can listen on --address {address} ({error.strerror}); give one of this "
                "host's own, which the others can reach"
            ) from error
    return True


def _write_key(run_dir: Path, key: bytes) -> Path:
    """Write the key where only this user can read it, for those who join from this host."""
    file = run_dir / "key"
    file.touch(mode=0o600)
    file.write_bytes(key + b"\n")
    return file


@contextlib.contextmanager
def _run_dir() -> Iterator[Path]:
    """Make a folder that only this user can enter, for sockets; nothing of it stays behind."""
    folder = Path(tempfile.mkdtemp(prefix=_RUN_DIR_PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str, option: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() for word in words):
        raise LaunchError(f"{option} is a list of numbers, got {text!r}")
    return tuple(map(int, words))
