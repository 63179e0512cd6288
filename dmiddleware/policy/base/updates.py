"""What a learn mode's forward returns: the outputs of updates, and priorities for rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmiddleware.errors import PolicyOutputError

__all__ = ["is_update", "priorities_of_rows", "update_outputs"]

Output = dict[str, Any]


def update_outputs(answer: object) -> list[Output]:
    """Return the outputs that a learn mode's ``forward`` returned, as a list.

    Raises:
        PolicyOutputError: if it returned anything but a dictionary or a list of dictionaries.
    """
    outputs = answer if isinstance(answer, list | tuple) else [answer]
    for output in outputs:
        if not isinstance(output, Mapping):
            raise PolicyOutputError(
                "the policy's forward in learn mode must return a dictionary (or a list of "
                f"dictionaries, one per update), got {output!r:.100}; "
                "return at least {'total_loss': ...} from _forward_learn"
            )
    return list(outputs)


def is_update(output: Mapping[str, Any]) -> bool:
    """Return whether an output counts as an update: one with ``kl_stop`` does not.

    With ``kl_stop`` the policy reports that it skipped the update.
    """
    return not output.get("kl_stop")


def priorities_of_rows(
    outputs: Sequence[Mapping[str, Any]], n_rows: int
) -> tuple[torch.Tensor | None, Any] | None:
    """Join the priorities in the outputs of one forward, and find the rows that they are for.

    The ``priority`` of an output has one value for each row in its ``priority_index``. Without
    ``priority_index``, it has one for each row of the batch, or for each of the rows after those of
    the previous output. If a row gets several values, the last one counts.

    Args:
        outputs: the outputs, in order.
        n_rows: number of rows in the batch.

    Returns:
        The rows, int64 ``[k]`` (None: all, in order), and their priorities ``[k]``; None without
        priorities.

    Raises:
        PolicyOutputError: if it is unclear which rows the priorities are for.
    """
    given = [output for output in outputs if output.get("priority") is not None]
    if not given:
        return None
    last = given[-1]
    if "priority_index" not in last and len(last["priority"]) == n_rows:
        return None, last["priority"]
    parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    start = 0
    for output in given:
        n = len(output["priority"])
        if "priority_index" in output:
            rows = np.asarray(torch.as_tensor(output["priority_index"]).cpu(), np.int64)
            if len(rows) != n or (n and not 0 <= rows.min() <= rows.max() < n_rows):
                raise PolicyOutputError(
                    f"priority_index must list a row of the batch (0 to {n_rows - 1}) for each of "
                    f"the {n} priorities, got {rows.tolist()!r:.100}"
                )
        elif n == n_rows:
            rows = np.arange(n_rows)
        else:
            rows = np.arange(start, start + n)
            start += n
        parts.append(rows)
    if start not in (0, n_rows):
        sizes = ", ".join(str(len(output["priority"])) for output in given)
        raise PolicyOutputError(
            f"the policy returned {sizes} priorities for a batch of {n_rows} rows; return one "
            "priority per row, or add priority_index, the row of the batch for each priority"
        )
    newest = np.full(n_rows, -1)
    every = np.concatenate(parts)
    newest[every] = np.arange(len(every))
    rows = np.flatnonzero(newest >= 0)
    priority = torch.cat([torch.as_tensor(output["priority"]).detach().cpu() for output in given])
    return torch.from_numpy(rows), priority[torch.from_numpy(newest[rows])]
