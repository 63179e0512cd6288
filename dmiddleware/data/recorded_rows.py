"""Reading recorded data from whatever file has them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from dmiddleware.data.minari import load_minari
from dmiddleware.data.offline_dataset import OfflineDataset
from dmiddleware.errors import ConfigError, DatasetError
from dmiddleware.tree import Batch, as_tree

__all__ = ["load_rows"]


def load_rows(path: str | Path) -> Batch:
    """Read recorded data ``[N, …]``.

    Args:
        path: a file of :class:`~middleware.OfflineDataSaver` (``.safetensors``), an HDF5 file with
            a dataset for each column (``.hdf5`` or ``.h5``), or the id or the folder of a Minari
            dataset.

    Raises:
        ConfigError: for an empty name, for a pickle, which would run code, or if the package h5py
            is not installed.
        DatasetError: if there are no such data, or columns differ in length.
    """
    file = Path(path)
    if not str(path):
        raise ConfigError("name recorded data: a file, or the id of a Minari dataset")
    if file.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{path} is a pickle, which runs code when it is loaded; save the data as HDF5, or "
            "with dmiddleware.data.save_dataset"
        )
    if file.suffix in (".hdf5", ".h5"):
        return _hdf5_rows(file)
    if file.suffix == ".safetensors":
        with OfflineDataset(file) as dataset:
            return dataset.rows(slice(None))
    return load_minari(path)


def _hdf5_rows(path: Path) -> Batch:
    try:
        h5py: Any = importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading {path} needs the package h5py; run: pip install h5py"
        ) from error
    if not path.is_file():
        raise DatasetError(f"there is no file {path}")
    try:
        with h5py.File(path, "r") as file:
            columns = {
                str(name): torch.from_numpy(one[()])
                for name, one in file.items()
                if isinstance(one, h5py.Dataset) and one.ndim > 0
            }
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    if "done" in columns:
        columns.setdefault("terminated", columns["done"])
    if not columns or len({len(one) for one in columns.values()}) > 1:
        shapes = {name: tuple(one.shape) for name, one in columns.items()}
        raise DatasetError(f"{path} must have a column of the same length for each name: {shapes}")
    return as_tree(columns)
