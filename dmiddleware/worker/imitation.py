"""Entry points of configs in the classic shape that learn from an expert: SQIL, DQfD, GAIL."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.classic import Policy, create_buffer, create_policy
from dmiddleware.classic.reward_models import GailRewardModel
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.files.checkpoint import load_any_checkpoint
from dmiddleware.process.closing import Closing
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, Fraction, Whole, checked
from dmiddleware.worker.collector import ISerialCollector, create_serial_collector
from dmiddleware.worker.entry import NO_LIMIT, compile_config, section_of, serial_run
from dmiddleware.worker.env_config import make_envs
from dmiddleware.worker.learned_rewards import EnvRewards
from dmiddleware.worker.learner import BaseLearner
from dmiddleware.worker.row_learning import RowReplay

__all__ = ["DqfdReplay", "Expert", "ShownReplay", "SqilReplay", "dqfd_run", "gail_run", "sqil_run"]

Config = Mapping[str, Any]
Configs = tuple[Config, Config | None]
Transition = dict[str, Any]


class Expert(Closing):
    """A trained policy that shows how it acts, in the envs of its own config.

    It acts greedily where its algorithm has an ε, and in a random way where its algorithm draws
    actions, as SAC does.

    Args:
        configs: the main config and the create config that it was trained with.
        path: its checkpoint, of this project or of ``torch.save``.
        seed: of the envs and of the policy.
        exp_name: folder for the log of what it collects.
        model: a module for the policy; None builds the one that its config describes.
        envs: makes the envs; see :func:`serial_run`.

    Attributes:
        samples_of: makes samples of the transitions of a trajectory; by default as its algorithm
            does.

    Raises:
        ConfigError: for an unusable config, or without a checkpoint.
        CheckpointDamaged: if it cannot be read.
        CheckpointMismatch: if it belongs to another model.
    """

    def __init__(
        self,
        configs: Configs,
        path: str | Path | None,
        *,
        seed: int,
        exp_name: str,
        model: nn.Module | None = None,
        envs: Callable[[EasyDict, str], BaseEnvManager] = make_envs,
    ) -> None:
        if not path or not Path(path).is_file():
            raise ConfigError(
                f"the expert needs the checkpoint of a trained policy, got {path!r}; it is "
                "policy.collect.model_path for SQIL, and for GAIL policy.load_path of the "
                "expert's config, or reward_model.expert_model_path without one"
            )
        main, create = (
            {name: section for name, section in (cfg or {}).items() if name != "reward_model"}
            for cfg in configs
        )
        cfg = compile_config(main, create, seed=derive_seed(seed, "expert"), save=False)
        policy = create_policy(cfg.policy, model=model)
        mode = policy.collect_mode
        mode.load_state_dict(load_any_checkpoint(path))
        self.samples_of: Callable[[list[Transition]], list[Transition]] = mode.get_train_sample
        self._settings: dict[str, Any] = {}
        if hasattr(policy, "command_mode"):
            settings = policy.command_mode.get_setting_collect({"envstep": 0, "train_iter": 0})
            self._settings = {**settings, "eps": 0.0} if "eps" in settings else settings
        self._collector = create_serial_collector(
            {"type": "sample"},
            env=envs(cfg.env, "collector"),
            policy=mode._replace(get_train_sample=lambda rows: self.samples_of(rows)),
            exp_name=exp_name,
            instance_name="expert_collector",
        )

    def collect(self, n_sample: int) -> list[Transition]:
        """Return samples of its play."""
        samples: list[Transition] = self._collector.collect(n_sample, policy_kwargs=self._settings)
        return samples

    def close(self) -> None:
        """Close the envs; may be called twice."""
        self._collector.close()


class ShownReplay(RowReplay):
    """Learns from samples in which a share of the rows are an expert's.

    These are in a buffer of their own, of the kind of the other one, with priorities of their own.
    A subclass says what the expert shows.

    Args:
        cfg: the whole config.
        learner: trains the policy.
        buffer: a replay buffer for what the policy collects.
        rewards: the rewards that the policy learns from.
        expert: shows how it acts.
        share: which share of a sample's rows are the expert's.
        **options: options of the buffer for the expert's rows that differ.
    """

    def __init__(
        self,
        cfg: EasyDict,
        learner: BaseLearner,
        buffer: Any,
        rewards: EnvRewards,
        *,
        expert: Expert,
        share: float,
        **options: Any,
    ) -> None:
        super().__init__(cfg, learner, buffer, rewards)
        self._expert = expert
        options = {**options, "seed": derive_seed(cfg.env.seed, "shown")}
        section = {**section_of(cfg, "replay_buffer"), **options}
        self._shown = create_buffer(section, exp_name=cfg.exp_name, instance_name="expert_buffer")
        self._n_shown = round(self._batch_size * share)
        self._n_own = self._batch_size - self._n_shown

    def draw(self) -> list[Transition] | None:
        """Return what an update learns from, with the columns that both kinds of rows have."""
        at = self._learner.train_iter
        own, shown = self._buffer.sample(self._n_own, at), self._shown.sample(self._n_shown, at)
        if own is None or shown is None:
            return None
        rows = [*own, *shown]
        return [{key: row[key] for key in rows[0] if key in rows[-1]} for row in rows]

    def prioritize(self, info: Mapping[str, Any]) -> None:
        """Set the priorities of what the last update has learned from."""
        self._buffer.update({name: values[: self._n_own] for name, values in info.items()})
        self._shown.update({name: values[self._n_own :] for name, values in info.items()})


class SqilReplay(ShownReplay):
    """Learns from an expert's transitions, with the reward 1, and as many of its own, with 0.

    Whenever the policy collects, the expert shows as many transitions.

    Args:
        cfg: see :class:`ShownReplay`, and also the following ones.
        learner: trains the policy.
        buffer: a replay buffer for what the policy collects.
        rewards: of no effect: those of SQIL replace them.
        expert: shows how it acts.
    """

    def __init__(
        self, cfg: EasyDict, learner: BaseLearner, buffer: Any, rewards: EnvRewards, expert: Expert
    ) -> None:
        super().__init__(cfg, learner, buffer, rewards, expert=expert, share=0.5)

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Fill both buffers, with what random actions collect and with what the expert shows."""
        sampled = collector.policy.get_train_sample
        self._expert.samples_of = lambda rows: sampled(_with_reward(rows, torch.ones_like))
        super().begin(collector)

    def push(self, data: list[Any], envstep: int) -> None:
        """Store what was collected, and let the expert show as much."""
        super().push(_with_reward(data, torch.zeros_like), envstep)
        self._shown.push(self._expert.collect(len(data)), cur_collector_envstep=envstep)


