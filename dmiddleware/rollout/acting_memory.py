"""What a policy remembers from one step to the next: its last action and reward, and its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from dmiddleware.errors import CheckpointMismatch, PolicyOutputError
from dmiddleware.policy import ActionCodec
from dmiddleware.policy.acting import STATE, first_inputs
from dmiddleware.tree import (
    Batch,
    Nested,
    Value,
    assign_rows,
    clone,
    from_numpy,
    leaves,
    map_leaves,
    to_device,
    to_dict,
)

__all__ = ["ActingMemory"]

_FALSE: Final = torch.zeros((), dtype=torch.bool)


class ActingMemory:
    """The inputs of acting that come from the step before, row by row.

    Args:
        names: what the policy declares in ``act_inputs``.
        initial_state: the policy's method.
        codec: that of the actions, for policies that see the previous one.
        n: number of rows.
        device: where the columns are.

    Attributes:
        columns: what the policy sees in its next step, by keyword, ``[n, …]``: ``prev_action``,
            ``prev_reward`` and ``is_first`` as far as it asks for them, and ``state`` if it is
            recurrent. :meth:`record` makes new tensors, and the others write to these.

    Raises:
        PolicyOutputError: if the initial state is not made of tensors ``[n, …]``.
    """

    def __init__(
        self,
        names: Collection[str],
        initial_state: Callable[[int], Nested | None],
        codec: ActionCodec | None,
        n: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._names = names
        self._initial_state = initial_state
        self._codec = codec
        self._device = device
        self.columns = self._first(n)
        self._first_columns = {name: clone(column) for name, column in self.columns.items()}
        self._state_is_checked = False

    def _first(self, n: int) -> dict[str, Value]:
        first = first_inputs(self._names, self._initial_state, self._codec, n)
        return {name: to_device(column, self._device) for name, column in first.items()}

    def next_state(self, output: dict[str, Any], n_rows: int) -> Value | None:
        """Take the next state out of what the policy returned; None: it is not recurrent.

        Raises:
            PolicyOutputError: the first time, if the state does not look like the initial one.
        """
        if STATE not in self.columns:
            return None
        state = output.pop(STATE, None)
        value = from_numpy(state) if isinstance(state, Mapping | tuple) else state
        if not self._state_is_checked:
            self._check_state(value, n_rows)
            self._state_is_checked = True
        return value

    def _check_state(self, state: Any, n_rows: int) -> None:
        expected = {path: tuple(leaf.shape[1:]) for path, leaf in leaves(self.columns[STATE])}
        is_state = isinstance(state, torch.Tensor | Batch)
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves(state)} if is_state else None
        if shapes != {path: (n_rows, *shape) for path, shape in expected.items()}:
            raise PolicyOutputError(
                f"the policy's forward returned state={state!r:.100} for {n_rows} envs; a policy "
                "with an initial_state must return the next state under the key 'state', with the "
                f"structure and the shapes of initial_state({n_rows}): {_described(expected)}"
            )

    def record(
        self,
        action: Value,
        state: Value | None,
        *,
        reward: torch.Tensor | None = None,
        rows: Any = slice(None),
    ) -> None:
        """Keep what the next step needs.

        Args:
            action: the actions, ``[R, …]``.
            state: the next state, ``[R, …]``; None: the policy is not recurrent.
            reward: what the actions earned, ``[R]``; None: ``prev_reward`` is not among the names.
            rows: the rows that acted; the others keep what they had.
        """
        inputs = {"prev_action": action, "prev_reward": reward, "is_first": _FALSE, STATE: state}
        # New tensors, because the old ones belong to the rows of this step.
        self.columns = {name: clone(column) for name, column in self.columns.items()}
        for name, column in self.columns.items():
            values = inputs[name]
            assert values is not None
            assign_rows(column, rows, values)

    def record_on_device(
        self,
        action: Value,
        state: Value | None,
        *,
        reward: torch.Tensor,
        acted: torch.Tensor | None,
        ended: torch.Tensor,
    ) -> None:
        """Keep what the next step needs, and start again where an episode ended; reads nothing.

        Args:
            action: the actions, ``[n, …]``.
            state: the next state, ``[n, …]``; None: the policy is not recurrent.
            reward: what the actions earned, ``[n]``.
            acted: ``[n]`` bool, the rows that acted, the others keep what they had; None: all.
            ended: ``[n]`` bool, the rows that start an episode.
        """
        inputs = {
            "prev_action": action,
            "prev_reward": reward,
            "is_first": torch.zeros_like(ended),
            STATE: state,
        }
        columns = {}
        for name, column in self.columns.items():
            values = inputs[name]
            assert values is not None
            if acted is not None:
                values = _where(acted, values, column)
            columns[name] = _where(ended, self._first_columns[name], values)
        self.columns = columns

    def restart_all(self) -> None:
        """Forget everything about all rows."""
        self.columns = {name: clone(column) for name, column in self._first_columns.items()}

    def restart(self, rows: Sequence[int]) -> None:
        """Forget everything about the rows that start an episode."""
        if not self.columns or len(rows) == 0:
            return
        index = torch.tensor(rows)
        for name, column in self._first(len(rows)).items():
            assign_rows(self.columns[name], index, column)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept between steps, as plain data."""
        return {name: to_dict(clone(column)) for name, column in self.columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it belongs to a policy with other inputs.
        """
        if set(state) != set(self.columns):
            raise CheckpointMismatch(
                f"the checkpoint keeps {', '.join(sorted(state)) or 'nothing'} for acting, but "
                f"this policy needs {', '.join(sorted(self.columns)) or 'nothing'}; it belongs to "
                "a policy with other act_inputs, or another initial_state"
            )
        for name, column in state.items():
            assign_rows(self.columns[name], slice(None), from_numpy(column))


def _where(rows: torch.Tensor, values: Value, others: Value) -> Value:
    """Return the values in some rows, and the others elsewhere, in the dtype of ``values``."""

    def chosen(leaf: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(rows.view(-1, *(1,) * (leaf.dim() - 1)), leaf, other.to(leaf.dtype))

    return map_leaves(chosen, values, others)


def _described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(
        f"{path or 'a tensor'} [n{''.join(f', {size}' for size in shape)}]"
        for path, shape in shapes.items()
    )
