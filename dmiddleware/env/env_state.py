"""The state of an env, as plain data.

An env that has ``state_dict()`` and ``load_state_dict(state)`` is saved through them. Of any other
env, and of the wrappers around it, all attributes are saved, if all of them are understood:
numbers, strings, arrays, containers, enums, random generators, and Python objects made of such.
That covers Gymnasium's classic control and toy text, its wrappers, and most envs written in plain
Python. An env that holds something else (a simulator written in C, a file, a socket) cannot be
saved, rather than saved in part. Functions, classes, modules and pygame's drawing are taken to hold
no state.

Python objects are restored by changing those that the other env has in the same places; none is
made. So a state with more of them (in a list that grows in an episode) cannot be restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmiddleware.env.plain import Decoder, Encoder, NotPlainError
from dmiddleware.errors import CheckpointMismatch

__all__ = ["get_state", "set_state", "plain_infos", "infos_of_plain"]


def get_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an env (or vector env) and its wrappers.

    Returns:
        Plain data (dictionaries, lists, strings, numbers, arrays), or None if the env holds
        something that cannot be saved.
    """
    try:
        return {"layers": Encoder().layers(env)}
    except NotPlainError:
        return None


def set_state(env: Any, state: Mapping[str, Any]) -> None:
    """Bring an env made by the same factory into a state that :func:`get_state` gave.

    Raises:
        NoObjectError: if the env lacks an object that the state has; it is to be reset then.
        CheckpointMismatch: if the state is that of another env.
    """
    Decoder().set_layers(env, state["layers"])


def plain_infos(infos: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return infos as plain data; one that holds something else becomes an empty one."""
    found: list[Any] = []
    for info in infos:
        try:
            encoded = Encoder().encode(dict(info))
            Decoder().decode(encoded)  # there will be nothing that objects could be restored into
        except (NotPlainError, CheckpointMismatch):
            encoded = Encoder().encode({})
        found.append(encoded)
    return found


def infos_of_plain(plain: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the infos that :func:`plain_infos` was given."""
    return [Decoder().decode(one) for one in plain]