class DqfdReplay(ShownReplay):
    """Learns from what an expert has shown at the beginning, and from its own steps.

    The expert shows ``learn.expert_replay_buffer_size`` rows, from which alone the policy makes
    ``learn.per_train_iter_k`` updates. From then on, they are the share ``collect.pho`` of each
    sample. The column ``is_expert`` says which rows are whose.

    Args:
        cfg: see :class:`ShownReplay`, and also the following ones.
        learner: trains the policy.
        buffer: a replay buffer for what the policy collects.
        rewards: the rewards that the policy learns from.
        expert: shows how it acts.

    Raises:
        ConfigError: if one of the three settings is out of its range.
    """

    def __init__(
        self, cfg: EasyDict, learner: BaseLearner, buffer: Any, rewards: EnvRewards, expert: Expert
    ) -> None:
        learn, collect = cfg.policy.learn, cfg.policy.collect
        self._n_updates_before = checked(
            "per_train_iter_k", learn.get("per_train_iter_k", 10), Whole
        )
        self._n_demonstrations = checked(
            "expert_replay_buffer_size", learn.get("expert_replay_buffer_size", 10_000), Count
        )
        share = checked("pho", collect.get("pho", 0.5), Fraction)
        super().__init__(
            cfg, learner, buffer, rewards, expert=expert, share=share,
            replay_buffer_size=self._n_demonstrations,
        )  # fmt: skip

    def begin(self, collector: ISerialCollector[Any, Any]) -> None:
        """Learn from what the expert shows, then fill the buffer by random actions."""
        self._expert.samples_of = collector.policy.get_train_sample
        demonstrations = self._expert.collect(self._n_demonstrations)
        self._shown.push(_marked(demonstrations, is_expert=True), cur_collector_envstep=0)
        for _ in range(self._n_updates_before):
            samples = self._shown.sample(self._batch_size, self._learner.train_iter)
            if samples is None:
                break
            self._learner.train(self._rewards.of(samples), 0)
            if self._is_prioritized:
                self._shown.update(self._learner.priority_info)
        super().begin(collector)

    def push(self, data: list[Any], envstep: int) -> None:
        """Store what was collected."""
        super().push(_marked(data, is_expert=False), envstep)


