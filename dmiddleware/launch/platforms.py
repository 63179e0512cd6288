"""Cluster platforms: read a launcher's placement from the variables of Slurm and Kubernetes.

Pure: a mapping of variables in, a :class:`Placement` out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from dmiddleware.errors import LaunchError

__all__ = [
    "DEFAULT_PORT",
    "KEY_VARIABLE",
    "PlatformName",
    "Placement",
    "place",
    "expand_slurm_hosts",
]

PlatformName = Literal["local", "slurm", "k8s"]

KEY_VARIABLE: Final = "DITASK_KEY"
"""The environment variable with the run's key."""

DEFAULT_PORT: Final = 25515
"""The default port: not registered for any service, and below the range that systems use for
outgoing connections (from 32768 on Linux, from 49152 elsewhere), which could otherwise take it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of this launcher among all launchers of the run.

    Attributes:
        index: this launcher's number, from 0.
        count: number of launchers in the run.
        address: this host's address, as the other hosts reach it.
        first_address: the address of the host with index 0.
        port: the port on which the first host's first node listens.
        scheme: the protocol between hosts: ``tcp`` or ``tls+tcp``.
    """

    index: int
    count: int
    address: str
    first_address: str
    port: int = DEFAULT_PORT
    scheme: str = "tcp"

    @property
    def attach_to(self) -> tuple[str, ...]:
        """The addresses to dial to reach the run: the first host's, except on that host."""
        return () if self.index == 0 else (f"{self.scheme}://{self.first_address}:{self.port}",)


def place(
    platform: PlatformName,
    env: Mapping[str, str],
    *,
    port: int | None = None,
    scheme: str = "tcp",
) -> Placement:
    """Read the placement from a platform's variables.

    Args:
        platform: ``slurm``: one task per host, started by ``srun``; ``k8s``: an indexed Job, or a
            StatefulSet with a headless service.
        env: the environment variables.
        port: the port of the first host; None: :data:`DEFAULT_PORT`.
        scheme: the protocol between hosts: ``tcp`` or ``tls+tcp``.

    Raises:
        LaunchError: if a variable is missing or malformed; the message names it.
    """
    chosen = DEFAULT_PORT if port is None else port
    if platform == "slurm":
        return replace(_slurm(env, chosen), scheme=scheme)
    if platform == "k8s":
        return replace(_k8s(env, chosen), scheme=scheme)
    return Placement(0, 1, "127.0.0.1", "127.0.0.1", chosen)


def expand_slurm_hosts(text: str) -> list[str]:
    """Expand Slurm's list of hosts: ``gpu[01-03,7],login`` becomes five names.

    Raises:
        LaunchError: if the list is malformed.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        matched = re.fullmatch(r"([^\[\]]*)(?:\[([^\]]+)\])?([^\[\]]*)", part)
        if matched is None:
            raise LaunchError(f"SLURM_JOB_NODELIST: {part!r} is not a list of hosts")
        prefix, ranges, suffix = matched.groups()
        if ranges is None:
            hosts.append(part)
        else:
            hosts += [f"{prefix}{number}{suffix}" for number in _expand_ranges(ranges)]
    if not hosts:
        raise LaunchError(f"SLURM_JOB_NODELIST={text!r} has no host")
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        first, dash, last = one.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LaunchError(f"SLURM_JOB_NODELIST: [{ranges}] is not a range of numbers")
        width = len(first)
        end = int(last) if dash else int(first)
        numbers += [str(number).zfill(width) for number in range(int(first), end + 1)]
    return numbers


def _slurm(env: Mapping[str, str], port: int) -> Placement:
    index, count = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
    hosts = expand_slurm_hosts(_word(env, "SLURM_JOB_NODELIST"))
    if not 0 <= index < count:
        raise LaunchError(f"SLURM_PROCID={index} does not fit SLURM_NTASKS={count}")
    if len(hosts) != count:
        raise LaunchError(
            f"Slurm runs {count} tasks on {len(hosts)} hosts; start one ditask per host "
            "(--ntasks-per-node=1), which starts all processes of that host"
        )
    return Placement(index, count, hosts[index], hosts[0], port)


def _k8s(env: Mapping[str, str], port: int) -> Placement:
    count = _number(env, "DITASK_REPLICAS")
    pod = env.get("POD_NAME") or env.get("HOSTNAME", "")
    index = env.get("JOB_COMPLETION_INDEX") or pod.rpartition("-")[2]
    if not index.isdecimal():
        raise LaunchError(
            f"found no index for this pod; set JOB_COMPLETION_INDEX (an indexed Job does) or a "
            f"POD_NAME that ends in -<index> (a StatefulSet does), got POD_NAME={pod!r}"
        )
    number = int(index)
    if not 0 <= number < count:
        raise LaunchError(f"this pod's index {number} does not fit DITASK_REPLICAS={count}")
    service = _word(env, "DITASK_SERVICE")
    base = pod.rpartition("-")[0] if pod.rpartition("-")[2].isdecimal() else pod
    address = env.get("POD_IP") or f"{base}-{number}.{service}"
    return Placement(number, count, address, f"{base}-0.{service}", port)


def _word(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise LaunchError(
            f"the environment variable {name} is not set; is this the right --platform?"
        )
    return value


def _number(env: Mapping[str, str], name: str) -> int:
    value = _word(env, name)
    if not value.isdecimal():
        raise LaunchError(f"{name}={value!r} is not a number")
    return int(value)
