"""The face of ``ding.utils.data``: batches of rows, and recorded data."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import treetensor.torch as ttorch
from torch.utils.data import Dataset

from dmiddleware.data import index_rows, load_rows, to_dict
from dmiddleware.ding.registries import OldRegistry
from dmiddleware.ding.utils.collections import import_module
from dmiddleware.errors import ConfigError

__all__ = [
    "D4RLDataset",
    "HDF5Dataset",
    "NaiveRLDataset",
    "create_dataset",
    "default_collate",
    "default_decollate",
    "hdf5_save",
    "offline_data_save_type",
    "timestep_collate",
    "ttorch_collate",
]

_LANGUAGE: Final = "data of language models are not here; use trl, verl or OpenRLHF"

REFUSED: Final[Mapping[str, str]] = {
    "AsyncDataLoader": "use torch.utils.data.DataLoader",
    "BCODataset": "behavioral cloning from observations is not here; use bc, which needs actions",
    "OfflineRLDataset": _LANGUAGE,
    "OnlineRLDataset": _LANGUAGE,
}

DATASET_REGISTRY: Final = OldRegistry("dataset")


def default_collate(
    batch: Any, cat_1dim: bool = True, ignore_prefix: Sequence[str] = ("collate_ignore",)
) -> Any:
    """Stack rows: tensors, arrays, numbers, and dictionaries, tuples and lists of them.

    Args:
        batch: the rows.
        cat_1dim: whether rows ``[1]`` become ``[B]``, and not ``[B, 1]``.
        ignore_prefix: entries whose keys begin with these stay lists.

    Raises:
        TypeError: for rows of another type.
    """
    if isinstance(batch, ttorch.Tensor):
        return batch.json()
    first = batch[0]
    options: dict[str, Any] = {"cat_1dim": cat_1dim, "ignore_prefix": ignore_prefix}
    if isinstance(first, ttorch.Tensor):
        return ttorch_collate(batch, json=True, cat_1dim=cat_1dim)
    if isinstance(first, torch.Tensor):
        return (
            torch.cat(list(batch)) if first.shape == (1,) and cat_1dim else torch.stack(list(batch))
        )
    if isinstance(first, np.ndarray):
        return default_collate([torch.as_tensor(row) for row in batch], **options)
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {
            key: [row[key] for row in batch]
            if key.startswith(tuple(ignore_prefix))
            else default_collate([row[key] for row in batch], **options)
            for key in first
        }
    if isinstance(first, Sequence):
        columns = [default_collate(column, **options) for column in zip(*batch, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return _numbers(batch)


def _numbers(batch: Any) -> torch.Tensor:
    if not isinstance(batch[0], float | int | np.generic):
        raise TypeError(
            "only tensors, arrays, numbers, dictionaries and lists can be stacked, "
            f"got {type(batch[0]).__name__}"
        )
    is_python_float = isinstance(batch[0], float) and not isinstance(batch[0], np.generic)
    return torch.as_tensor(np.asarray(batch), dtype=torch.float32 if is_python_float else None)


def default_decollate(
    batch: Any,
    ignore: Sequence[str] = ("prev_state", "prev_actor_state", "prev_critic_state"),
) -> list[Any]:
    """Return the rows of a batch; entries named in ``ignore`` are lists of rows already.

    Raises:
        TypeError: for a batch that is neither a tensor, a list nor a dictionary.
    """
    if isinstance(batch, torch.Tensor):
        return list(batch.unbind(0)) if batch.dim() > 1 else list(torch.split(batch, 1))
    if isinstance(batch, Mapping):
        columns = [x if key in ignore else default_decollate(x) for key, x in batch.items()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(batch, Sequence):
        return list(zip(*map(default_decollate, batch), strict=True))
    if isinstance(batch, torch.distributions.Distribution):
        return [None] * batch.batch_shape[0]
    raise TypeError(f"a batch is a tensor, a list or a dictionary, got {type(batch).__name__}")


def timestep_collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack sequences, dictionaries of lists of ``T`` steps, to ``[T, B, …]``.

    ``prev_state`` is not stacked: it becomes a list of ``T`` tuples of ``B`` states.
    """
    states = [row["prev_state"] for row in batch]
    rest = [{key: x for key, x in row.items() if key != "prev_state"} for row in batch]
    stacked: dict[str, Any] = _stack_steps(default_collate(rest))
    return {**stacked, "prev_state": list(zip(*states, strict=True))}


def _stack_steps(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _stack_steps(value) for key, value in data.items()}
    is_steps = isinstance(data, list | tuple) and isinstance(data[0], torch.Tensor)
    return torch.stack(list(data)) if is_steps else data


