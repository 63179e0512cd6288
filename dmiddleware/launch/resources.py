"""What processes of a role need: on this host, threads and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.options import Resources
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.roles import UNDECIDED, kind_of
from dmiddleware.registry import nearest

__all__ = ["check_resource_roles", "local_shares", "resources_of"]

_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_THREADS: Final = "OMP_NUM_THREADS"


def check_resource_roles(
    resources: Mapping[str, Resources], assigned: Sequence[Sequence[str]]
) -> None:
    """Refuse resources for a role that no process has.

    Raises:
        LaunchError: with the roles of the run.
    """
    roles = list(dict.fromkeys(map(kind_of, chain.from_iterable(assigned))))
    for role in resources:
        if roles in ([], [UNDECIDED]):
            raise LaunchError(
                f"--resources: no process has the role {role!r} when it starts; name the roles, as "
                "in --roles learner=1,collector=2"
            )
        if role not in roles:
            near = nearest(role, roles, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its roles are {', '.join(roles)}"
            raise LaunchError(f"--resources: the run has no role {role!r}; {hint}")


def resources_of(resources: Mapping[str, Resources], roles: Sequence[str]) -> dict[str, float]:
    """Return what a process with these roles needs: the most of each that one of them needs."""
    amounts: dict[str, float] = {}
    for role in roles:
        of_role = resources.get(role) or resources.get(kind_of(role), {})
        for name, amount in of_role.items():
            amounts[name] = max(amount, amounts.get(name, 0.0))
    return amounts


def local_shares(
    resources: Mapping[str, Resources],
    plans: Sequence[NodePlan],
    env: Mapping[str, str],
    *,
    gpus: Path = _GPUS,
) -> list[dict[str, str]]:
    """Share this host among its processes.

    Args:
        resources: what each role needs.
        plans: the processes.
        env: the environment variables of the launcher.
        gpus: the folder with an entry for each GPU of the host.

    Returns:
        For each process the environment variables that show it its GPUs, and give it threads: one,
        unless it needs more, or the launcher has the variable already.

    Raises:
        LaunchError: if a role does not exist, or the host has too few GPUs.
    """
    check_resource_roles(resources, [plan.roles for plan in plans])
    free = _visible_gpus(env, gpus)
    n_visible = len(free)
    shares = []
    for plan in plans:
        needs = resources_of(resources, plan.roles)
        variables = {}
        if "gpu" in needs:
            n_gpus = int(needs["gpu"])
            if n_gpus != needs["gpu"]:
                raise LaunchError(
                    f"{plan} cannot have {needs['gpu']:g} GPUs of one host; use 0 or 1"
                )
            if n_gpus > len(free):
                raise LaunchError(
                    f"{plan} needs {n_gpus} GPUs, but only {len(free)} of the {n_visible} that "
                    f"this launcher sees are left; ask for less with --resources"
                )
            shared, free = free[:n_gpus], free[n_gpus:]
            variables[_VISIBLE] = ",".join(shared)
        if "cpu" in needs or _THREADS not in env:
            variables[_THREADS] = str(max(1, int(needs.get("cpu", 1))))
        shares.append(variables)
    return shares


def _visible_gpus(env: Mapping[str, str], gpus: Path) -> list[str]:
    if _VISIBLE in env:
        return [name for name in env[_VISIBLE].split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(gpus.iterdir())] if gpus.is_dir() else []
