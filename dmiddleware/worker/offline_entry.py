"""The entry point of configs in the classic shape that learn from recorded data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dmiddleware.classic import Policy, StockPolicy, create_policy
from dmiddleware.classic.logs import output_folder
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.data import TensorBuffer, UniformSampler, load_rows
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DecisionTransformerPolicy
from dmiddleware.rl import with_returns_to_go
from dmiddleware.seeding import derive_seed, seed_libraries
from dmiddleware.tensorboard import TensorboardWriter
from dmiddleware.tree import Batch, as_tree, index_rows, items_of, lead_shape
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
_RETURNS_SPAN: Final = 1000.0
_REWARD_NORMS: Final = {
    "iql_antmaze": (-1.0, 1.0), "cql_antmaze": (-0.5, 4.0), "antmaze": (-0.25, 2.0),
}  # fmt: skip
"""The number that is added to a reward, and the factor of the sum."""


def names_data(main: Mapping[str, Any]) -> bool:
    """Return whether a main config names recorded data to learn from."""
    policy = main.get("policy")
    sections = [policy.get(name) for name in _SECTIONS] if isinstance(policy, Mapping) else []
    return "dataset" in main or any(
        "data_path" in section for section in sections if isinstance(section, Mapping)
    )


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
    rows = _with_scaled_rewards(load_rows(path), cfg.env.get("reward_norm"))
    seed_libraries(seed)
    policy = create_policy(cfg.policy, model=model)
    is_transformer = isinstance(policy, StockPolicy) and issubclass(
        policy.core, DecisionTransformerPolicy
    )
    if not is_transformer:
        check_learns_from_rows(policy)
        rows = _with_nstep_returns(rows, policy)
    n_epochs = int(given.get("train_epoch") or _EPOCHS)
    generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
    with ExitStack() as stack:
        writer = TensorboardWriter(output_folder(cfg.exp_name) / "log" / "serial")
        stack.callback(writer.close)
        common: dict[str, Any] = {"tb_logger": writer, "exp_name": cfg.exp_name}
        learner = stack.enter_context(
            create_learner(section_of(cfg, "learner"), policy=policy, **common)
        )
        envs = make_envs(cfg.env, "evaluator")
        evaluator = stack.enter_context(
            create_serial_evaluator(section_of(cfg, "evaluator"), env=envs, policy=policy, **common)
        )
        if isinstance(policy, StockPolicy):
            policy.check_spaces(envs.observation_space, envs.action_space)
            policy.observe(rows["obs"])
        batch_size = int(spec_attribute(learner.policy.spec, "batch_size"))
        progress = Progress(show=show_progress)
        learner.call_hook("before_run")
        length = policy.get_attribute("context_length") if is_transformer else 1
        batches = (
            _sequences(rows, length, batch_size, n_epochs, cfg.env.seed)
            if is_transformer
            else _batches(rows, batch_size, n_epochs, generator)
        )
        for batch in batches:
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


def _with_scaled_rewards(rows: Batch, kind: str | None) -> Batch:
    """Return rows with the rewards that ``env.reward_norm`` asks for, as D4RL's users scale them.

    Raises:
        ConfigError: for another kind.
    """
    reward = rows["reward"].float()
    if kind is None:
        return rows
    if kind == "normalize":
        reward = (reward - reward.mean()) / reward.std()
    elif kind == "iql_locomotion":
        reward = reward * (_RETURNS_SPAN / _span_of_returns(rows))
    elif kind in _REWARD_NORMS:
        shift, factor = _REWARD_NORMS[kind]
        reward = (reward + shift) * factor
    else:
        known = ", ".join(("normalize", "iql_locomotion", *_REWARD_NORMS))
        raise ConfigError(f"env.reward_norm must be one of {known}, got {kind!r}")
    return as_tree({**dict(items_of(rows)), "reward": reward})


def _span_of_returns(rows: Batch) -> float:
    """Return the difference of the largest and the smallest return of an episode."""
    episode = torch.zeros(len(rows["done"]), dtype=torch.int64)
    episode[1:] = rows["done"][:-1].cumsum(0)
    n_whole = int(rows["done"].sum())
    returns = torch.zeros(int(episode[-1]) + 1).index_add_(0, episode, rows["reward"].float())
    if n_whole < 2 or not (span := float(returns[:n_whole].amax() - returns[:n_whole].amin())):
        raise ConfigError(
            "env.reward_norm='iql_locomotion' divides by the span of the returns, but the data "
            "have no two episodes with different returns; leave it out"
        )
    return span


def _with_nstep_returns(rows: Batch, policy: Policy) -> Batch:
    """Return rows with the returns of n steps that a policy learns from; rows may have them."""
    spec = policy.learn_mode.spec
    if spec.n_step == 1 or spec.discount is None or "discount" in rows:
        return rows
    (n_rows,) = lead_shape(rows)
    sampler = UniformSampler(replace=False)
    buffer = TensorBuffer(n_rows, n_step=spec.n_step, discount=spec.discount, sampler=sampler)
    buffer.push(rows)
    return buffer.sample(n_rows)


def _sequences(
    rows: Batch, length: int, batch_size: int, n_epochs: int, seed: int
) -> Iterator[Batch]:
    """Draw as many batches of sequences as the rows fill, for each epoch."""
    (n_rows,) = lead_shape(rows)
    buffer = TensorBuffer(n_rows, unroll_len=length, seed=derive_seed(seed, "sequences"))
    buffer.push(with_returns_to_go(rows))
    for _ in range(n_epochs * math.ceil(n_rows / batch_size)):
        yield buffer.sample(batch_size)


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
    policy, dataset = {**policy, **sections}, main.get("dataset")
    if isinstance(dataset, Mapping):
        found = {"data_path": dataset.get("data_dir_prefix"), **found}
        if dataset.get("rtg_scale"):
            policy.setdefault("rtg_scale", dataset["rtg_scale"])
    return {**main, "policy": policy}, found


def _batches(
    rows: Batch, batch_size: int, n_epochs: int, generator: torch.Generator
) -> Iterator[Batch]:
    (n_rows,) = lead_shape(rows)
    for _ in range(n_epochs):
        order = torch.randperm(n_rows, generator=generator)
        for start in range(0, n_rows, batch_size):
            yield index_rows(rows, order[start : start + batch_size])
