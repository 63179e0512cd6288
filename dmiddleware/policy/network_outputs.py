"""Checks of what networks return; a user may have written them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dmiddleware.errors import PolicyOutputError

__all__ = ["critic_values", "named_outputs", "value_output", "values_of_rows", "with_rows"]


def named_outputs(output: Any, *names: str) -> Mapping[str, Any]:
    """Return what a network returned, if it is a dictionary that has these names.

    Raises:
        PolicyOutputError: with what it is, or the names that it has.
    """
    if type(output) is dict or isinstance(output, Mapping):
        if all(name in output for name in names):
            return output
        kind = f"the keys {_quoted(output)}" if output else "an empty dictionary"
    else:
        kind = _kind_of(output)
    keys = f" with the key{'s' * (len(names) > 1)} {_quoted(names)}" if names else ""
    raise PolicyOutputError(
        f"the model returned {kind}; it must return a dictionary{keys} (see "
        "docs/howto/custom-model.md)"
    )


def value_output(output: Any, rows: Sequence[int]) -> torch.Tensor:
    """Return the output ``value`` of a network, one number for each row.

    Raises:
        PolicyOutputError: if it is missing, or has another shape.
    """
    return values_of_rows(named_outputs(output, "value")["value"], rows)


def values_of_rows(value: Any, rows: Sequence[int], *, what: str = "value") -> torch.Tensor:
    """Return one value for each row; a last dimension of 1, as ``nn.Linear(…, 1)`` has it, is cut.

    Args:
        value: what the network returned.
        rows: the leading dimensions of what it saw.
        what: the name of the output, for the message.

    Raises:
        PolicyOutputError: with both shapes, or if it is not of floating-point numbers.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        if value.shape == tuple(rows):
            return value
        if value.shape == (*rows, 1):
            return value.squeeze(-1)
    raise _unfit(value, what, f"one value for each row, {_shape(rows)}")


def critic_values(output: Any, n_rows: int) -> torch.Tensor:
    """Return what critics say of ``n_rows`` actions, ``[n_critics, B]``.

    A single critic may return ``[B]``, and a last dimension of 1 is cut.

    Raises:
        PolicyOutputError: for any other shape, or if it is not of floating-point numbers.
    """
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        if output.dim() == 2 and output.shape[1] == n_rows:
            return output
        values = output.squeeze(-1) if output.dim() > 1 and output.shape[-1] == 1 else output
        values = values.unsqueeze(0) if values.dim() == 1 else values
        if values.dim() == 2 and values.shape[1] == n_rows:
            return values
    raise _unfit(output, "of the critics", f"[n_critics, B], here [n_critics, {n_rows}]")


def with_rows(output: Any, wanted: Sequence[int | str], *, what: str) -> torch.Tensor:
    """Return an output of floating-point numbers that has the wanted shape.

    Args:
        output: what the network returned.
        wanted: the shape; a name stands for any length.
        what: the name of the output, for the message.

    Raises:
        PolicyOutputError: for another shape or another kind of numbers.
    """
    is_numbers = isinstance(output, torch.Tensor) and output.is_floating_point()
    if is_numbers and output.dim() == len(wanted):
        for size, expected in zip(output.shape, wanted, strict=True):
            if size != expected and type(expected) is not str:
                break
        else:
            numbers: torch.Tensor = output
            return numbers
    raise _unfit(output, what, _shape(wanted))


def _shape(sizes: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _quoted(names: Iterable[object]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _kind_of(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {_shape(output.shape)}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}"
    return f"{output!r:.60} of type {type(output).__name__}"


def _unfit(output: Any, what: str, expected: str) -> PolicyOutputError:
    remedy = "return a tensor of this shape from the model's forward"
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        problem = f"has shape {_shape(output.shape)}"
        remedy = "reshape it in the model's forward, for example with .squeeze(-1)"
    elif isinstance(output, torch.Tensor):
        problem, expected = f"has numbers of type {output.dtype}", "of floating-point numbers"
        remedy = "convert it in the model's forward, for example with .float()"
    elif isinstance(output, Mapping):
        problem = f"has the keys {', '.join(map(str, output))}"
    else:
        problem = f"has a {type(output).__name__}"
    return PolicyOutputError(
        f"the output {what} of the model {problem}, but must be {expected}; {remedy}"
    )
