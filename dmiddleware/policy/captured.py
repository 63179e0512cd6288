"""Functions of tensors that are replayed as CUDA graphs, from inputs at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dmiddleware.errors import PolicyError
from dmiddleware.torch_private import copy_all
from dmiddleware.tree import Batch, as_tree, items_of, map_leaves

__all__ = ["WARM_UP", "CapturedFunction", "can_capture"]

WARM_UP: Final = 3
"""Calls of each form that run before one is captured: they compile, and fill caches."""


@dataclass(slots=True)
class _Recording:
    """A call that was captured: where its inputs are, how to repeat it, and what it returned."""

    tensors: list[torch.Tensor]
    numbers: list[torch.Tensor]
    replay: Callable[[], Any]


class CapturedFunction:
    """Replays the calls of a function as CUDA graphs: no Python runs, and no kernel is launched.

    Calls have one form if their tensors have the same shapes and types, floats are in the same
    places, and everything else is equal. The first :data:`WARM_UP` calls of a form are ordinary
    ones. The next one is captured, with its inputs at addresses of its own; it and all that follow
    copy their inputs there and replay. A float is a scalar tensor in such a call, so another value
    is the same form. On the CPU there is nothing to capture: the function runs on the copies.

    The function must not read values back, and whatever else it uses must stay in its place: it is
    read and changed there, without Python. After something was replaced, call :meth:`forget`.

    Args:
        function: takes tensors, numbers, text, and dictionaries, tuples and treetensors of these;
            returns a dictionary. Its tensors are copied, except for scalars, which hold until the
            next call.
        device: where its tensors are.
        user: its name, for messages.
        generators: returns the generators that it draws from, apart from torch's own.
    """

    def __init__(
        self,
        function: Callable[..., Mapping[str, Any]],
        device: torch.device | str,
        *,
        user: str,
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
    ) -> None:
        self._function, self._user, self._generators = function, user, generators
        self._device = torch.device(device)
        self._captures = can_capture(self._device)
        self._stream: Any = None
        self.forget()

    def forget(self) -> None:
        """Capture again, because something that the function uses has been replaced."""
        self._n_calls: dict[Hashable, int] = {}
        self._recordings: dict[Hashable, _Recording] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_n_calls": {}, "_recordings": {}, "_stream": None}

    def __call__(self, *arguments: Any) -> dict[str, Any]:
        """Call the function, or replay a call.

        Raises:
            PolicyError: if the call cannot be captured.
        """
        tensors: list[torch.Tensor] = []
        numbers: list[float] = []
        form = _form(arguments, tensors, numbers)
        recording = self._recordings.get(form)
        if recording is None:
            n_calls = self._n_calls.get(form, 0)
            if n_calls < WARM_UP:
                self._n_calls[form] = n_calls + 1
                return dict(self._warm_up(arguments))
            recording = self._recordings[form] = self._record(arguments)
        copy_all(recording.tensors, tensors)
        for place, number in zip(recording.numbers, numbers, strict=True):
            place.fill_(number)
        return _kept(recording.replay())

    def _warm_up(self, arguments: tuple[Any, ...]) -> Mapping[str, Any]:
        """Run a call where calls are captured: on a stream beside the present one."""
        if not self._captures:
            return self._function(*arguments)
        stream: Any = torch.cuda.Stream
        present, self._stream = torch.cuda.current_stream(), self._stream or stream()
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            output = self._function(*arguments)
        present.wait_stream(self._stream)
        return output

    def _record(self, arguments: tuple[Any, ...]) -> _Recording:
        tensors: list[torch.Tensor] = []
        numbers: list[torch.Tensor] = []
        placed = _placed(arguments, tensors, numbers, self._device)
        if not self._captures:
            return _Recording(tensors, numbers, lambda: self._function(*placed))
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators():
            graph.register_generator_state(generator)
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                output = self._function(*placed)
        except RuntimeError as error:
            raise PolicyError(
                f"{self._user} cannot be captured as a CUDA graph: {error}; it must not read "
                'values back from the device. Set compile=True in place of compile="graphs"'
            ) from error

        def replay() -> Any:
            graph.replay()
            return output

        return _Recording(tensors, numbers, replay)


def can_capture(device: torch.device) -> bool:
    """Return whether a device has graphs."""
    return device.type == "cuda"


def _form(value: Any, tensors: list[torch.Tensor], numbers: list[float]) -> Hashable:
    """Return what makes two calls alike, and collect what they may differ in."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, Batch | Mapping):
        return tuple([(key, _form(item, tensors, numbers)) for key, item in items_of(value)])
    if isinstance(value, tuple | list):
        return tuple([_form(item, tensors, numbers) for item in value])
    if isinstance(value, float):
        numbers.append(value)
        return float
    kind: Hashable = (type(value), value)  # 1 and True are equal
    return kind


def _placed(
    value: Any, tensors: list[torch.Tensor], numbers: list[torch.Tensor], device: torch.device
) -> Any:
    """Return a copy of a value, with floats as scalars of the device.

    The copies are collected in the order of :func:`_form`.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().clone(memory_format=torch.contiguous_format))
        return tensors[-1]
    if isinstance(value, Batch | Mapping):
        items = {key: _placed(item, tensors, numbers, device) for key, item in items_of(value)}
        return as_tree(items) if isinstance(value, Batch) else items
    if isinstance(value, tuple | list):
        return type(value)([_placed(item, tensors, numbers, device) for item in value])
    if isinstance(value, float):
        numbers.append(torch.full((), value, dtype=torch.float64, device=device))
        return numbers[-1]
    return value


def _kept(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return an output that the next replay does not overwrite, apart from scalars."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else leaf

    return {name: map_leaves(copied, value) for name, value in output.items()}
