"""Reads pickled files of DI-engine, without running code from them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from dmiddleware.errors import DataError

__all__ = ["load_pickle"]

_SAFE: Final[Mapping[str, frozenset[str]]] = {
    "builtins": frozenset({"bytearray", "complex", "frozenset", "range", "set", "slice"}),
    "collections": frozenset({"OrderedDict", "defaultdict", "deque"}),
    "easydict": frozenset({"EasyDict"}),
    "numpy": frozenset({"dtype", "ndarray"}),
    "numpy.core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy._core.multiarray": frozenset({"_reconstruct", "scalar"}),
    "numpy.core.numeric": frozenset({"_frombuffer"}),
    "numpy._core.numeric": frozenset({"_frombuffer"}),
    "torch": frozenset({"Size", "device", "dtype"}),
    "torch._utils": frozenset({"_rebuild_parameter", "_rebuild_tensor_v2"}),
}
"""What a file may name: plain containers, arrays and tensors."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        if module == "_codecs" and name == "encode":  # bytes, as protocol 2 writes them
            return lambda text, encoding: text.encode(encoding)
        if name not in _SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def load_pickle(path: str | Path) -> Any:
    """Return what a file holds: plain values, arrays and tensors, in lists and dictionaries.

    Raises:
        OSError: if the file cannot be read.
        DataError: if it is damaged, or holds anything else.
    """
    content = Path(path).read_bytes()
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged file can raise anything
        raise DataError(
            f"{path} cannot be read as pickled arrays and tensors: {error}; save the data again, "
            "as lists and dictionaries of arrays"
        ) from error
