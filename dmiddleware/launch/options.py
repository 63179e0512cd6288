"""The options of a run: each is declared once, for the command line and for Python.

Pure, and imports nothing slow: ``ditask --help`` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from annotated_types import Ge

from dmiddleware.errors import DMiddlewareError, LaunchError
from dmiddleware.launch.roles import UNDECIDED
from dmiddleware.settings import (
    AS_TUPLE,
    Convert,
    NonNegative,
    Positive,
    SettingInfo,
    Settings,
    Whole,
    describe,
)

__all__ = [
    "DEFAULT_PORT",
    "FailurePolicy",
    "Flag",
    "LaunchOptions",
    "PlatformName",
    "PlatformSpec",
    "Resources",
    "RoleCounts",
    "options_and_flags",
    "parse_roles",
]

FailurePolicy = Literal["abort", "continue", "restart"]
PlatformName = Literal["local", "ray", "slurm", "k8s"]
TopologyName = Literal["star", "mesh", "alone"]
ProtocolName = Literal["ipc", "tcp", "tls+tcp"]
RoleCounts: TypeAlias = tuple[tuple[str, int], ...]
"""Roles in order, each with its number of processes."""
Resources: TypeAlias = Mapping[str, float]
"""Amounts of ``cpu``, ``gpu``, and what else a platform counts, by their names."""

DEFAULT_PORT: Final = 25515
"""The default port: not registered for any service, and below the range that systems use for
outgoing connections (from 32768 on Linux, from 49152 elsewhere), which could otherwise take it."""

_THIS_HOST: Final = "127.0.0.1"
_ROLE: Final = re.compile(r"([A-Za-z][\w-]*(?::[^=]*)?)(?:=(\d+))?")
_UNSENT: Final = ("arguments", "env")
"""Options that are not sent to the nodes: their processes are started with them."""
_UNRECORDED: Final = ("main", "arguments", "env", "attach_to")
"""Options that a run does not record: its program is recorded elsewhere, variables may be secrets,
and a run that was joined may be over."""


@dataclass(frozen=True, slots=True)
class PlatformSpec:
    """What the hosts of a platform do.

    Attributes:
        roles: the roles of each host, as in ``--roles``; None: all hosts have those of ``--roles``.
        port: the learner's port; None: the default one.
    """

    roles: tuple[str, ...] | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a JSON object with the keys ``roles`` and ``port``.

        Raises:
            LaunchError: if it is something else.
        """
        try:
            spec = json.loads(text) if text else {}
        except ValueError as error:
            raise LaunchError(f"--platform-spec is not valid JSON: {error}") from error
        unknown = set(spec) - {"roles", "port"} if isinstance(spec, dict) else {str(spec)}
        if unknown:
            raise LaunchError(
                f"--platform-spec takes the keys roles and port, got {', '.join(sorted(unknown))}"
            )
        roles, port = spec.get("roles"), spec.get("port")
        if port is not None and (type(port) is not int or not 0 < port < 65536):
            raise LaunchError(
                f'--platform-spec: "port" must be a number from 1 to 65535, got {port!r}'
            )
        if roles is not None and not isinstance(roles, list):
            raise LaunchError(
                f'--platform-spec: "roles" needs one entry for each host, got {roles!r}'
            )
        return cls(None if roles is None else tuple(map(str, roles)), port)


def parse_roles(text: str) -> RoleCounts:
    """Read ``learner=1,collector=2,evaluator=1``.

    Raises:
        LaunchError: if the text has another form; the message quotes the part that is wrong.
    """
    roles = []
    for part in _words(text):
        matched = _ROLE.fullmatch(part)
        if matched is None:
            raise LaunchError(f"--roles: {part!r} is not of the form role=count, as in learner=1")
        roles.append((matched[1], 1 if matched[2] is None else int(matched[2])))
    names = [name for name, _ in roles]
    if len(set(names)) != len(names):
        raise LaunchError(f"--roles: {text!r} names a role twice; add up the counts")
    return tuple(roles)


