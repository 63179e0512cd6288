"""The entry point of configs in the classic shape that learn from recorded data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dmiddleware.classic import Policy, StockPolicy, create_policy
from dmiddleware.classic.logs import output_folder
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.data import load_rows
from dmiddleware.errors import ConfigError
from dmiddleware.seeding import derive_seed, seed_libraries
from dmiddleware.tensorboard import TensorboardWriter
from dmiddleware.tree import Batch, index_rows, lead_shape
from dmiddleware.worker.entry import (
    NO_LIMIT,
    check_learns_from_rows,
    compile_config,
    section_of,
)
from dmiddleware.worker.env_config import make_envs
from dmiddleware.worker.evaluator import create_serial_evaluator
from dmiddleware.worker.learner import create_learner
from dmiddleware.worker.progress import Progress

__all__ = ["names_data", "offline_run"]

_SECTIONS: Final = ("collect", "learn")
_KEYS: Final = ("data_path", "data_type", "train_epoch")
"""Keys of the policy's sections that only this entry point reads."""
_EPOCHS: Final = 1


def names_data(main: Mapping[str, Any]) -> bool:
    """Return whether a main config names recorded data to learn from."""
    policy = main.get("policy")
    sections = [policy.get(name) for name in _SECTIONS] if isinstance(policy, Mapping) else []
    return any("data_path" in one for one in sections if isinstance(one, Mapping))


def offline_run(
    main: Mapping[str, Any],
    create: Mapping[str, Any] | None = None,
    seed: int = 0,
    max_train_iter: int = NO_LIMIT,
    *,
    data: str | Path | None = None,
    model: nn.Module | None = None,
    show_progress: bool = True,
) -> Policy:
    """Train a policy from recorded data, as a config in the classic shape describes.

    The learner goes through all rows ``learn.train_epoch`` times, in batches of
    ``learn.batch_size`` and in a new order each time. The evaluator plays when it is due, and the
    learner saves the best policy. This ends early at the evaluator's ``stop_value``.

    Args:
        main: see :func:`compile_config`; ``policy.collect.data_path`` names the data.
        create: see :func:`compile_config`.
        seed: the seed of everything random.
        max_train_iter: most training iterations.
        data: what to learn from, in place of ``data_path``; see
            :func:`~dmiddleware.data.load_rows`.
        model: a module for the policy; None builds the one that ``policy.model`` describes.
        show_progress: whether to show updates and returns on the standard error stream.

    Returns:
        The policy as it is at the end. The best one is in
        ``<exp_name>/ckpt_learner/ckpt_best.safetensors``.

    Raises:
        ConfigError: for an unusable config, without data, or for an algorithm that learns from
            sequences.
        DatasetError: if there are no such data.
        RegistryError: for an unknown ``type``.
    """
    main, given = _without_data(main)
    path = data if data is not None else given.get("data_path")
    if not path:
        raise ConfigError(
            "the config names no data; set policy.collect.data_path, or pass data= (ditask classic "
            "--data)"
        )
    cfg = compile_config(main, create, seed=seed)
    rows = load_rows(path)
    seed_libraries(seed)
    policy = create_policy(cfg.policy, model=model)
    check_learns_from_rows(policy)
    if isinstance(policy, StockPolicy):
        policy.observe(rows["obs"])
    n_epochs = int(given.get("train_epoch") or _EPOCHS)
    generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
    with ExitStack() as stack:
        writer = TensorboardWriter(output_folder(cfg.exp_name) / "log" / "serial")
        stack.callback(writer.close)
        common: dict[str, Any] = {"tb_logger": writer, "exp_name": cfg.exp_name}
        learner = stack.enter_context(
            create_learner(section_of(cfg, "learner"), policy=policy, **common)
        )
        evaluator = stack.enter_context(
            create_serial_evaluator(
                section_of(cfg, "evaluator"),
                env=make_envs(cfg.env, "evaluator"),
                policy=policy,
                **common,
            )
        )
        batch_size = int(spec_attribute(learner.policy.spec, "batch_size"))
        progress = Progress(show=show_progress)
        learner.call_hook("before_run")
        for batch in _batches(rows, batch_size, n_epochs, generator):
            if evaluator.should_eval(learner.train_iter):
                stop, _ = evaluator.eval(learner.save_checkpoint, learner.train_iter, 0)
                progress.evaluated(0, learner.train_iter, evaluator.last_eval)
                if stop:
                    break
            if learner.train_iter >= max_train_iter:
                break
            learner.train(batch)
            progress.at(0, learner.train_iter)
        progress.ended(0, learner.train_iter)
        learner.call_hook("after_run")
    return policy


def _without_data(main: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config without the keys that only this entry point reads, and their values."""
    found: dict[str, Any] = {}
    policy = main.get("policy") if isinstance(main, Mapping) else None
    if not isinstance(policy, Mapping):
        return dict(main), found  # compile_config refuses it
    sections = {}
    for name in _SECTIONS:
        section = policy.get(name)
        if isinstance(section, Mapping):
            found |= {key: section[key] for key in _KEYS if key in section}
            sections[name] = {key: one for key, one in section.items() if key not in _KEYS}
    return {**main, "policy": {**policy, **sections}}, found


def _batches(
    rows: Batch, batch_size: int, n_epochs: int, generator: torch.Generator
) -> Iterator[Batch]:
    (n_rows,) = lead_shape(rows)
    for _ in range(n_epochs):
        order = torch.randperm(n_rows, generator=generator)
        for start in range(0, n_rows, batch_size):
            yield index_rows(rows, order[start : start + batch_size])