def ttorch_collate(x: Any, json: bool = False, cat_1dim: bool = True) -> Any:
    """Stack trees of tensors; ``cat_1dim`` makes ``[B]`` of ``[B, 1]``, ``json`` a dictionary."""
    tree = ttorch.stack(list(x))
    if cat_1dim:
        tree = ttorch.as_tensor(_squeezed(tree.json()))
    return tree.json() if json else tree


def _squeezed(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _squeezed(value) for key, value in data.items()}
    return data.squeeze(-1) if data.dim() == 2 and data.shape[1] == 1 else data


class _Rows(Dataset[dict[str, Any]]):
    """Recorded rows.

    Attributes:
        rows: all of them, ``[N, …]``, for ``offline_data_fetcher``.
    """

    def __init__(self, path: str | Path) -> None:
        self.rows = load_rows(path)

    def __len__(self) -> int:
        return len(self.rows["done"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = to_dict(index_rows(self.rows, index))
        return row

    @property
    def statistics(self) -> SimpleNamespace:
        """The observations' ``mean`` and ``std``, and ``action_bounds``, ``[2, A]``."""
        obs, action = (np.asarray(self.rows[name], np.float64) for name in ("obs", "action"))
        low, high = action.min(0), action.max(0)
        margin = 0.05 * (high - low)
        return SimpleNamespace(
            mean=obs.mean(0),
            std=obs.std(0) + 1e-3,
            action_bounds=np.stack([low - margin, high + margin]),
        )


@DATASET_REGISTRY.register("hdf5")
class HDF5Dataset(_Rows):
    """The rows of the file that ``cfg.policy.collect.data_path`` names."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg.policy.collect.data_path)


@DATASET_REGISTRY.register("d4rl")
class D4RLDataset(_Rows):
    """The rows of ``data_path``, or those of Minari that have the name of D4RL ``env_id``.

    Raises:
        ConfigError: for data of D4RL that Minari does not have.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg.policy.collect.get("data_path") or _minari_id(cfg.env.env_id))


def _minari_id(env_id: str) -> str:
    robot, _, level = env_id.rpartition("-")[0].partition("-")
    level = {"random": "simple"}.get(level, level)
    if robot not in ("hopper", "halfcheetah", "walker2d") or level not in _LEVELS:
        raise ConfigError(
            f"Minari has no data like {env_id} of D4RL; set policy.collect.data_path to an HDF5 "
            "file of rows, with D4RL's names or ours"
        )
    return f"mujoco/{robot}/{level}-v0"


_LEVELS: Final = ("simple", "medium", "expert")


@DATASET_REGISTRY.register("naive")
class NaiveRLDataset(Dataset[Any]):
    """A pickled list of transitions. It may run code: read only files that you trust.

    Args:
        cfg: a config with ``policy.collect.data_path``, or the path.
    """

    def __init__(self, cfg: Any) -> None:
        path = cfg if isinstance(cfg, str) else cfg.policy.collect.data_path
        self._data: list[Any] = pickle.loads(Path(path).read_bytes())

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    @property
    def rows(self) -> Any:
        """All transitions, stacked, ``[N, …]``."""
        return default_collate(self._data)


def create_dataset(cfg: Any, **options: Any) -> Any:
    """Return the dataset that ``cfg.policy.collect.data_type`` names."""
    import_module(cfg.get("import_names", []))
    return DATASET_REGISTRY.build(cfg.policy.collect.data_type, cfg=cfg, **options)


def hdf5_save(exp_data: Sequence[Mapping[str, Any]], expert_data_path: str) -> None:
    """Write transitions to ``<path without .pkl>_demos.hdf5``."""
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(f"{expert_data_path.replace('.pkl', '')}_demos.hdf5", "w") as file:
        for key in ("obs", "action", "reward", "done", "next_obs"):
            column = np.stack([np.asarray(row[key]) for row in exp_data])
            file.create_dataset(key, data=column, compression="gzip")


def offline_data_save_type(
    exp_data: Sequence[Any], expert_data_path: str, data_type: str = "naive"
) -> None:
    """Write transitions as a pickle (``naive``), or with :func:`hdf5_save` (``hdf5``).

    Raises:
        ValueError: for another type.
    """
    if data_type == "hdf5":
        hdf5_save(exp_data, expert_data_path)
    elif data_type == "naive":
        Path(expert_data_path).write_bytes(pickle.dumps(list(exp_data)))
    else:
        raise ValueError(f"data_type must be 'naive' or 'hdf5', got {data_type!r}")
