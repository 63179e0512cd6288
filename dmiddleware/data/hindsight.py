"""Hindsight experience replay: sampled rows get goals that were reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Final, Literal, NoReturn, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.data.tensor_buffer import TensorBuffer
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.settings import Count, Settings, TakesSettings, takes_options
from dmiddleware.tree import Batch, leaves

__all__ = ["GoalFunction", "HindsightReplay", "HindsightReplaySettings"]

_ACHIEVED: Final = "next_obs.achieved_goal"
_DESIRED: Final = ("obs.desired_goal", "next_obs.desired_goal")


@runtime_checkable
class GoalFunction(Protocol):
    """A function of many goals at once, such as ``compute_reward`` of a goal-conditioned env."""

    def __call__(
        self, achieved_goal: npt.NDArray[Any], desired_goal: npt.NDArray[Any], info: Any, /
    ) -> npt.ArrayLike:
        """Return one number or flag for each pair of goals, ``[n]``.

        Args:
            achieved_goal: ``[n, …]``.
            desired_goal: ``[n, …]``.
            info: an empty dictionary, because buffers store no infos; looking up a key in it
                raises a :class:`~dmiddleware.errors.ConfigError`.
        """
        ...


def _goal_function(name: str, function: Any) -> Any:
    if not callable(function):
        raise ConfigError(
            f"{name} must be a function of achieved goals, desired goals and an info, such as "
            f"env.unwrapped.{name}, got {function!r:.100}"
        )
    return function


class HindsightReplaySettings(Settings):
    """The options of :class:`HindsightReplay`."""

    compute_terminated: GoalFunction | None = dataclasses.field(default=None, repr=False)
    """Whether reaching ``achieved_goal`` ends an episode with ``desired_goal``. None: the end of an
    episode does not depend on its goal, so ``terminated`` stays as it is."""
    strategy: Literal["future", "final"] = "future"
    """Where a row's new goal comes from: ``"future"`` takes what a random row from this one to the
    end of the episode achieved, ``"final"`` what the last one did (sections 3.3 and 4.5). The last
    row that is known counts while an episode has not ended."""
    n_goals: Count = 4
    """k, the ratio of new goals to the episodes' own."""


