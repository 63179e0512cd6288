"""Environment variables of nodes, for all of them, for a role, or for one node.

Pure: texts of the command line in, the variables of each node out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.plan import NodePlan, RankPlan
from dmiddleware.launch.roles import KNOWN_ROLES, kind_of
from dmiddleware.pipeline.middleware import misspelled_role

__all__ = ["node_variables"]

_FORM: Final = re.compile(r"(?:([A-Za-z0-9][\w-]*):)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OURS: Final = "DITASK_"
_RANK_VARIABLES: Final = tuple(RankPlan(0, 1, 0).environment())


def node_variables(
    texts: Sequence[str],
    plans: Sequence[NodePlan],
    *,
    elsewhere: Mapping[int, Collection[str]] | None = None,
) -> list[dict[str, str]]:
    """Return the variables of each node.

    Those for one node replace those for its roles, and these replace those for all. Of two for the
    same nodes, the later one counts.

    Args:
        texts: ``NAME=value``, ``role:NAME=value`` or ``node id:NAME=value``.
        plans: the nodes of this launcher.
        elsewhere: the roles of the nodes that launchers on other hosts start, by node id. The
            launchers of a run may have the same options.

    Raises:
        LaunchError: if a text has another form, names no role or node of the run, or sets a
            variable that the launcher sets itself.
    """
    nodes = {**(elsewhere or {}), **{plan.node_id: plan.roles for plan in plans}}
    decides = any(plan.decides for plan in plans)
    for_all, for_roles, for_nodes = [], [], []
    for text in texts:
        target, name, value = _parse(text)
        if not target:
            for_all.append((target, name, value))
        elif target.isdecimal():
            _check_node(text, int(target), nodes)
            for_nodes.append((target, name, value))
        else:
            if decides:
                raise LaunchError(
                    f"--env: {text!r} is for a role, but the program gives the processes their "
                    f"roles after they have started; name a node id, as in 1:{name}={value}"
                )
            _check_role(text, target, nodes.values())
            for_roles.append((target, name, value))
    return [
        {
            name: value
            for target, name, value in (*for_all, *for_roles, *for_nodes)
            if _concerns(target, plan)
        }
        for plan in plans
    ]


def _parse(text: str) -> tuple[str, str, str]:
    matched = _FORM.fullmatch(text)
    if matched is None:
        raise LaunchError(
            f"--env: {text!r} is not of the form NAME=value, role:NAME=value or node:NAME=value, "
            "as in collector:CUDA_VISIBLE_DEVICES="
        )
    target, name, value = matched.groups(default="")
    if name.startswith(_OURS) or name in _RANK_VARIABLES:
        raise LaunchError(f"--env: ditask sets {name} itself; leave it out")
    return target, name, value


def _check_node(text: str, node_id: int, nodes: Collection[int]) -> None:
    if node_id not in nodes:
        raise LaunchError(
            f"--env: {text!r} is for node {node_id}, but the run has the nodes "
            f"{', '.join(map(str, sorted(nodes)))}"
        )


def _check_role(text: str, role: str, nodes: Collection[Collection[str]]) -> None:
    names = [name for roles in nodes for name in roles or KNOWN_ROLES]
    all_roles = dict.fromkeys((*names, *map(kind_of, names)))
    if role not in all_roles:
        near = misspelled_role(role, all_roles)
        hint = f"; did you mean {near}?" if near else ""
        raise LaunchError(
            f"--env: {text!r} is for the role {role!r}, but the run has the roles "
            f"{', '.join(all_roles)}{hint}"
        )


def _concerns(target: str, plan: NodePlan) -> bool:
    if not target or target == str(plan.node_id):
        return True
    roles = {*plan.roles, *map(kind_of, plan.roles)}
    return not target.isdecimal() and (not roles or target in roles)
