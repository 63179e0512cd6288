"""CUDA graphs that need no device: they record the operations of a call, and repeat them.

As with a CUDA graph, no Python of the function runs in a replay: its operations read and change the
same tensors again. A value that the function read, an input at another address, or a tensor that
was replaced shows up as a difference from the function itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["RecordedGraph", "compiled_in_name", "recorded_graphs"]


class RecordedGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.generators: list[torch.Generator] = []
        self.n_replays = 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.n_replays += 1
        with torch.no_grad():
            for operation, args, kwargs, outputs in self.operations:
                again = tree_flatten(operation(*args, **kwargs))[0]
                for place, value in zip(tree_flatten(outputs)[0], again, strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class _Capture(TorchDispatchMode):
    """Records operations. What they change is put back at the end: a capture computes nothing."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self._states = [generator.get_state() for generator in graph.generators]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        generator = kwargs.get("generator")
        seeds = [registered.initial_seed() for registered in self._graph.generators]
        if generator is not None and generator.initial_seed() not in seeds:
            raise RuntimeError("the generator was not registered")
        outputs = func(*args, **kwargs)
        self._made |= {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_flatten(outputs)[0]
            if isinstance(leaf, torch.Tensor)
        } - {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_flatten((args, kwargs))[0]
            if isinstance(leaf, torch.Tensor)
        }
        self._graph.operations.append((func, args, kwargs, outputs))
        return outputs

    def _keep(self, value: Any) -> None:
        for leaf in tree_flatten(value)[0]:
            key = leaf.untyped_storage().data_ptr()
            if key not in self._made and key not in self._before:
                whole = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
                self._before[key] = (whole, whole.clone())

    def put_back(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)
        for generator, state in zip(self._graph.generators, self._states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """Let policies that are made in a ``with`` block capture on the CPU; yields the graphs."""
    graphs: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    @contextlib.contextmanager
    def capture(graph: RecordedGraph, **options: Any) -> Iterator[None]:
        recording = _Capture(graph)
        with recording:
            yield
        recording.put_back()

    with (
        mock.patch("torch.cuda.CUDAGraph", new_graph),
        mock.patch("torch.cuda.graph", capture),
        mock.patch("torch.cuda.Stream", mock.MagicMock()),
        mock.patch("torch.cuda.stream", mock.MagicMock()),
        mock.patch("torch.cuda.current_stream", mock.MagicMock()),
        mock.patch("torch.nn.functional.one_hot", _one_hot),
        mock.patch("dmiddleware.policy.captured.can_capture", lambda device: True),
    ):
        yield graphs


def _one_hot(index: torch.Tensor, n: int) -> torch.Tensor:
    """Do what torch's function does on a device: on the CPU it reads the values, to check them."""
    return (index.unsqueeze(-1) == torch.arange(n)).long()


def compiled_in_name(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Stand for ``torch.compile``: take the paths of compiled code, but run them as Python."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            return function(*args, **kwargs)

    return run
