"""Rewards that are learned, or given in hindsight, for lists of transitions.

The networks and losses are those of :mod:`dmiddleware.reward`. Intrinsic rewards are scaled to
[0, 1] over a list, and weighted as the config says.
"""

from __future__ import annotations

import abc
import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np
import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.classic.pickled import load_pickle
from dmiddleware.data import save_checkpoint
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.model.layers import MLP
from dmiddleware.registry import Registry, import_modules
from dmiddleware.reward import GAIL, ICM, RND, Discriminator, RewardModel
from dmiddleware.tree import as_tree

__all__ = [
    "REWARD_MODEL_REGISTRY",
    "BaseRewardModel",
    "GailRewardModel",
    "HerRewardModel",
    "ICMRewardModel",
    "RndRewardModel",
    "create_reward_model",
    "get_reward_model_cls",
]

REWARD_MODEL_REGISTRY: Final = Registry[Any]("reward model")

Transition = dict[str, Any]


class BaseRewardModel(abc.ABC):
    """A reward that is learned from transitions."""

    config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return the defaults of the class."""
        return EasyDict({**copy.deepcopy(cls.config), "cfg_type": f"{cls.__name__}Dict"})

    @abc.abstractmethod
    def estimate(self, data: list[Transition]) -> Any:
        """Return the transitions with their rewards."""

    @abc.abstractmethod
    def train(self, data: Any = None) -> Any:
        """Learn from the collected transitions."""

    @abc.abstractmethod
    def collect_data(self, data: list[Transition]) -> None:
        """Collect transitions."""

    @abc.abstractmethod
    def clear_data(self) -> None:
        """Forget the collected transitions."""

    def load_expert_data(self, data: Any = None) -> None:  # noqa: B027 (not all have an expert)
        """Load the transitions of an expert."""

    def reward_deepcopy(self, train_data: list[Transition]) -> list[Transition]:
        """Return the transitions with copies of their rewards."""
        return [
            {**transition, "reward": copy.deepcopy(transition["reward"])}
            if "reward" in transition
            else dict(transition)
            for transition in train_data
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is saved."""
        return {}

    def load_state_dict(  # noqa: B027 (not all have a state)
        self, _state_dict: Mapping[str, Any]
    ) -> None:
        """Restore what :meth:`state_dict` returned."""

    def save(self, path: str | None = None, name: str = "best") -> None:
        """Save the state to ``<path>/reward_model/ckpt/ckpt_<name>.safetensors``."""
        folder = Path(getattr(self, "cfg").exp_name if path is None else path)  # noqa: B009
        file = folder / "reward_model" / "ckpt" / f"ckpt_{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(file, self.state_dict())


