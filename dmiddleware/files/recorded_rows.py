"""Reading recorded data from whatever file has them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from dmiddleware.errors import ConfigError, DatasetError
from dmiddleware.files.minari import load_minari
from dmiddleware.files.offline_dataset import OfflineDataset
from dmiddleware.tree import Batch, as_tree, items_of, leaves, map_leaves

__all__ = ["load_rows"]

_D4RL: Final = ("observations", "actions", "rewards", "terminals")
_WANTED: Final = (
    "obs, action, reward, next_obs, done and terminated, or those of D4RL: observations, actions, "
    "rewards, terminals, and timeouts and next_observations if there are any"
)

_log = logging.getLogger(__name__)


def load_rows(path: str | Path) -> Batch:
    """Read recorded data ``[N, …]``.

    Columns may have the names of D4RL: then they get ours, numbers become float32, and rows without
    a next observation, at the end of an episode that a time limit has cut, are left out. Without a
    column ``terminated`` every ``done`` counts as a termination, with a warning.

    Args:
        path: a file of :class:`~middleware.OfflineDataSaver` (``.safetensors``), an HDF5 file with
            a dataset for each column (``.hdf5`` or ``.h5``), or the id or the folder of a Minari
            dataset.

    Raises:
        ConfigError: for an empty name, for a pickle, which would run code, or if the package h5py
            is not installed.
        DatasetError: if there are no such data, columns differ in length, or one is missing that
            all algorithms need.
    """
    file = Path(path)
    if not str(path):
        raise ConfigError(
            "no recorded data are named; give data (ditask train: --data), which is a file, or the "
            "id of a Minari dataset"
        )
    if file.suffix in (".pkl", ".pickle"):
        raise ConfigError(
            f"{path} is a pickle, which runs code when it is loaded; save the data as HDF5, or "
            "with dmiddleware.data.save_dataset"
        )
    if file.suffix in (".hdf5", ".h5"):
        return _completed(_hdf5_rows(file), file)
    if file.suffix == ".safetensors":
        with OfflineDataset(file) as dataset:
            return _completed(dataset.rows(slice(None)), file)
    if file.is_file():
        raise DatasetError(
            f"{path} is not a file of recorded data; it must end in .hdf5, .h5 or .safetensors, or "
            "be the folder or the id of a Minari dataset; dmiddleware.data.save_dataset writes "
            "arrays by name, such as dict(numpy.load(...)), to a .safetensors file"
        )
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
                str(name): torch.from_numpy(column[()])
                for name, column in file.items()
                if isinstance(column, h5py.Dataset)
                and column.ndim > 0
                and column.dtype.kind in "biuf"
            }
            groups = [str(name) for name in file if isinstance(file[name], h5py.Group)]
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    if not columns:
        inner = f", but the groups {', '.join(groups)}" if groups else ""
        raise DatasetError(f"{path} has no columns of numbers{inner}; wanted are {_WANTED}")
    if len({len(column) for column in columns.values()}) > 1:
        shapes = {name: tuple(dataset.shape) for name, dataset in columns.items()}
        raise DatasetError(f"{path} must have a column of the same length for each name: {shapes}")
    return as_tree(columns)


def _completed(rows: Batch, path: Path) -> Batch:
    """Return rows with our names, and with the flags that follow from others.

    Raises:
        DatasetError: if columns are missing.
    """
    columns = dict(items_of(rows))
    if "obs" not in columns and all(name in columns for name in _D4RL):
        return _from_d4rl(columns, path)
    missing = [name for name in ("obs", "action") if name not in columns]
    if not {"done", "terminated"} & columns.keys():
        missing.append("done")
    if missing:
        raise DatasetError(
            f"{path} lacks {', '.join(missing)}; it has {', '.join(_described(columns))}; wanted "
            f"are {_WANTED}"
        )
    if "terminated" not in columns:
        _log.warning(
            "%s has done, but no terminated, so each end of an episode counts as a termination, "
            "after which there is no reward; add the column if a time limit has cut episodes",
            path,
        )
        columns["terminated"] = columns["done"]
    elif "done" not in columns:
        columns["done"] = _flag(columns, "terminated") | _flag(columns, "truncated")
    return as_tree(columns)


def _described(columns: Mapping[str, Any]) -> Iterator[str]:
    for name, leaf in leaves(columns):
        yield f"{name} {list(leaf.shape)}"


def _flag(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a column as bool ``[N]``; a missing one is False."""
    column = columns.get(name)
    if column is None:
        return torch.zeros(len(next(iter(columns.values()))), dtype=torch.bool)
    return column.reshape(len(column)) != 0


def _from_d4rl(columns: Mapping[str, Any], path: Path) -> Batch:
    """Return rows that have the names of D4RL.

    Without next observations they are those of the next rows, so the last row of an episode that a
    time limit has cut has none. It is left out, and the row before it is the last one.
    """
    terminated, truncated = _flag(columns, "terminals"), _flag(columns, "timeouts")
    if "timeouts" not in columns:
        _log.warning(
            "%s has no timeouts, so only terminals end an episode; where a time limit has cut one, "
            "the next row counts as its next step",
            path,
        )
    done = terminated | truncated
    episode_id = torch.zeros(len(done), dtype=torch.int64)
    episode_id[1:] = done[:-1].cumsum(0)
    obs = columns["observations"]
    if "next_observations" in columns:
        usable = torch.ones_like(done)
        next_obs = columns["next_observations"]
    else:
        usable = terminated | ~truncated
        usable[-1] = terminated[-1]
        truncated = truncated & terminated
        truncated[:-1] |= ~done[:-1] & ~usable[1:]
        next_obs = torch.cat([obs[1:], obs[-1:]])
        next_obs[terminated] = obs[terminated]  # not of the next episode
    rows = {
        "obs": obs,
        "action": columns["actions"],
        "reward": columns["rewards"].reshape(len(done)),
        "next_obs": next_obs,
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated & ~terminated,
        "episode_id": episode_id,
    }
    if not usable.any():
        raise DatasetError(f"{path} has no row with a next observation")
    return as_tree(map_leaves(lambda column: _as_float32(column[usable]), rows))


def _as_float32(column: torch.Tensor) -> torch.Tensor:
    return column.float() if column.is_floating_point() else column
