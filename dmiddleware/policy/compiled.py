"""Functions of a policy that torch compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dmiddleware.errors import PolicyError
from dmiddleware.torch_private import compiler_traces_gradients, is_from_compiler
from dmiddleware.tree import Batch, to_dict

__all__ = ["CompiledFunction"]


class CompiledFunction:
    """A function that torch compiles in one graph when it is called first; a copy, once more.

    Args:
        function: the function, or a network.
        user: its name, for messages.
    """

    def __init__(self, function: Callable[..., dict[str, Any]], *, user: str) -> None:
        self._function, self._user = function, user
        self._compiled: Callable[..., dict[str, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Call the function; it gets treetensors as dictionaries, which the compiler can trace.

        Raises:
            PolicyError: if torch cannot compile it.
        """
        if self._compiled is None:
            self._compiled = self._compile()
        args = tuple([to_dict(value) if isinstance(value, Batch) else value for value in args])
        try:
            return self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if not is_from_compiler(error):
                raise
            raise PolicyError(
                f"torch cannot compile {self._user}; set compile=False, or change the code that "
                f"torch names: {error}"
            ) from error

    def _compile(self) -> Callable[..., dict[str, Any]]:
        compiler_traces_gradients()
        compiled: Callable[..., dict[str, Any]]
        compiled = torch.compile(  # type: ignore[call-overload]  # stubs of torch 2.13
            self._function,
            fullgraph=True,
            isolate_recompiles=True,
            options={"guard_filter_fn": _guards_to_keep},
        )
        return compiled


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Return which of the compiler's guards to check before each call: those that may fail.

    Most guards are about modules and about the code of the update, which stay what they are.
    Checking all of them takes longer than some updates. Guards of the batch, and of what else the
    policy holds, are kept.
    """
    filters: list[Callable[..., list[bool]]] = [
        torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        torch.compiler.skip_guard_on_globals_unsafe,
    ]
    return [all(answers) for answers in zip(*(keep(guards) for keep in filters), strict=True)]