def parse_resources(texts: Iterable[str]) -> dict[str, Resources]:
    """Read texts such as ``learner:gpu=1,cpu=4``.

    Raises:
        LaunchError: if one has another form, or two are for the same role.
    """
    by_role: dict[str, Resources] = {}
    for text in texts:
        role, colon, rest = text.partition(":")
        amounts = [part.partition("=") for part in _words(rest)]
        if not role or not colon or not amounts or role in by_role:
            raise LaunchError(
                f"--resources: {text!r} is not of the form role:name=amount,…, as in "
                "learner:gpu=1,cpu=4, once for each role"
            )
        by_role[role] = {name: _amount(number, text) for name, _, number in amounts}
    return by_role


def _amount(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise LaunchError(f"--resources: {where!r} has the amount {text!r}; use a number") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        words = _words(text)
        if not all(word.isdecimal() for word in words):
            raise LaunchError(f"{option} must be a list of numbers such as 1,2,3, got {text!r}")
        return tuple(map(int, words))

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An annotation: how an option looks on the command line.

    Attributes:
        metavar: what stands for its value in the help; empty: its type.
        short: its short name, such as ``-m``; empty: none.
        shown: how the help describes its default; empty: by its value.
        read: reads its text; None: it is used as it is.
        is_file: whether it must be an existing file.
        is_folder: whether it must be an existing folder.
        multiple: whether it may be given several times.
    """

    metavar: str = ""
    short: str = ""
    shown: str = ""
    read: Callable[[str], Any] | None = None
    is_file: bool = False
    is_folder: bool = False
    multiple: bool = False


def _as_path(value: Any) -> Any:
    return Path(value) if isinstance(value, str) else value


_Path: TypeAlias = Annotated[Path, Convert(_as_path)]
_Texts: TypeAlias = Annotated[tuple[str, ...], AS_TUPLE]
_Integers: TypeAlias = Annotated[tuple[int, ...], AS_TUPLE]


class LaunchOptions(Settings):
    """The options of ``ditask``; its help describes each of them.

    Raises:
        LaunchError: if a value is not allowed, or two options contradict each other.
    """

    main: Annotated[str, Flag(metavar="MODULE.FUNCTION", short="-m")]
    """The function to run in every process, for example examples.cartpole_dqn.main."""
    package: Annotated[_Path, Flag(short="-p", is_folder=True)] = Path()
    """The folder to put first on the import path."""
    ding: bool = False
    """Run a program of DI-engine as it is: ding, ditk and the old gym can be imported."""
    roles: Annotated[RoleCounts, AS_TUPLE, Flag(metavar="ROLE=N,...", read=parse_roles)] = ()
    """Number of processes per role, for example learner=1,collector=2,evaluator=1. A run has one
    learner; a named part of its chain can have a process of its own, as in learner:red=1. With
    none, the program gives each process its role, with task.add_role."""
    env: Annotated[_Texts, Flag(metavar="[ROLE:]NAME=VALUE", multiple=True)] = ()
    """An environment variable for all processes, for those of a role, or for one node id; may be
    given several times. For example, collector:CUDA_VISIBLE_DEVICES= hides the GPUs from the
    collectors."""
    resources: Annotated[
        Mapping[str, Resources] | None,
        Flag(metavar="ROLE:NAME=N,...", read=parse_resources, multiple=True, shown="on Ray, cpu=1"),
    ] = None
    """What each process of a role needs, for example learner:gpu=1,cpu=4; may be given once for
    each role. On one host, cpu is the number of torch's threads, and gpu that of the GPUs that the
    process sees; Ray knows further names."""
    parallel_workers: Annotated[int | None, Flag(metavar="N")] = None
    """Number of processes. Without --roles, the first one learns, the last one evaluates and the
    others collect; with --ding, the program decides."""
    topology: Annotated[
        TopologyName | None, Flag(shown="star; mesh with a coordinator or --roles none")
    ] = None
    """How processes connect: star, all to the learner (or to the first process if none learns);
    mesh, each to all others; alone, only to the addresses in --attach-to."""
    protocol: ProtocolName = "ipc"
    """ipc on one host; tcp or tls+tcp between hosts."""
    mq_type: str = "nng"
    """DI-engine's option; nng carries all events, so it is the only choice."""
    shared_memory: Annotated[str, Flag(metavar="FOLDER")] = "/dev/shm"
    """Where processes of one host exchange large arrays. Pass an empty string to send arrays over
    sockets instead."""
    max_event_bytes: Annotated[
        Annotated[int, Ge(8192)] | None,
        Flag(metavar="BYTES", shown="half of the memory of the machine or container"),
    ] = None
    """How much memory each process grants for large events of the others; a larger event is refused
    where it is emitted."""
    address: Annotated[str, Flag(metavar="HOST", shown="127.0.0.1")] = ""
    """The address of this host, as other hosts reach it, for tcp and tls+tcp. With --platform ray,
    the address of the cluster, or auto."""
    bind: Annotated[str, Flag(metavar="HOST", shown="--address")] = ""
    """The local address to listen on, for example 0.0.0.0 for all. Needed only if other hosts reach
    this one by another address, as with NAT or in containers."""
    ports: Annotated[
        _Integers,
        Flag(metavar="P,...", read=_numbers("--ports"), shown="free ports from 25515 to 29514"),
    ] = ()
    """The ports to listen on, first the learner's. With fewer ports than listening processes, the
    rest count up from the last one."""
    attach_to: Annotated[_Texts, Flag(metavar="ADDRESS,...", read=_words)] = ()
    """Join a run that was started before: the addresses of its nodes. Needs its key and --run-id.
    Processes that join write to their own run folder, and the run continues when they leave."""
    node_ids: Annotated[
        _Integers, Flag(metavar="N,...", read=_numbers("--node-ids"), shown="count up from 0")
    ] = ()
    """Node ids of the processes, or only the first one."""
    labels: Annotated[_Texts, Flag(metavar="LABEL,...", read=_words)] = ()
    """Labels of the processes, for task.match_labels."""
    run_id: str = ""
    """The name of the run. Nodes of runs with other names are refused. With --platform slurm, the
    name of the job is added."""
    key_file: Annotated[_Path | None, Flag(is_file=True)] = None
    """File with the run's key, at least 32 characters, that no other user can read; DITASK_KEY can
    hold the key instead. A run on one host generates one."""
    tls_ca: Annotated[str, Flag(metavar="FILE")] = ""
    """PEM file with the trusted certificate authority, for tls+tcp."""
    tls_cert: Annotated[str, Flag(metavar="FILE")] = ""
    """PEM file with this host's certificate and private key, for tls+tcp."""
    tls_name: str = "localhost"
    """The server name in the certificates, for tls+tcp."""
    startup_interval: Annotated[NonNegative, Flag(metavar="SECONDS")] = 0.0
    """Pause between two process starts."""
    start_timeout: Annotated[Positive, Flag(metavar="SECONDS")] = 60.0
    """How long a process waits for peers that are not connected before its first step."""
    on_failure: FailurePolicy = "abort"
    """When a process fails: abort the run, continue without the process, or restart the process."""
    max_restarts: Annotated[Whole, Flag(metavar="N")] = 3
    """How often each process may be restarted within --restart-window."""
    restart_window: Annotated[Positive, Flag(metavar="SECONDS")] = 3600.0
    """How long a restart counts."""
    hang_timeout: Annotated[Positive | None, Flag(metavar="SECONDS", shown="never")] = None
    """Kill a process that makes no progress for this long, as a failed one. Waiting for other
    processes does not count, nor does time in which the run was suspended. It must be longer than
    the longest step, and than the program's start."""
    kill_after: Annotated[NonNegative, Flag(metavar="SECONDS")] = 20.0
    """How long processes may take to end when the run is stopped, or when its learner has ended;
    then they are killed."""
    log_dir: Annotated[_Path | None, Flag(metavar="FOLDER", shown="logs/DATE_TIME")] = None
    """Where to write the whole output of each process."""
    platform: PlatformName = "local"
    """Where the run is started. ray: each process is an actor of a Ray cluster. On slurm and k8s,
    hosts find each other through the platform's environment variables."""
    platform_spec: Annotated[PlatformSpec, Flag(metavar="JSON", read=PlatformSpec.parse)] = (
        PlatformSpec()
    )
    """Roles per host and the learner's port, for slurm and k8s: {"roles": ["learner=1",
    "collector=8"], "port": 25515}. Without a port, that of a Slurm job follows from its number."""
    arguments: _Texts = ()
    """The arguments of the program, which follow ``--`` on the command line."""

    raises: ClassVar[type[DMiddlewareError]] = LaunchError

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text(self)
        self._check_tls()
        self._check_ports()
        self._check_resources()
        if self.mq_type != "nng":
            raise LaunchError(
                f"--mq-type is {self.mq_type!r}, but nng carries all events between the processes "
                "of a run; leave the option out"
            )
        if self.platform == "ray":
            self._check_for_ray()
        for address in self.attach_to:
            self._check_attach_to(address)

    @classmethod
    def from_texts(cls, texts: Mapping[str, Any], arguments: Iterable[str] = ()) -> Self:
        """Read the texts of the command line, by the names of the fields."""
        values = dict(texts)
        for info, flag in options_and_flags():
            if flag.read is not None and isinstance(values.get(info.name), str | tuple):
                values[info.name] = flag.read(values[info.name])
        return cls(**values, arguments=tuple(arguments))

    def recorded(self) -> dict[str, str | list[str] | bool]:
        """Return what a run records of them: those that differ from their defaults, as texts.

        These are the texts of the command line, by the names of the fields; options that may be
        given several times have a list, and those without a value are True.
        """
        options = {info.name: (getattr(self, info.name), info) for info, _ in options_and_flags()}
        return {
            name: _as_text(value)
            for name, (value, info) in options.items()
            if name not in _UNRECORDED and value not in (info.default, {})
        }

    @property
    def role_resources(self) -> Mapping[str, Resources]:
        """What each process of a role needs; empty: nothing is said."""
        return self.resources or {}

    @property
    def role_counts(self) -> RoleCounts:
        """``roles``; a program of DI-engine decides unless they are given."""
        return self.roles or (((UNDECIDED, 1),) if self.ding else ())

    @property
    def hub_port(self) -> int | None:
        """The hub's port on a platform, which the other hosts dial; None: the default."""
        if self.platform_spec.port is not None:
            return self.platform_spec.port
        return self.ports[0] if self.ports else None

    def host_address(self) -> str:
        """Return the address of the only host of a run, as other hosts reach it.

        Raises:
            LaunchError: if --bind names all addresses, and no --address is given.
        """
        if not self.address and self.bind.strip("[]") in ("0.0.0.0", "::"):
            raise LaunchError(
                f"--bind {self.bind} listens on all addresses of this host; give the one that "
                "other hosts dial with --address"
            )
        return self.address or self.bind or _THIS_HOST

    def check_for_hosts(self) -> None:
        """Refuse what has no use, or another one, if a platform runs several hosts.

        Raises:
            LaunchError: with what to use instead.
        """
        if self.protocol == "ipc":
            raise LaunchError("--protocol ipc cannot connect hosts; use --protocol tcp or tls+tcp")
        if self.address:
            raise LaunchError(
                f"--address {self.address} has no effect with --platform {self.platform}, which "
                "names the hosts; use --bind to choose the address to listen on"
            )
        if self.topology == "alone":
            raise LaunchError(
                "--topology alone connects no hosts; with --platform use star (the default) or mesh"
            )

    def _check_tls(self) -> None:
        if self.protocol != "tls+tcp":
            if self.tls_ca or self.tls_cert:
                raise LaunchError("--tls-ca and --tls-cert are for --protocol tls+tcp")
            return
        for option, file in (("--tls-ca", self.tls_ca), ("--tls-cert", self.tls_cert)):
            if not file or not Path(file).is_file():
                raise LaunchError(f"--protocol tls+tcp needs {option}, a PEM file; got {file!r}")

    def _check_ports(self) -> None:
        if self.platform in ("local", "ray") and self.platform_spec != PlatformSpec():
            raise LaunchError("--platform-spec is for --platform slurm or k8s")
        port = self.platform_spec.port
        if self.ports and port is not None and port != self.ports[0]:
            raise LaunchError(
                f'--ports {",".join(map(str, self.ports))} and the "port" {port} in '
                "--platform-spec differ; give only one of them"
            )

    def _check_resources(self) -> None:
        for role, amounts in self.role_resources.items():
            for name, amount in amounts.items():
                if not amount >= 0.0:
                    raise LaunchError(f"resources of {role}: {name} is {amount}; use 0 or more")
                if self.platform != "ray" and name not in ("cpu", "gpu"):
                    raise LaunchError(
                        f"resources of {role}: only Ray knows {name!r}; use cpu and gpu"
                    )

    def _check_for_ray(self) -> None:
        """Refuse what Ray decides itself, or what has no use there."""
        is_set = {
            "--protocol tls+tcp": self.protocol == "tls+tcp",
            "--bind": bool(self.bind),
            "--ports": bool(self.ports),
            "--attach-to": bool(self.attach_to),
            "--node-ids": bool(self.node_ids),
            "--topology alone": self.topology == "alone",
        }
        for option, is_given in is_set.items():
            if is_given:
                raise LaunchError(
                    f"{option} has no use with --platform ray, where processes connect over tcp, "
                    "at the addresses of the hosts on which Ray places them; leave it out"
                )
        if dict(self.roles).get("learner", 1) > 1:
            raise LaunchError(
                "--platform ray runs one learner; use learner=1, or start several ranks on a "
                "cluster with torchrun"
            )

    def _check_attach_to(self, address: str) -> None:
        if address.startswith("tls+tcp://") and self.protocol != "tls+tcp":
            raise LaunchError(
                f"--attach-to {address} needs certificates; use --protocol tls+tcp with --tls-ca "
                "and --tls-cert"
            )


def options_and_flags() -> list[tuple[SettingInfo, Flag]]:
    """Return the options of the command line in their order, and how each looks there."""
    return [
        (info, next((extra for extra in added if isinstance(extra, Flag)), Flag()))
        for info in describe(LaunchOptions)
        for added in [getattr(info.hint, "__metadata__", ())]
        if info.name != "arguments"
    ]


def _as_text(value: Any) -> str | list[str] | bool:
    """Return the text of the command line that is read as a value; True for an option without."""
    if isinstance(value, bool):
        return value
    if isinstance(value, PlatformSpec):
        return json.dumps(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return [f"{role}:{_listed(amounts.items())}" for role, amounts in value.items()]
    return _listed(value) if isinstance(value, tuple) else str(value)


def _listed(values: Iterable[Any]) -> str:
    return ",".join(
        "=".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values
    )


def _check_text(options: LaunchOptions) -> None:
    """Refuse options and folders that cannot be sent to the nodes."""
    fields = dataclasses.fields(options)
    texts = {
        "--" + field.name.replace("_", "-"): str(getattr(options, field.name))
        for field in fields
        if field.name not in _UNSENT
    }
    texts["the working directory"] = os.getcwd()  # noqa: PTH109 (Path.cwd() is the same)
    texts["the folder for temporary files"] = tempfile.gettempdir()
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LaunchError(f"{name} is not valid UTF-8: {text!r}; use another name") from None
