"""Conversion between per-env data and batches.

A policy is written per env (dictionaries keyed by env id, lists of transitions) or batched
(tensors whose first dimension is the env); these functions turn one into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmiddleware.env import BatchedTimestep, EnvTimestep
from dmiddleware.errors import PolicyError, StructureError
from dmiddleware.policy.acting import ACT_KEYWORDS
from dmiddleware.tree import (
    Batch,
    Nested,
    Value,
    as_tree,
    from_numpy,
    index_rows,
    items_of,
    leaves,
    map_leaves,
    stack,
)

__all__ = [
    "collate",
    "collate_samples",
    "is_per_env",
    "join_inputs",
    "join_outputs",
    "join_transitions",
    "sample_by_trajectory",
    "split_inputs",
    "split_outputs",
    "split_trajectories",
    "to_rows",
]


def is_per_env(data: object) -> bool:
    """Return whether ``data`` is a dictionary keyed by env id (and not a nested observation)."""
    return isinstance(data, dict) and all(
        isinstance(key, int | np.integer) and not isinstance(key, bool) for key in data
    )


def collate(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack samples (per-env transitions) into a batch.

    Args:
        samples: dictionaries with the same keys; values are numbers, tensors, arrays, or nested
            dicts or tuples of them. Python numbers become float32, int64 or bool.

    Returns:
        A treetensor ``[len(samples), …]``.

    Raises:
        StructureError: if ``samples`` is empty, or they differ in keys or shapes.

    Example:
        >>> collate([{"reward": 0.5}, {"reward": 1.0}])["reward"]
        tensor([0.5000, 1.0000])
    """
    batch: Batch = stack(samples)
    return batch


def collate_samples(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack samples to learn from, like :func:`collate`.

    Columns of text or None stay plain lists, and an importance weight under its classic name ``IS``
    is taken as ``weight`` where there is none.

    Returns:
        A treetensor ``[len(samples), …]``.

    Raises:
        StructureError: as in :func:`collate`.
    """
    _check_any(samples)
    lists = {
        key: [sample.get(key) for sample in samples]
        for key, value in samples[0].items()
        if value is None or isinstance(value, str | bytes)
    }
    if lists:
        samples = [
            {key: value for key, value in one.items() if key not in lists} for one in samples
        ]
    columns: dict[str, Any] = dict(items_of(stack(samples)))
    if "IS" in columns and "weight" not in columns:
        columns["weight"] = columns["IS"]
    return as_tree(columns, lists=lists)


def split_outputs(
    outputs: Mapping[str, Value], env_ids: Sequence[int]
) -> dict[int, dict[str, Value]]:
    """Turn ``{key: [E, …]}`` into ``{env_id: {key: […]}}``."""
    return {
        env_id: {key: index_rows(value, position) for key, value in outputs.items()}
        for position, env_id in enumerate(env_ids)
    }


def split_inputs(inputs: Mapping[str, Any], env_ids: Sequence[int]) -> dict[str, Any]:
    """Turn the declared inputs among keyword arguments from ``[E, …]`` into ``{env_id: […]}``."""
    return {
        name: {env_id: index_rows(value, position) for position, env_id in enumerate(env_ids)}
        if name in ACT_KEYWORDS and isinstance(value, torch.Tensor | Batch)
        else value
        for name, value in inputs.items()
    }


def join_inputs(inputs: Mapping[str, Any], env_ids: Sequence[int]) -> dict[str, Any]:
    """Turn the declared inputs among keyword arguments from ``{env_id: […]}`` into ``[E, …]``.

    Raises:
        StructureError: if they differ in keys or shapes.
    """
    return {
        name: stack([value[env_id] for env_id in env_ids], path=name)
        if name in ACT_KEYWORDS and is_per_env(value)
        else value
        for name, value in inputs.items()
    }


def join_outputs(
    outputs: Mapping[int, Mapping[str, Any]], env_ids: Sequence[int]
) -> dict[str, Any]:
    """Turn ``{env_id: {key: […]}}`` into ``{key: [E, …]}``, in the order of ``env_ids``.

    Raises:
        PolicyError: if the policy returned no output for an env.
        StructureError: if the outputs differ in keys or shapes.
    """
    missing = [env_id for env_id in env_ids if env_id not in outputs]
    if missing:
        raise PolicyError(
            f"the policy was given observations of the envs {list(env_ids)}, but returned no "
            f"output for {missing}; return one output for every env id"
        )
    return dict(items_of(stack([outputs[env_id] for env_id in env_ids], path="output")))


def join_transitions(
    process: Callable[[Value, dict[str, Value], EnvTimestep], Mapping[str, Any]],
    obs: Nested,
    outputs: Mapping[str, Value],
    timestep: BatchedTimestep,
) -> Batch:
    """Make the transitions of one step, env by env, and stack them into columns ``[E, …]``."""
    per_env = split_outputs(outputs, list(range(len(timestep.env_id))))
    return collate(
        [
            process(index_rows(from_numpy(obs), index), output, one)
            for (index, output), one in zip(per_env.items(), timestep, strict=True)
        ]
    )


def to_rows(batch: Batch) -> list[dict[str, Any]]:
    """Turn a treetensor ``[N, …]`` into ``N`` dictionaries; leaves are views."""
    keys = [str(key) for key in batch]
    length = next(iter(leaves(batch)))[1].shape[0]
    return [{key: index_rows(batch[key], position) for key in keys} for position in range(length)]


def split_trajectories(transitions: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Cut one env's consecutive transitions after each ``done``, and where ``episode_id`` changes.

    The last piece may be an episode that is not over.
    """
    pieces: list[list[dict[str, Any]]] = []
    piece: list[dict[str, Any]] = []
    for transition in transitions:
        if piece and _other_episode(piece[-1], transition):
            pieces.append(piece)
            piece = []
        piece.append(transition)
        if bool(transition["done"]):
            pieces.append(piece)
            piece = []
    if piece:
        pieces.append(piece)
    return pieces


def sample_by_trajectory(
    batch: Batch, get_train_sample: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> Batch:
    """Apply a per-env ``get_train_sample`` to every trajectory of a batch and stack the samples.

    Args:
        batch: ``[T, E, …]``, or one episode ``[T, …]``.
        get_train_sample: turns a list of transitions into a list of samples.

    Returns:
        ``[T, E, …]`` if every env's trajectories yield ``T`` samples; otherwise all samples in one
        dimension, ``[N, …]``, env after env. For an episode, ``[N, …]``.
    """
    if batch["done"].dim() == 1:
        return collate(_samples_of(to_rows(batch), get_train_sample))
    n_steps, n_envs = batch["done"].shape
    per_env = [
        _samples_of(to_rows(map_leaves(lambda leaf, e=env: leaf[:, e], batch)), get_train_sample)
        for env in range(n_envs)
    ]
    samples = collate([sample for samples in per_env for sample in samples])
    if any(len(samples) != n_steps for samples in per_env):
        return samples
    return map_leaves(lambda leaf: leaf.unflatten(0, (n_envs, n_steps)).transpose(0, 1), samples)


def _check_any(samples: Sequence[object]) -> None:
    if not samples:
        raise StructureError("a batch needs at least one sample, got none")


def _samples_of(
    transitions: list[dict[str, Any]],
    get_train_sample: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    return [one for piece in split_trajectories(transitions) for one in get_train_sample(piece)]


def _other_episode(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return "episode_id" in after and int(before["episode_id"]) != int(after["episode_id"])
