"""Import and export of Minari datasets (https://minari.farama.org)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.errors import ConfigError, DatasetError, StructureError
from dmiddleware.files.schema import lead_of
from dmiddleware.registry import nearest
from dmiddleware.tree import Batch, as_tree, cat, index_rows, leaves, map_leaves, to_numpy

__all__ = ["load_minari", "save_minari"]

_COLUMNS = ("obs", "action", "reward", "next_obs", "done", "terminated", "episode_id")


def load_minari(dataset: str | Path) -> Batch:
    """Read a Minari dataset that is on this machine; nothing is downloaded.

    Args:
        dataset: the id, such as ``"Pendulum-v1/mixed-v0"``, or the folder of the dataset.

    Returns:
        All rows, ``[N, …]``, episode after episode: ``obs``, ``next_obs``, ``action``, ``reward``
        float32, ``done``, ``terminated`` and ``truncated`` bool, ``episode_id`` int64. Columns of
        Dict and Tuple spaces are nested, and float64 becomes float32. The last row of an episode
        that was neither terminated nor truncated counts as truncated, because the data ends there.

    Raises:
        ConfigError: if the package minari is not installed.
        DatasetError: if there is no such dataset here, it has no rows, or an episode of it is not
            one: its columns differ in length, or it continues after its end.
    """
    opened = _open(dataset)
    episodes: list[Batch] = []
    for number, episode in enumerate(opened.iterate_episodes()):
        if len(episode.rewards):
            episodes.append(_rows_of(episode, number, name=str(dataset)))
    if not episodes:
        raise DatasetError(f"the Minari dataset {dataset} has no rows; record it again")
    return cat(episodes)


def save_minari(
    rows: Batch | Sequence[Batch],
    dataset_id: str,
    *,
    env: str | gym.Env[Any, Any] | None = None,
    observation_space: gym.Space[Any] | None = None,
    action_space: gym.Space[Any] | None = None,
    algorithm: str | None = None,
    description: str | None = None,
) -> Path:
    """Write collected rows as a Minari dataset, without loss.

    It is written to the folder of Minari's datasets: ``~/.minari/datasets``, or the environment
    variable ``MINARI_DATASETS_PATH``. Episodes that the rows do not contain to their end are marked
    as truncated.

    Args:
        rows: one or several batches, ``[N, …]``, or ``[T, E, …]`` if ``done`` has two dimensions,
            as collectors return them. They need the columns ``obs``, ``action``, ``reward``,
            ``next_obs``, ``done``, ``terminated`` and ``episode_id``; others are left out. The rows
            of an episode are in temporal order.
        dataset_id: a new id, such as ``"Pendulum-v1/mixed-v0"``.
        env: the environment or its id, which Minari stores with the data; None: not known.
        observation_space: that of one environment; None: that of ``env``.
        action_space: that of one environment; None: that of ``env``.
        algorithm: what collected the data.
        description: what to know about the data.

    Returns:
        The folder of the dataset, which :func:`load_minari` reads.

    Raises:
        ConfigError: if the package minari is not installed, ``env`` and the spaces are missing, or
            Minari rejects the id, for example because it exists.
        StructureError: if a column is missing, or the rows of an episode do not follow each other.
    """
    minari = _minari()
    if env is None and (observation_space is None or action_space is None):
        raise ConfigError(
            "save_minari needs env, or observation_space and action_space; pass the env's id"
        )
    recorded = gym.make(env) if isinstance(env, str) else env
    spaces = {
        "observations": observation_space or getattr(recorded, "observation_space", None),
        "actions": action_space or getattr(recorded, "action_space", None),
    }
    flat = cat([_flat(piece) for piece in ([rows] if isinstance(rows, Batch) else rows)])
    episodes = [_episode_of(piece, spaces) for piece in _split_episodes(flat)]
    buffer_cls = importlib.import_module("minari.data_collector").EpisodeBuffer
    try:
        with warnings.catch_warnings():
            # Minari warns about everything that is not stated about a dataset.
            warnings.simplefilter("ignore", UserWarning)
            written = minari.create_dataset_from_buffers(
                dataset_id,
                [buffer_cls(**episode) for episode in episodes],
                env=recorded,
                observation_space=spaces["observations"],
                action_space=spaces["actions"],
                algorithm_name=algorithm,
                description=description,
                jpeg_encoding=False,
            )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Minari cannot write the dataset {dataset_id!r}: {error}") from error
    finally:
        if isinstance(env, str) and recorded is not None:
            recorded.close()
    return Path(written.spec.data_path)


def _minari() -> Any:
    try:
        importlib.import_module("h5py")
        return importlib.import_module("minari")
    except ImportError as error:
        raise ConfigError(
            f"Minari datasets need a package that is not installed ({error}); run: "
            "pip install 'dmiddleware[minari]'"
        ) from error


def _open(dataset: str | Path) -> Any:
    minari = _minari()
    folder = Path(dataset)
    try:
        if folder.is_dir():
            inner = folder / "data"
            return minari.MinariDataset(inner if inner.is_dir() else folder)
        if isinstance(dataset, str):
            return minari.load_dataset(dataset)
    except FileNotFoundError:
        pass  # reported below
    except ValueError as error:
        raise DatasetError(f"{dataset} is not a usable Minari dataset: {error}") from error
    local_ids = minari.list_local_datasets()
    near = ", ".join(nearest(str(dataset), local_ids)) or ", ".join(sorted(local_ids)[:5]) or "none"
    raise DatasetError(
        f"the Minari dataset {str(dataset)!r} is not on this machine; the nearest here: {near}. "
        f"Download it with `minari download {dataset}`, or pass the folder of the dataset"
    )


def _rows_of(episode: Any, number: int, *, name: str) -> Batch:
    """Return the rows of an episode, whose observations are one more than its steps."""
    n = len(episode.rewards)
    columns = as_tree({"obs": episode.observations, "action": episode.actions})
    columns = map_leaves(_as_float32, columns)
    flags = [np.asarray(flag, bool) for flag in (episode.terminations, episode.truncations)]
    lengths = {"terminations": len(flags[0]), "truncations": len(flags[1])}
    lengths |= {f"actions {path}".strip(): len(a) for path, a in leaves(columns["action"])}
    lengths |= {f"observations {path}".strip(): len(o) - 1 for path, o in leaves(columns["obs"])}
    wrong = [key for key, length in lengths.items() if length != n]
    if wrong:
        raise DatasetError(
            f"episode {number} of the Minari dataset {name} has {n} rewards, which does not fit "
            f"its {', '.join(wrong)}; it must have as many actions and flags, and one more "
            "observation"
        )
    terminated, truncated = flags
    early = np.flatnonzero((terminated | truncated)[:-1])
    if len(early):
        raise DatasetError(
            f"episode {number} of the Minari dataset {name} continues after step {early[0]}, which "
            "ended it; split it there, because the next observation belongs to another episode"
        )
    truncated = truncated.copy()
    truncated[-1] |= not terminated[-1]
    return as_tree(
        {
            "obs": index_rows(columns["obs"], slice(0, n)),
            "next_obs": index_rows(columns["obs"], slice(1, None)),
            "action": columns["action"],
            "reward": np.asarray(episode.rewards, np.float32),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
            "episode_id": np.full(n, number, np.int64),
        }
    )


def _as_float32(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.float() if leaf.dtype is torch.float64 else leaf


def _flat(rows: Batch) -> Batch:
    """Return the needed columns of rows as ``[N, …]``, lane by lane."""
    missing = [name for name in _COLUMNS if name not in rows]
    if missing:
        raise StructureError(
            f"a Minari dataset needs the columns {', '.join(_COLUMNS)}, but the rows lack "
            f"{', '.join(missing)}; collect them with a RolloutCollector or a StepCollector"
        )
    chosen = as_tree({name: rows[name] for name in _COLUMNS})
    if len(lead_of(chosen)) == 1:
        return chosen
    return map_leaves(lambda leaf: leaf.transpose(0, 1).flatten(0, 1), chosen)


def _split_episodes(rows: Batch) -> list[dict[str, Any]]:
    """Return the columns of each episode, as nested arrays, after checking the links."""
    ids = rows["episode_id"]
    order = ids.argsort(stable=True)
    rows = index_rows(rows, order)
    ids = rows["episode_id"]
    last = torch.ones_like(rows["done"])
    last[:-1] = ids[1:] != ids[:-1]
    linked = ~last[:-1]
    follows = torch.ones_like(linked)
    obs, next_obs = (dict(leaves(rows[name])) for name in ("obs", "next_obs"))
    for path, leaf in next_obs.items():
        same = (leaf[:-1] == obs[path][1:]) | (leaf[:-1] != leaf[:-1])  # NaN equals NaN
        follows &= same.flatten(1).all(1) if same.dim() > 1 else same
    broken = torch.nonzero(linked & (~follows | rows["done"][:-1])).flatten()
    if len(broken):
        row = int(broken[0])
        raise StructureError(
            f"episode {int(ids[row])} continues after row {int(order[row])}, but the next row is "
            "not its next step; pass whole episodes in temporal order, without missing rows"
        )
    ends = (torch.nonzero(last).flatten() + 1).tolist()
    columns = to_numpy(rows)
    return [
        index_rows(columns, slice(start, end))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _episode_of(
    episode: Mapping[str, Any], spaces: Mapping[str, gym.Space[Any] | None]
) -> dict[str, Any]:
    """Return the fields of an episode as Minari names and nests them."""
    truncated = np.zeros_like(episode["terminated"])
    truncated[-1] = not episode["terminated"][-1]
    return {
        "observations": _as_of_space(
            spaces["observations"], _with_last(episode["obs"], episode["next_obs"])
        ),
        "actions": _as_of_space(spaces["actions"], episode["action"]),
        "rewards": episode["reward"],
        "terminations": episode["terminated"],
        "truncations": truncated,
    }


def _with_last(obs: Any, next_obs: Any) -> Any:
    """Return observations with the successor of the last one."""
    return map_leaves(lambda leaf, after: np.concatenate([leaf, after[-1:]]), obs, next_obs)


def _as_of_space(space: gym.Space[Any] | None, column: Any) -> Any:
    """Return a nested column with tuples where the space has them."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _as_of_space(inner, column[key]) for key, inner in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(
            _as_of_space(inner, column[str(place)]) for place, inner in enumerate(space.spaces)
        )
    return column