def sqil_run(
    main: Config,
    create: Config | None,
    expert: Configs,
    seed: int = 0,
    max_train_iter: int = NO_LIMIT,
    max_env_step: int = NO_LIMIT,
    *,
    model: nn.Module | None = None,
    expert_model: nn.Module | None = None,
    envs: Callable[[EasyDict, str], BaseEnvManager] = make_envs,
    show_progress: bool = True,
) -> Policy:
    """Imitate an expert by SQIL, as a config in the classic shape describes.

    An update learns from as many transitions of the expert, with the reward 1, as of the policy,
    with the reward 0 (Reddy et al., "SQIL: Imitation Learning via Reinforcement Learning with
    Sparse Rewards", 2020, algorithm 1). The expert shows as many as the policy collects.

    Args:
        main: see :func:`compile_config`; ``policy.collect.model_path`` is the expert's checkpoint.
        create: see :func:`compile_config`.
        expert: the main config and the create config that the expert was trained with.
        seed: see :func:`serial_run`, and also the following ones.
        max_train_iter: most training iterations.
        max_env_step: most env steps.
        model: a module for the policy.
        expert_model: a module for the expert; None builds the one that its config describes.
        envs: makes the envs of the policy and of the expert.
        show_progress: whether to show steps, updates and returns.

    Raises:
        ConfigError: as of :func:`serial_run`, and without a checkpoint of the expert.
        CheckpointDamaged: if it cannot be read.
        CheckpointMismatch: if it belongs to another model.
    """
    return _shown_run(
        SqilReplay, main, create, expert, seed, max_train_iter, max_env_step, model=model,
        expert_model=expert_model, envs=envs, show_progress=show_progress,
    )  # fmt: skip


def dqfd_run(
    main: Config,
    create: Config | None,
    expert: Configs,
    seed: int = 0,
    max_train_iter: int = NO_LIMIT,
    max_env_step: int = NO_LIMIT,
    *,
    model: nn.Module | None = None,
    expert_model: nn.Module | None = None,
    envs: Callable[[EasyDict, str], BaseEnvManager] = make_envs,
    show_progress: bool = True,
) -> Policy:
    """Learn from an expert's demonstrations and by play, as a config in the classic shape says.

    The algorithm is that of the config, usually ``dqfd``
    (:class:`~dmiddleware.policy.DQfDPolicy`). The expert first shows
    ``policy.learn.expert_replay_buffer_size`` rows, and the policy makes
    ``policy.learn.per_train_iter_k`` updates from these alone. From then on they are the share
    ``policy.collect.pho`` of each sample.

    Args:
        main: see :func:`compile_config`; ``policy.collect.model_path`` is the expert's checkpoint.
        create: see :func:`compile_config`.
        expert: the main config and the create config that the expert was trained with.
        seed: see :func:`serial_run`, and also the following ones.
        max_train_iter: most training iterations.
        max_env_step: most env steps.
        model: a module for the policy.
        expert_model: a module for the expert; None builds the one that its config describes.
        envs: makes the envs of the policy and of the expert.
        show_progress: whether to show steps, updates and returns.

    Raises:
        ConfigError: as of :func:`serial_run`, and without a checkpoint of the expert.
        CheckpointDamaged: if it cannot be read.
        CheckpointMismatch: if it belongs to another model.
    """
    return _shown_run(
        DqfdReplay, main, create, expert, seed, max_train_iter, max_env_step, model=model,
        expert_model=expert_model, envs=envs, show_progress=show_progress,
    )  # fmt: skip


