"""The collected rows of a context, in each form that its documentation names."""

from __future__ import annotations

from collections.abc import Mapping

from dmiddleware.errors import StructureError
from dmiddleware.tree import Batch, as_tree, stack

__all__ = ["rows_of"]


def rows_of(collected: object, *, name: str = "ctx.trajectories") -> Batch:
    """Return collected transitions as one batch.

    Args:
        collected: a batch ``[N, …]`` or ``[T, E, …]``, which is returned as it is, a dictionary of
            columns, or a list of ``N`` transitions, each a dictionary or a batch ``[…]``.
        name: the field that it comes from, for the message.

    Returns:
        The batch, ``[N, …]`` for a list.

    Raises:
        StructureError: if it is something else, if a value of a transition is not a tensor, an
            array or a number, or if the transitions differ in their keys or shapes.
    """
    if isinstance(collected, Batch):
        return collected
    if isinstance(collected, Mapping):
        return as_tree(collected)
    if not isinstance(collected, list | tuple):
        raise StructureError(
            f"{name} must be a batch or a list of transitions, got {collected!r:.100}; collect "
            "with StepCollector, or build a batch with as_tree({'obs': ..., 'action': ..., ...})"
        )
    for number, item in enumerate(collected):
        if not isinstance(item, Mapping | Batch):
            raise StructureError(
                f"item {number} of {name} is {item!r:.60}; each transition must be a dictionary "
                "or a batch with the keys obs, action, reward, next_obs, done, ..."
            )
    transitions = [as_tree(dict(item.items())) for item in collected]
    return stack(transitions, path=name)