class HindsightReplay(TakesSettings[HindsightReplaySettings]):
    """Replaces the goals of sampled rows by goals that their episodes reached later.

    Hindsight experience replay (Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017,
    algorithm 1), for observations with the keys ``observation``, ``achieved_goal`` and
    ``desired_goal``, as those of Gymnasium-Robotics. Each sampled row gets another
    ``desired_goal``, in ``obs`` and ``next_obs``, with probability k / (k + 1), and the reward that
    belongs to it. The paper stores each row with its own goal and with k others instead, of which
    samples have the same mix. The policy must learn from single steps (``n_step=1``), because the
    rewards of later steps are not computed again.

    It transforms the samples of a buffer that follows episodes::

        hindsight = HindsightReplay(env.unwrapped.compute_reward)
        buffer = TensorBuffer(100_000, follow_episodes=True, transform=hindsight)

    Args:
        compute_reward: the reward of each pair of goals; the env's method, or a function.
        settings: the options, each by keyword; see :class:`HindsightReplaySettings`.

    Raises:
        ConfigError: if an option is not valid or a function is missing; from ``TensorBuffer``, if
            it computes n-step returns or sequences, or does not follow episodes; from
            ``buffer.sample``, if a function reads the info.
        StructureError: from ``buffer.sample``, if rows have no goals, or a function does not return
            one value for each.

    Example:
        >>> from dmiddleware.data import as_tree
        >>> def reward(achieved, desired, info):
        ...     return -np.any(achieved != desired, -1).astype(np.float32)
        >>> at = torch.arange(5.0)[:, None]
        >>> goal = torch.full((4, 1), 9.0)
        >>> hindsight = HindsightReplay(reward, strategy="final", n_goals=1000)
        >>> buffer = TensorBuffer(10, follow_episodes=True, transform=hindsight, seed=0)
        >>> _ = buffer.push(as_tree({
        ...     "obs": {"observation": at[:4], "achieved_goal": at[:4], "desired_goal": goal},
        ...     "next_obs": {"observation": at[1:], "achieved_goal": at[1:], "desired_goal": goal},
        ...     "reward": torch.full((4,), -1.0), "done": torch.tensor([False] * 3 + [True]),
        ...     "terminated": torch.zeros(4, dtype=torch.bool),
        ...     "truncated": torch.zeros(4, dtype=torch.bool),
        ...     "episode_id": torch.zeros(4, dtype=torch.int64),
        ... }))
        >>> sample = buffer.sample(4)
        >>> sample.obs.desired_goal.unique()
        tensor([4.])
        >>> torch.equal(sample.reward == 0.0, sample["index"] == 3)
        True
    """

    @takes_options(HindsightReplaySettings)
    def __init__(self, compute_reward: GoalFunction, settings: HindsightReplaySettings) -> None:
        self._compute_reward = _goal_function("compute_reward", compute_reward)
        self._compute_terminated = settings.compute_terminated
        self._strategy = settings.strategy
        self.settings = settings
        self._share = settings.n_goals / (settings.n_goals + 1)

    def attach(self, buffer: TensorBuffer) -> None:
        """Check that the buffer samples single steps, and follows episodes.

        Raises:
            ConfigError: if it does not.
        """
        settings = buffer.settings
        for name, needed in (("n_step", 1), ("unroll_len", None), ("follow_episodes", True)):
            if settings[name] != needed:
                raise ConfigError(
                    f"HindsightReplay needs a buffer with {name}={needed}, but this one has "
                    f"{name}={settings[name]}; it gives new goals to single steps, for a policy "
                    "with n_step=1, and takes them from later steps of the same episodes"
                )

    def __call__(self, batch: Batch, buffer: TensorBuffer) -> Batch:
        """Give new goals to some of the rows ``[n, …]``, in place."""
        columns = dict(leaves(batch))
        _check_columns(columns)
        chosen = np.flatnonzero(buffer.generator.random(len(columns["index"])) < self._share)
        if len(chosen):
            self._relabel(columns, torch.from_numpy(chosen), buffer)
        return batch

    def _relabel(
        self, columns: dict[str, torch.Tensor], chosen: torch.Tensor, buffer: TensorBuffer
    ) -> None:
        """Give new goals to the chosen rows ``[m]`` of a batch's leaves, in place."""
        index = columns["index"][chosen]
        if self._strategy == "future":
            later = buffer.sample_future(index)
        else:
            later = buffer.ahead(index, buffer.steps_left(index))
        ((_, desired),) = leaves(buffer.get(later, [_ACHIEVED]))
        for name in _DESIRED:
            columns[name][chosen] = desired.to(columns[name].dtype)
        goals = columns[_ACHIEVED][chosen].numpy(), desired.numpy()
        reward = _values(self._compute_reward, "compute_reward", *goals)
        columns["reward"][chosen] = reward.to(columns["reward"].dtype)
        if self._compute_terminated is not None:
            terminated = _values(self._compute_terminated, "compute_terminated", *goals).bool()
            columns["terminated"][chosen] = terminated
            columns["done"][chosen] = terminated | columns["truncated"][chosen]


def _check_columns(columns: Collection[str]) -> None:
    missing = [name for name in (_ACHIEVED, *_DESIRED) if name not in columns]
    if missing:
        raise StructureError(
            f"HindsightReplay needs observations with goals, but the rows have no "
            f"{' and no '.join(missing)}; collect from a goal-conditioned env, and do not flatten "
            "its observations; a policy with obs_groups must name goals in one of them"
        )
    if "discount" in columns:
        raise ConfigError(
            "HindsightReplay needs single steps, but the rows have n-step returns (the column "
            "discount); use a policy with n_step=1, without nstep_reward_enhancer"
        )


class _NoInfo(dict[Any, Any]):
    """The info of a relabeled row: looking up a key raises an error that says why there is none."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: object) -> NoReturn:
        raise ConfigError(
            f"{self._function} reads {key!r} from the info, but a buffer stores no infos, so "
            "HindsightReplay cannot pass them; compute the value from the two goals, or put what "
            "it depends on into achieved_goal and desired_goal"
        )

    def get(self, key: object, default: object = None) -> NoReturn:
        self.__missing__(key)

    def pop(self, key: object, *default: object) -> NoReturn:
        self.__missing__(key)

    def setdefault(self, key: object, default: object = None) -> NoReturn:
        self.__missing__(key)

    def __contains__(self, key: object) -> NoReturn:
        self.__missing__(key)


def _values(
    function: GoalFunction, name: str, achieved: npt.NDArray[Any], desired: npt.NDArray[Any]
) -> torch.Tensor:
    values = torch.as_tensor(np.asarray(function(achieved, desired, _NoInfo(name))))
    if values.shape != (len(achieved),):
        raise StructureError(
            f"{name} must return one value for each of {len(achieved)} goals, but returned the "
            f"shape {tuple(values.shape)}; pass a function of many goals at once"
        )
    return values
