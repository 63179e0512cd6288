"""Cluster platforms: read a launcher's placement from the variables of Slurm and Kubernetes.

Pure: a mapping of variables in, a :class:`Placement` out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.options import DEFAULT_PORT, PlatformName
from dmiddleware.router.protocol.topology import socket_address

__all__ = [
    "Placement",
    "count_copies",
    "place",
    "expand_slurm_hosts",
    "slurm_step",
]

_HOST_PATTERN: Final = re.compile(r"(?:[^,\s\[\]]|\[[^\[\]]*\])+")
"""A name in Slurm's list of hosts; commas within brackets do not end it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of this launcher among all launchers of the run.

    Attributes:
        index: this launcher's number, from 0.
        hosts: the address of each launcher's host, as the other hosts reach it.
        port: the port on which the hub listens, the node that all other hosts dial.
        scheme: the protocol between hosts: ``tcp`` or ``tls+tcp``.
        bind: the local address to listen on; empty: the host's address.
    """

    index: int
    hosts: tuple[str, ...]
    port: int = DEFAULT_PORT
    scheme: str = "tcp"
    bind: str = ""

    @property
    def count(self) -> int:
        """Number of launchers in the run."""
        return len(self.hosts)

    @property
    def address(self) -> str:
        """This host's address, as the other hosts reach it."""
        return self.hosts[self.index]

    def hub_address(self, host: int, number: int = 0) -> str:
        """The address to dial for one of the hubs, which run on the host with this index."""
        return socket_address(self.scheme, self.hosts[host], self.port + number)


def place(
    platform: PlatformName,
    env: Mapping[str, str],
    *,
    port: int | None = None,
    scheme: str = "tcp",
) -> Placement:
    """Read the placement from a platform's variables.

    Args:
        platform: ``slurm``: one task per host, started by ``srun``; ``k8s``: an indexed Job or a
            StatefulSet, each with a headless service.
        env: the environment variables.
        port: the hub's port; None: :data:`DEFAULT_PORT`.
        scheme: the protocol between hosts: ``tcp`` or ``tls+tcp``.

    Raises:
        LaunchError: if a variable is missing or malformed; the message names it.
    """
    read = {"slurm": _slurm, "k8s": _k8s}.get(platform)
    placement = read(env) if read is not None else Placement(0, ("127.0.0.1",))
    return replace(placement, port=DEFAULT_PORT if port is None else port, scheme=scheme)


def count_copies(env: Mapping[str, str]) -> int:
    """Return how many times Slurm starts this command in one step; 1 without Slurm.

    Args:
        env: the environment variables.
    """
    text = env.get("SLURM_STEP_NUM_TASKS", "")
    return int(text) if text.isdecimal() else 1


def slurm_step(env: Mapping[str, str]) -> str:
    """Return the name of the job step that this process belongs to; empty: it is in no job.

    No other job, task of a job array or step has it, and a job that is requeued keeps it.

    Args:
        env: the environment variables.
    """
    job, array_task = env.get("SLURM_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    if not job:
        return ""
    if array_task:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{array_task}"
    step = env.get("SLURM_STEP_ID", "")
    return f"slurm-{job}.{step}" if step else f"slurm-{job}"


def expand_slurm_hosts(text: str) -> list[str]:
    """Expand Slurm's list of hosts: ``gpu[01-03,7],login`` becomes five names.

    A name may have several brackets, of which the last one counts fastest, as in
    ``rack[1-2]n[01-02]``. Numbers are padded to the width of the first one in their range.

    Raises:
        LaunchError: if the list is malformed.
    """
    parts = _HOST_PATTERN.findall(text)
    if not parts or _HOST_PATTERN.sub("", text).strip(", \t\n"):
        raise LaunchError(f"{text!r} is not a list of Slurm hosts such as gpu[01-03,7],login")
    hosts: list[str] = []
    for part in parts:
        # Literal text and the content of brackets alternate.
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [
            _expand_ranges(piece) if position % 2 else [piece]
            for position, piece in enumerate(pieces)
        ]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise LaunchError(
                f"[{ranges}] in Slurm's list of hosts is not a range of numbers such as [01-03,7]"
            )
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _slurm(env: Mapping[str, str]) -> Placement:
    # A step (srun) may run on a part of the job's hosts. Slurm counts its tasks within the step.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"
    index, count = _number(env, "SLURM_PROCID"), _number(env, tasks)
    hosts = expand_slurm_hosts(_word(env, nodes))
    if not 0 <= index < count:
        raise LaunchError(f"SLURM_PROCID={index} does not fit {tasks}={count}")
    if len(hosts) != count:
        raise LaunchError(
            f"Slurm runs {count} tasks on {len(hosts)} hosts ({nodes}={env[nodes]}); start one "
            "ditask per host (srun --ntasks-per-node=1), which starts all processes of that host"
        )
    return Placement(index, tuple(hosts))


def _k8s(env: Mapping[str, str]) -> Placement:
    count = _number(env, "DITASK_REPLICAS")
    service = _word(env, "DITASK_SERVICE")
    base, index = _pod(env)
    if not 0 <= index < count:
        raise LaunchError(f"this pod's index {index} does not fit DITASK_REPLICAS={count}")
    hosts = tuple(f"{base}-{number}.{service}" for number in range(count))
    # A pod's own name in the service may not resolve before the pod is ready.
    return Placement(index, hosts, bind=env.get("POD_IP") or "0.0.0.0")


def _pod(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the name of the Job or StatefulSet, and this pod's index.

    Both give the pod the host name ``<name>-<index>``. The pod's own name is the same in a
    StatefulSet; in a Job it has a random suffix, which is not part of any address.
    """
    names = [name for variable in ("HOSTNAME", "POD_NAME") if (name := env.get(variable))]
    if "JOB_COMPLETION_INDEX" in env:
        index = _number(env, "JOB_COMPLETION_INDEX")
        pattern = rf"(.+)-({index})(?:-[a-z0-9]{{5}})?"
    else:
        pattern = r"(.+)-(\d+)"
    for name in names:
        if matched := re.fullmatch(pattern, name):
            return matched[1], int(matched[2])
    raise LaunchError(
        "found no index for this pod; an indexed Job sets JOB_COMPLETION_INDEX and the host name "
        "<job>-<index>, a StatefulSet the host name <set>-<index>; got "
        + ", ".join(
            f"{variable}={env.get(variable, '')!r}"
            for variable in ("JOB_COMPLETION_INDEX", "HOSTNAME", "POD_NAME")
        )
    )


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