class _LearnedReward(BaseRewardModel):
    """A reward of :mod:`dmiddleware.reward` that learns from random collected transitions.

    Args:
        config: what differs from ``default_config()``.
        device: the device of the networks.
        tb_logger: a ``SummaryWriter`` for the losses; None writes none.
    """

    columns: ClassVar[tuple[str, ...]]

    def __init__(
        self, config: Mapping[str, Any], device: str = "cpu", tb_logger: Any = None
    ) -> None:
        self.cfg = EasyDict({**self.default_config(), **config})
        self.device = device
        self.tb_logger = tb_logger
        self.train_data: list[Transition] = []
        self.train_iter = 0
        self.reward_model = self._make(self.cfg)

    @abc.abstractmethod
    def _make(self, cfg: EasyDict) -> RewardModel:
        """Return what learns the reward."""

    def collect_data(self, data: list[Transition]) -> None:
        self.train_data.extend({key: row[key] for key in self.columns} for row in data)

    def clear_data(self) -> None:
        self.train_data.clear()

    def train(self, data: Any = None) -> None:
        """Make ``update_per_collect`` updates, each from ``batch_size`` collected transitions.

        While fewer were collected, an update takes all of them.

        Raises:
            NotEnoughData: if none was collected.
        """
        n_rows = min(self.cfg.batch_size, len(self.train_data))
        if not n_rows:
            raise NotEnoughData(
                f"{type(self).__name__} has no transitions to learn from; call collect_data before "
                "train"
            )
        for _ in range(self.cfg.update_per_collect):
            rows = self._rows(random.sample(self.train_data, n_rows))
            self._see(rows)
            done = torch.zeros(n_rows, dtype=torch.bool)
            for name, value in self.reward_model.update(as_tree({**rows, "done": done})).items():
                if self.tb_logger is not None:
                    kind = self.cfg.get("type", type(self).__name__)
                    self.tb_logger.add_scalar(f"{kind}_reward/{name}", value, self.train_iter)
            self.train_iter += 1

    def state_dict(self) -> dict[str, Any]:
        return self.reward_model.state_dict()

    def load_state_dict(self, _state_dict: Mapping[str, Any]) -> None:
        self.reward_model.load_state_dict(_state_dict)

    def _see(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Add a batch to the running statistics."""

    def _rewards(self, data: Sequence[Transition]) -> torch.Tensor:
        """Return the learned rewards ``[N]``, on the CPU."""
        with torch.no_grad():
            return self.reward_model.reward_of(as_tree(self._rows(data))).float().cpu()

    def _rows(self, data: Sequence[Transition]) -> dict[str, torch.Tensor]:
        """Return the columns that the reward reads, ``[N, …]``."""
        rows = {
            key: torch.stack([torch.as_tensor(row[key]) for row in data]) for key in self.columns
        }
        return {key: self._as_read(key, column).to(self.device) for key, column in rows.items()}

    def _as_read(self, key: str, column: torch.Tensor) -> torch.Tensor:
        """Return a column as the reward reads it."""
        return column.float() if "obs" in key else column.long().reshape(len(column))


class _IntrinsicReward(_LearnedReward):
    """A reward for what is new, scaled to [0, 1] over the transitions that are asked about."""

    def __init__(
        self, config: Mapping[str, Any], device: str = "cpu", tb_logger: Any = None
    ) -> None:
        super().__init__(config, device, tb_logger)
        self.intrinsic_reward_type: str = self.cfg.intrinsic_reward_type
        if self.intrinsic_reward_type not in ("add", "new", "assign"):
            raise ConfigError(
                "intrinsic_reward_type must be add, new or assign, got "
                f"{self.intrinsic_reward_type!r}"
            )
        if self.cfg.intrinsic_reward_weight is None:
            raise ConfigError(
                "intrinsic_reward_weight=None is not here; set the weight of the intrinsic reward, "
                "such as 0.01"
            )

    def estimate(self, data: list[Transition]) -> list[Transition]:
        """Return the transitions with the intrinsic reward: added, beside the other, or instead."""
        rewards = self._rewards(data)
        rewards = (rewards - rewards.min()) / (rewards.max() - rewards.min() + 1e-8)
        scale = self.cfg.extrinsic_reward_norm_max if self.cfg.extrinsic_reward_norm else 1
        changed = self.reward_deepcopy(data)
        for transition, reward in zip(changed, rewards, strict=True):
            if self.intrinsic_reward_type == "assign":
                transition["reward"] = reward
                continue
            transition["reward"] = transition["reward"] / scale
            if self.intrinsic_reward_type == "new":
                transition["intrinsic_reward"] = reward
            else:
                transition["reward"] = (
                    transition["reward"] + reward * self.cfg.intrinsic_reward_weight
                )
        return changed


_INTRINSIC: Final[dict[str, Any]] = {
    "intrinsic_reward_type": "add",
    "learning_rate": 1e-3,
    "batch_size": 64,
    "hidden_size_list": [64, 64, 128],
    "update_per_collect": 100,
    "extrinsic_reward_norm": True,
    "extrinsic_reward_norm_max": 1,
}
_UNBOUNDED: Final = 1e6


@REWARD_MODEL_REGISTRY.register("rnd")
class RndRewardModel(_IntrinsicReward):
    """Random network distillation; see :class:`dmiddleware.reward.RND`."""

    columns: ClassVar[tuple[str, ...]] = ("obs",)
    config: ClassVar[dict[str, Any]] = {
        "type": "rnd",
        **_INTRINSIC,
        "intrinsic_reward_weight": 0.01,
        "obs_norm": True,
        "obs_norm_clamp_min": -1,
        "obs_norm_clamp_max": 1,
    }

    def _make(self, cfg: EasyDict) -> RewardModel:
        if cfg.obs_norm and cfg.obs_norm_clamp_min != -cfg.obs_norm_clamp_max:
            raise ConfigError(
                "obs_norm_clamp_min must be -obs_norm_clamp_max, got "
                f"{cfg.obs_norm_clamp_min} and {cfg.obs_norm_clamp_max}"
            )
        return RND(
            cfg.obs_shape,
            hidden_sizes=cfg.hidden_size_list[:-1],
            embedding_size=cfg.hidden_size_list[-1],
            learning_rate=cfg.learning_rate,
            obs_clip=cfg.obs_norm_clamp_max if cfg.obs_norm else _UNBOUNDED,
            batch_size=cfg.batch_size,
            epochs=1,
            device=self.device,
            seed=torch.initial_seed(),
        )

    def _see(self, rows: Mapping[str, torch.Tensor]) -> None:
        if self.cfg.obs_norm:
            self.reward_model.components["obs_norm"].module.update(rows["next_obs"])

    def _rows(self, data: Sequence[Transition]) -> dict[str, torch.Tensor]:
        return {"next_obs": super()._rows(data)["obs"]}


@REWARD_MODEL_REGISTRY.register("icm")
class ICMRewardModel(_IntrinsicReward):
    """The intrinsic curiosity module; see :class:`dmiddleware.reward.ICM`."""

    columns: ClassVar[tuple[str, ...]] = ("obs", "action", "next_obs")
    config: ClassVar[dict[str, Any]] = {
        "type": "icm",
        **_INTRINSIC,
        "intrinsic_reward_weight": 0.003,
        "obs_shape": 6,
        "action_shape": 7,
        "reverse_scale": 1,
        "clear_buffer_per_iters": 100,
    }

    def _make(self, cfg: EasyDict) -> RewardModel:
        return ICM(
            cfg.obs_shape,
            gym.spaces.Discrete(cfg.action_shape),
            hidden_sizes=cfg.hidden_size_list,
            beta=1 / (1 + cfg.reverse_scale),
            learning_rate=cfg.learning_rate,
            obs_clip=_UNBOUNDED,
            batch_size=cfg.batch_size,
            epochs=1,
            device=self.device,
            seed=torch.initial_seed(),
        )


class _JoinedDiscriminator(nn.Module):
    """Tells vectors of observation and action, ``input_size`` numbers, from the expert's."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.joined = MLP(input_size, [hidden_size], out_features=1, activation="tanh")

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[N]``."""
        pair = torch.cat([obs.flatten(1), action.float().reshape(len(obs), -1)], -1)
        logit: torch.Tensor = self.joined(pair)
        return logit.squeeze(-1)


@REWARD_MODEL_REGISTRY.register("gail")
class GailRewardModel(_LearnedReward):
    """Generative adversarial imitation learning; see :class:`dmiddleware.reward.GAIL`.

    The expert's transitions are in ``<data_path>/expert_data.pkl``.
    """

    columns: ClassVar[tuple[str, ...]] = ("obs", "action")
    data_file: ClassVar[str] = "expert_data.pkl"
    config: ClassVar[dict[str, Any]] = {
        "type": "gail",
        "learning_rate": 1e-3,
        "update_per_collect": 100,
        "batch_size": 64,
        "input_size": 4,
        "target_new_data_count": 64,
        "hidden_size": 128,
        "collect_count": 100000,
        "clear_buffer_per_iters": 1,
    }

    def _make(self, cfg: EasyDict) -> RewardModel:
        size = cfg.input_size
        self._network: nn.Module = (
            _JoinedDiscriminator(int(np.prod(size)), cfg.hidden_size)
            if isinstance(size, int) or len(size) == 1
            else Discriminator(
                gym.spaces.Box(0, 1, tuple(size)),
                gym.spaces.Discrete(cfg.action_size),
                hidden_sizes=(cfg.hidden_size, cfg.hidden_size),
            )
        )
        self.load_expert_data()
        return self.reward_model

    def load_expert_data(self, data: Any = None) -> None:
        """Load the expert's transitions.

        Raises:
            OSError: if the file cannot be read.
            DataError: if it holds something else.
        """
        file = Path(self.cfg.data_path, self.data_file)
        self.expert_data: list[Transition] = load_pickle(file)
        self.reward_model = GAIL(
            self._network,
            as_tree(self._rows(self.expert_data)),
            batch_size=self.cfg.batch_size,
            epochs=1,
            learning_rate=self.cfg.learning_rate,
            device=self.device,
            seed=torch.initial_seed(),
        )

    def estimate(self, data: list[Transition]) -> list[Transition]:
        """Return the transitions with the reward ``-log D``, in place of theirs."""
        changed = self.reward_deepcopy(data)
        for transition, reward in zip(changed, self._rewards(data), strict=True):
            shape = np.shape(transition.get("reward", (0.0,)))
            transition["reward"] = reward.reshape(shape if np.prod(shape) == 1 else (1,))
        return changed

    def _as_read(self, key: str, column: torch.Tensor) -> torch.Tensor:
        is_vector = isinstance(self.cfg.input_size, int) or len(self.cfg.input_size) == 1
        return column.float() if is_vector else super()._as_read(key, column)


class HerRewardModel:
    """Hindsight experience replay: an episode with goals that it has reached.

    Source: Andrychowicz et al., "Hindsight Experience Replay", 2017.

    Args:
        cfg: ``her_strategy``, which step of the episode gives the goal: ``final``, ``future`` or
            ``episode``; ``her_replay_k``, how many new episodes to make of one (1);
            ``episode_size``, episodes to sample; and ``sample_per_episode``, transitions of each
            episode (all).
        cuda: whether rewards are on the GPU, if there is one.
    """

    def __init__(self, cfg: Mapping[str, Any], cuda: bool = False) -> None:
        self._device = "cuda" if cuda and torch.cuda.is_available() else "cpu"
        self._her_strategy = cfg["her_strategy"]
        if self._her_strategy not in ("final", "future", "episode"):
            raise ConfigError(
                f"her_strategy must be final, future or episode, got {self._her_strategy!r}"
            )
        self._her_replay_k: int = cfg.get("her_replay_k", 1)
        self._episode_size: int | None = cfg.get("episode_size")
        self._sample_per_episode: int | None = cfg.get("sample_per_episode")

    @property
    def episode_size(self) -> int | None:
        """How many episodes to sample."""
        return self._episode_size

    @property
    def sample_per_episode(self) -> int | None:
        """How many transitions of each episode to take."""
        return self._sample_per_episode

    def estimate(
        self,
        episode: list[Transition],
        merge_func: Callable[..., Any] | None = None,
        split_func: Callable[..., Any] | None = None,
        goal_reward_func: Callable[..., Any] | None = None,
    ) -> list[list[Transition]]:
        """Return new episodes.

        Args:
            episode: its transitions.
            merge_func: joins an observation and a goal; by default into one vector.
            split_func: returns observation, desired and achieved goal of what an env returns; by
                default both halves of a vector, the first of which is also achieved.
            goal_reward_func: returns the reward ``[1]`` of an achieved and a desired goal; by
                default 1 if they are equal, else 0.
        """
        merge = merge_func or (lambda obs, goal: torch.cat([obs, goal]))
        split = split_func or _halves
        reward = goal_reward_func or _is_reached
        n_steps, n_samples = len(episode), self._sample_per_episode
        steps = range(n_steps) if n_samples is None else np.random.randint(0, n_steps, n_samples)
        return [
            [self._in_hindsight(episode, step, merge, split, reward) for step in steps]
            for _ in range(self._her_replay_k)
        ]

    def _in_hindsight(
        self,
        episode: list[Transition],
        step: int,
        merge: Callable[..., Any],
        split: Callable[..., Any],
        reward: Callable[..., Any],
    ) -> Transition:
        first = {"final": len(episode) - 1, "future": step, "episode": 0}[self._her_strategy]
        _, _, goal = split(episode[np.random.randint(first, len(episode))]["next_obs"])
        transition = episode[step]
        next_obs, _, achieved = split(transition["next_obs"])
        return {
            **copy.deepcopy(
                {
                    key: value
                    for key, value in transition.items()
                    if key not in ("obs", "next_obs", "reward")
                }
            ),
            "obs": merge(split(transition["obs"])[0], goal),
            "next_obs": merge(next_obs, goal),
            "reward": reward(achieved, goal).to(self._device),
        }


def _halves(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    achieved, desired = torch.chunk(obs, 2)
    return achieved, desired, achieved


def _is_reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return torch.all(achieved == desired).float().reshape(1)


def create_reward_model(cfg: Mapping[str, Any], device: str, tb_logger: Any) -> Any:
    """Return the reward model that a config names, after importing ``cfg.import_names``.

    Args:
        cfg: the config of the reward model, or a whole config with ``reward_model``.
        device: the device of its networks.
        tb_logger: a ``SummaryWriter``.

    Raises:
        RegistryError: if no such reward model is registered.
    """
    whole = copy.deepcopy(EasyDict(cfg))
    section = whole.get("reward_model", whole)
    import_modules(whole.pop("import_names", ()))
    name = section.pop("type")
    return REWARD_MODEL_REGISTRY.get(name)(whole, device=device, tb_logger=tb_logger)


def get_reward_model_cls(cfg: Mapping[str, Any]) -> type:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``."""
    import_modules(cfg.get("import_names", ()))
    cls: type = REWARD_MODEL_REGISTRY.get(cfg["type"])
    return cls