def _shown_run(
    replay: Callable[..., ShownReplay],
    main: Config,
    create: Config | None,
    expert: Configs,
    seed: int,
    *limits: int,
    expert_model: nn.Module | None,
    envs: Callable[[EasyDict, str], BaseEnvManager],
    **options: Any,
) -> Policy:
    """Train with an expert, whose checkpoint ``policy.collect.model_path`` names."""
    path, exp_name = _at(main, "policy", "collect", "model_path"), _exp_name(main)
    with Expert(expert, path, seed=seed, exp_name=exp_name, model=expert_model, envs=envs) as shown:
        learning = partial(replay, expert=shown)
        return serial_run(main, create, seed, *limits, envs=envs, learning=learning, **options)


def gail_run(
    main: Config,
    create: Config | None,
    expert: Configs | None,
    seed: int = 0,
    max_train_iter: int = NO_LIMIT,
    max_env_step: int = NO_LIMIT,
    *,
    model: nn.Module | None = None,
    envs: Callable[[EasyDict, str], BaseEnvManager] = make_envs,
    show_progress: bool = True,
) -> Policy:
    """Imitate an expert by GAIL, as a config in the classic shape describes.

    First the expert plays ``reward_model.collect_count`` transitions, which are saved to
    ``<reward_model.data_path>/expert_data.pkl``. Then a discriminator learns to distinguish them
    from those of the policy, which learns from its rewards (Ho and Ermon, 2016).

    Args:
        main: see :func:`compile_config`; and ``reward_model``, of the type ``gail`` unless it says
            otherwise. ``expert_model_path`` is the expert's checkpoint, and ``data_path`` the
            folder of its transitions; by default that of the run. ``policy.load_path`` in the
            expert's config, if there is one, is in place of ``expert_model_path``.
        create: see :func:`compile_config`.
        expert: the main config and the create config that the expert was trained with; None: its
            transitions are in the file already.
        seed: see :func:`serial_run`, and also the following ones.
        max_train_iter: most training iterations.
        max_env_step: most env steps.
        model: a module for the policy.
        envs: makes the envs of the policy and of the expert.
        show_progress: whether to show steps, updates and returns.

    Raises:
        ConfigError: as of :func:`serial_run`, and without a checkpoint of the expert.
        FileNotFoundError: if there is no such file of transitions.
        CheckpointDamaged: if the checkpoint cannot be read.
        CheckpointMismatch: if it belongs to another model.
    """
    exp_name = _exp_name(main)
    section = {"type": "gail", "data_path": exp_name, **(main.get("reward_model") or {})}
    if expert is not None:
        path = _at(expert[0], "policy", "load_path") or section.get("expert_model_path")
        n_sample = checked("reward_model.collect_count", section.get("collect_count"), Count)
        with Expert(expert, path, seed=seed, exp_name=exp_name, envs=envs) as shown:
            samples = [dict(sample) for sample in shown.collect(n_sample)]
        file = Path(section["data_path"], GailRewardModel.data_file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(samples))
    return serial_run(
        {**main, "reward_model": section}, create, seed, max_train_iter, max_env_step, model=model,
        envs=envs, show_progress=show_progress,
    )  # fmt: skip


def _exp_name(main: Config) -> str:
    return str(main.get("exp_name", "default_experiment"))


def _with_reward(
    rows: list[Transition], reward_of: Callable[[torch.Tensor], torch.Tensor]
) -> list[Transition]:
    """Return copies of rows with the reward that a function makes of theirs."""
    return [{**row, "reward": reward_of(torch.as_tensor(row["reward"]))} for row in rows]


def _marked(rows: list[Transition], *, is_expert: bool) -> list[Transition]:
    return [{**row, "is_expert": torch.tensor(is_expert)} for row in rows]


def _at(section: Any, *keys: str) -> Any:
    """Return what a config has at a path; None: nothing."""
    for key in keys:
        section = section.get(key) if isinstance(section, Mapping) else None
    return section
