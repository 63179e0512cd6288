"""Buffers, estimators and learners with DI-engine's arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from easydict import EasyDict

from dmiddleware.classic import DequeBuffer, DequeReplay
from dmiddleware.classic.reward_models import BaseRewardModel
from dmiddleware.ding.framework.middleware.transitions import (
    advantages_of,
    is_of_program,
    learn_samples,
    sampler,
    train_samples,
)
from dmiddleware.ding.utils.data import offline_data_save_type
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Middleware
from dmiddleware.pipeline import middleware as declared
from dmiddleware.settings import Count, Fraction, checked
from dmiddleware.tree import (
    Batch,
    cat,
    flatten_lead,
    index_rows,
    map_leaves,
    to_dict,
    with_columns,
)
from dmiddleware.worker.sequence_learning import sequence_length
from middleware import (
    DataPusher,
    GAEEstimator,
    MonteCarloReturnEstimator,
    NStepRewardEnhancer,
    OfflineDataSaver,
    OfflineRLContext,
    OnlineRLContext,
    OnPolicyLearner,
    PriorityCalculator,
    Role,
)
from middleware import OffPolicyLearner as CoreOffPolicyLearner
from middleware.base import BaseMiddleware
from middleware.classic import offpolicy_data_fetcher as core_offpolicy_data_fetcher
from middleware.classic import trainer as core_trainer
from middleware.support.rows import rows_of

__all__ = [
    "HERLearner",
    "OffPolicyLearner",
    "buffer_saver",
    "data_pusher",
    "gae_estimator",
    "her_data_enhancer",
    "montecarlo_return_estimator",
    "multistep_trainer",
    "nstep_reward_enhancer",
    "offline_data_fetcher",
    "offline_data_saver",
    "offpolicy_data_fetcher",
    "priority_calculator",
    "reward_estimator",
    "sqil_data_pusher",
    "trainer",
]

_REPLAYS: Final[weakref.WeakKeyDictionary[DequeBuffer, DequeReplay]] = weakref.WeakKeyDictionary()


def _replay(buffer: Any, cfg: EasyDict | None = None) -> Any:
    """Return a deque buffer as the replay buffer of a chain, the same one for each middleware.

    Args:
        buffer: the deque buffer; a list of buffers, each with its share of a batch; or PPG's two,
            by the names ``policy`` and ``value``.
        cfg: the config, which says whether the policy learns from sequences.
    """
    if isinstance(buffer, Mapping):
        return PolicyAndValueReplay([(_replay(buffer[name]), 1.0) for name in ("policy", "value")])
    if isinstance(buffer, list | tuple):
        return MixedReplay([(_replay(part), share) for part, share in buffer])
    if not isinstance(buffer, DequeBuffer):
        return buffer
    if buffer not in _REPLAYS:
        _REPLAYS[buffer] = _new_replay(buffer, {} if cfg is None else cfg.get("policy", {}))
    return _REPLAYS[buffer]


def _new_replay(buffer: DequeBuffer, policy: Mapping[str, Any]) -> DequeReplay:
    length = sequence_length(policy)
    if _has_burn_in(policy):
        return DequeReplay(buffer, unroll_len=length)
    return DequeReplay(buffer) if length == 1 else LaneReplay(buffer, length)


def _has_burn_in(policy: Mapping[str, Any]) -> bool:
    return "burnin_step" in policy or "burn_in" in policy


class LaneReplay(DequeReplay):
    """Holds lanes, sequences that may span several episodes, as IMPALA learns them."""

    def __init__(self, buffer: DequeBuffer, length: int) -> None:
        super().__init__(buffer, whole_episodes=True)
        self._length = length

    def push(self, batch: Batch) -> list[int]:
        """Store the rows ``[T, E, …]`` of each env, ``length`` to an item; the rest is left out."""
        n_steps, n_envs = batch["done"].shape
        starts = range(0, n_steps - self._length + 1, self._length)
        return [
            index
            for start in starts
            for env in range(n_envs)
            for index in super(LaneReplay, self).push(
                index_rows(batch, (slice(start, start + self._length), env))
            )
        ]

    def sample_ahead(self, n: int, *, at_most: int, counters: Any = None) -> list[Batch]:
        """Draw lanes ``[length, n, …]``."""
        lanes = super().sample_ahead(n, at_most=at_most, counters=counters)
        return [
            map_leaves(lambda leaf: leaf.transpose(0, 1) if leaf.dim() > 1 else leaf, batch)
            for batch in lanes
        ]


class MixedReplay:
    """Draws each batch from several buffers, a fixed share from each."""

    n_step = None
    unroll_len = None
    reads_counters = False

    def __init__(self, parts: Sequence[tuple[DequeReplay, float]]) -> None:
        self.parts = list(parts)
        self.inside = tuple(replay for replay, _ in parts)

    @property
    def size(self) -> int:
        return sum(replay.size for replay, _ in self.parts)

    @property
    def settings(self) -> dict[str, Any]:
        return {"shares": [share for _, share in self.parts]}

    @property
    def schedules(self) -> dict[str, Any]:
        return {}

    @property
    def lacks_priorities(self) -> bool:
        return any(replay.lacks_priorities for replay, _ in self.parts)

    def bind(self, **settings: Any) -> None:
        for replay, _ in self.parts:
            replay.bind(**settings)

    def __len__(self) -> int:
        return min(int(len(replay) / share) for replay, share in self.parts)

    def push(self, batch: Batch) -> Any:
        raise ConfigError("push into the buffers themselves, not into their mixture")

    def sample_ahead(self, n: int, *, at_most: int, counters: Any = None) -> list[Batch]:
        drawn = [
            replay.sample_ahead(int(n * share), at_most=1, counters=counters)[0]
            for replay, share in self.parts
        ]
        return [cat(drawn)]

    def update_priority(self, index: Any, priority: Any) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [replay.state_dict() for replay, _ in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for (replay, _), part in zip(self.parts, state["parts"], strict=True):
            replay.load_state_dict(part)


class PolicyAndValueReplay(MixedReplay):
    """Draws rows for the policy from one buffer, and rows for values from another, as PPG does."""

    def sample_ahead(self, n: int, *, at_most: int, counters: Any = None) -> list[Batch]:
        rows, valued = (
            replay.sample_ahead(n, at_most=1, counters=counters)[0] for replay, _ in self.parts
        )
        return [with_columns(rows, valued_rows={name: valued[name] for name in ("obs", "ret")})]


class _Pusher(DataPusher):
    """Pushes each whole episode as one item if the collector collects episodes, else rows."""

    def __init__(self, replay: Any, group_by_env: bool) -> None:
        super().__init__(replay)
        self._group_by_env = group_by_env

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Push."""
        collected: Any = ctx.trajectories
        if isinstance(collected, list):
            self._push_list(collected)
            ctx.trajectories = None
            return
        if not ctx.episodes:
            super().__call__(ctx)
            return
        for episode in ctx.episodes:
            self._buffer.buffer.push(episode)  # type: ignore[attr-defined]

    def _push_list(self, transitions: list[Any]) -> None:
        """Push what a middleware of the program has collected."""
        for row in transitions:
            meta = {"env": row.env_data_id.item()} if self._group_by_env else None
            self._buffer.buffer.push(row, meta=meta)  # type: ignore[attr-defined]


def data_pusher(cfg: EasyDict, buffer_: Any, group_by_env: bool | None = None) -> DataPusher:
    """Push what was collected: whole episodes if the collector collects episodes, else rows.

    Args:
        cfg: the compiled config.
        buffer_: the buffer.
        group_by_env: whether the items of a list of transitions get the env of each as metadata.
    """
    return _Pusher(_replay(buffer_, cfg), bool(group_by_env))


def sqil_data_pusher(cfg: EasyDict, buffer_: Any, expert: bool) -> Any:
    """Push rows with a reward of 1 if they are an expert's, else of 0 (Reddy et al., 2019)."""
    replay = _replay(buffer_)

    @declared(roles=(Role.LEARNER,), reads=("trajectories",), fills=(replay,))
    def push(ctx: Any) -> None:
        collected = ctx.trajectories
        is_list = isinstance(collected, list)
        for rows in collected if is_list else [collected]:
            rows["reward"] = rows["reward"] * 0 + int(expert)
            (buffer_ if is_list else replay).push(rows)
        ctx.trajectories = None

    return push


def buffer_saver(
    cfg: EasyDict, buffer_: DequeBuffer, every_envstep: int = 1000, replace: bool = False
) -> Any:
    """Save the buffer to ``<exp_name>/replaybuffer``, at first and every ``every_envstep``."""
    next_at = 0

    @declared(roles=(Role.LEARNER,))
    def save(ctx: Any) -> None:
        nonlocal next_at
        if ctx.env_step >= next_at:
            next_at = ctx.env_step + every_envstep
            name = "data_latest" if replace else f"data_envstep_{ctx.env_step}"
            buffer_.save_data(f"{cfg.exp_name}/replaybuffer/{name}.hkl")

    return save


def OffPolicyLearner(  # noqa: N802 (DI-engine's name)
    cfg: EasyDict, policy: Any, buffer_: Any, reward_model: Any = None, log_freq: int = 100
) -> Middleware[Any]:
    """Make ``cfg.policy.learn.update_per_collect`` updates in each step.

    Args:
        cfg: the compiled config.
        policy: the policy or its learn mode; one of the program's own gets lists of samples.
        buffer_: a DequeBuffer; a list of buffers, each with its share of a batch; or PPG's two, by
            the names ``policy`` and ``value``.
        reward_model: changes the rewards of each batch by its ``estimate``.
        log_freq: no effect: the logger has the interval.
    """
    if is_of_program(policy):
        learn = cfg.policy.learn
        reward = [] if reward_model is None else [reward_estimator(cfg, reward_model)]
        draw, train = sampler(buffer_, learn.batch_size), train_samples(policy)
        return learn_samples(learn.update_per_collect, draw, *reward, train)
    replay = _replay(buffer_, cfg)
    if reward_model is not None:
        replay = _Rewarded(replay, reward_model)
    return _learner(cfg, policy, replay)


def _learner(cfg: EasyDict, policy: Any, replay: Any) -> CoreOffPolicyLearner:
    n_updates = cfg.policy.learn.update_per_collect
    learner = CoreOffPolicyLearner(policy, replay, update_per_collect=n_updates)
    # What others fill are the buffers inside.
    learner.draws_from = tuple(map(_filled, getattr(replay, "inside", (replay,))))
    return learner


def _filled(replay: Any) -> Any:
    """Return the first replay buffer with the items of this one, which may be a view of it."""
    if not isinstance(replay, DequeReplay):
        return replay
    views = (_REPLAYS[buffer] for buffer in _REPLAYS if buffer.shares_items(replay.buffer))
    return next(views, replay)


class _Rewarded:
    """A replay buffer whose batches have the rewards of a reward model."""

    def __init__(self, replay: Any, reward_model: Any) -> None:
        self._replay, self._reward_model = replay, reward_model
        self.inside = (replay,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_replay"], name)

    def __len__(self) -> int:
        return len(self._replay)

    def sample_ahead(self, n: int, *, at_most: int, counters: Any = None) -> list[Batch]:
        drawn = self._replay.sample_ahead(n, at_most=at_most, counters=counters)
        return [rows_of(self._reward_model.estimate(_transitions(batch))) for batch in drawn]


def _transitions(batch: Batch) -> list[dict[str, Any]]:
    """Return the rows ``[N, …]`` or ``[T, E, …]`` of a batch, each a dictionary."""
    rows = flatten_lead(batch, 2) if batch["done"].dim() > 1 else batch
    return [to_dict(index_rows(rows, number)) for number in range(len(rows["done"]))]


def HERLearner(  # noqa: N802 (DI-engine's name)
    cfg: EasyDict, policy: Any, buffer_: Any, her_reward_model: Any
) -> Middleware[Any]:
    """Learn from rows whose goals were replaced by ones that their episodes reached."""
    if is_of_program(policy):
        draw, train = her_data_enhancer(cfg, buffer_, her_reward_model), train_samples(policy)
        return learn_samples(cfg.policy.learn.update_per_collect, draw, train)
    return _learner(cfg, policy, _Relabeled(_replay(buffer_), her_reward_model))


def her_data_enhancer(cfg: EasyDict, buffer_: DequeBuffer, her_reward_model: Any) -> Any:
    """Draw episodes, lists of transitions, and put those with other goals into ``ctx.train_data``.

    Args:
        cfg: the compiled config.
        buffer_: holds the episodes.
        her_reward_model: has ``episode_size``, the number of episodes to draw (None: the config's
            ``batch_size``), and ``estimate``, which returns several episodes for each.
    """
    size = her_reward_model.episode_size
    draw = sampler(buffer_, cfg.policy.learn.batch_size if size is None else size)

    @declared(roles=(Role.LEARNER,), writes=("train_data",))
    def enhance(ctx: Any) -> None:
        draw(ctx)
        if ctx.train_data is not None:
            episodes = chain.from_iterable(map(her_reward_model.estimate, ctx.train_data))
            ctx.train_data = list(chain.from_iterable(episodes))

    return enhance


class _Relabeled(_Rewarded):
    """A buffer of whole episodes, whose batches are rows with other goals."""

    def __len__(self) -> int:
        return sum(len(item.data["done"]) for item in self._replay.buffer.storage)

    def sample_ahead(self, n: int, *, at_most: int, counters: Any = None) -> list[Batch]:
        model = self._reward_model
        items = self._replay.buffer.sample(n if model.episode_size is None else model.episode_size)
        episodes = [part for item in items for part in model.estimate(_transitions(item.data))]
        return [rows_of([_plain(row) for episode in episodes for row in episode])]


def _plain(transition: dict[str, Any]) -> dict[str, Any]:
    return {**transition, "reward": transition["reward"].reshape(()), "index": torch.tensor(0)}


def offpolicy_data_fetcher(cfg: EasyDict, buffer_: Any, data_shortage_warning: bool = False) -> Any:
    """Draw a batch of ``cfg.policy.learn.batch_size`` rows into ``ctx.train_data``."""
    return core_offpolicy_data_fetcher(
        _replay(buffer_, cfg), batch_size=cfg.policy.learn.batch_size
    )


class _RowsFetcher(BaseMiddleware[OfflineRLContext]):
    """Puts batches of rows in memory into ``ctx.train_data``, each epoch in another order."""

    default_context = OfflineRLContext
    roles = (Role.LEARNER,)
    reads = ("train_epoch",)
    writes = ("train_data", "train_epoch")

    def __init__(self, rows: Any, n_rows: int, batch_size: int) -> None:
        self._rows, self._is_list = rows, isinstance(rows, list)
        self._n_rows, self._batch_size = n_rows, batch_size
        self._order = torch.empty(0, dtype=torch.int64)

    def __call__(self, ctx: OfflineRLContext) -> None:
        """Fetch a batch; what is left of an epoch and fills no batch is not learned from."""
        if len(self._order) < self._batch_size:
            ctx.train_epoch += int(ctx.train_iter > 0)
            self._order = torch.randperm(self._n_rows)
        index, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        rows: Any = self._rows
        batch: Any = [rows[i] for i in index] if self._is_list else index_rows(rows, index)
        ctx.train_data = batch
        ctx.trained_env_step += len(index)

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the epoch."""
        return {"order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._order = state["order"]


def offline_data_fetcher(cfg: EasyDict, dataset: Any, collate_fn: Any = None) -> Any:
    """Read batches of ``cfg.policy.learn.batch_size`` rows of a dataset, epoch after epoch.

    They are lists if the dataset's items are not dictionaries.
    """
    rows = getattr(dataset, "rows", None)
    if rows is None:
        rows = [dataset[number] for number in range(len(dataset))]
        if isinstance(rows[0], Mapping | Batch):
            rows = rows_of(rows, name="the dataset")
    n_rows = len(rows) if isinstance(rows, list) else len(rows["done"])
    return _RowsFetcher(rows, n_rows, min(cfg.policy.learn.batch_size, n_rows))


class _Saver(OfflineDataSaver):
    """Saves in a format of DI-engine's."""

    def __init__(self, path: str, data_type: str) -> None:
        super().__init__(path)
        self._data_type = data_type

    def close(self) -> None:
        """Write the file, if any rows were collected."""
        batches, self._batches = self._batches, []
        if batches:
            rows = [row for batch in batches for row in _transitions(batch)]
            offline_data_save_type(rows, str(self._path), self._data_type)


def offline_data_saver(data_path: str, data_type: str = "hdf5") -> OfflineDataSaver:
    """Save what is collected, as HDF5 to ``<name>_demos.hdf5``, or as ``naive`` to a pickle."""
    return _Saver(data_path, data_type)


def trainer(cfg: EasyDict, policy: Any, log_freq: int = 100) -> Any:
    """Update a policy from ``ctx.train_data``, or train a reward model on what was collected."""
    if not isinstance(policy, BaseRewardModel):
        return train_samples(policy) if is_of_program(policy) else core_trainer(policy)

    @declared(roles=(Role.LEARNER,), reads=("trajectories",))
    def train(ctx: Any) -> None:
        policy.collect_data(_transitions(ctx.trajectories))
        policy.train()

    return train


def multistep_trainer(policy: Any, log_freq: int = 100) -> Middleware[Any]:
    """Learn from what was collected, as many epochs as the policy's settings say."""
    return train_samples(policy) if is_of_program(policy) else OnPolicyLearner(policy)


def gae_estimator(cfg: EasyDict, policy: Any, buffer_: Any = None) -> Any:
    """Estimate advantages; with a buffer, push the rows into it."""
    if is_of_program(policy):
        return _estimator_of_lists(cfg, policy, buffer_)
    if buffer_ is None:
        return GAEEstimator(policy)
    replay, estimate = _replay(buffer_), GAEEstimator(policy)

    @declared(roles=(Role.LEARNER,), reads=("trajectories",), fills=(replay,))
    def push(ctx: Any) -> None:
        estimate(ctx)
        if ctx.train_data is None:  # nothing was collected
            return
        replay.push(ctx.train_data)
        ctx.train_data = None

    return push


def _estimator_of_lists(cfg: EasyDict, policy: Any, buffer_: DequeBuffer | None) -> Any:
    @declared(roles=(Role.LEARNER,), reads=("trajectories",), writes=("train_data",))
    def estimate(ctx: Any) -> None:
        batch = advantages_of(cfg, policy, ctx.trajectories, ctx.trajectory_end_idx)
        ctx.trajectories = None
        if buffer_ is None:
            ctx.train_data = batch
            return
        for number in range(len(batch.done)):
            buffer_.push(index_rows(batch, number))

    return estimate


def montecarlo_return_estimator(policy: Any) -> MonteCarloReturnEstimator:
    """Sum the rewards from each row to the end of its episode."""
    return MonteCarloReturnEstimator(policy)


class _NStepByConfig(NStepRewardEnhancer):
    """Sums rewards by a config's numbers, where DI-engine passes no policy.

    A policy with a burn-in learns from sequences, in which it sums the rewards itself.
    """

    def __init__(self, cfg: EasyDict) -> None:
        self._n_step = checked("policy.nstep", cfg.nstep, Count)
        self._discount = checked("policy.discount_factor", cfg.discount_factor, Fraction)
        self._leaves_it_to_policy = _has_burn_in(cfg)

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Sum."""
        if not self._leaves_it_to_policy:
            super().__call__(ctx)


def nstep_reward_enhancer(cfg: EasyDict) -> NStepRewardEnhancer:
    """Sum ``cfg.policy.nstep`` rewards of each row, unless the policy sums those of sequences."""
    return _NStepByConfig(cfg.policy)


class _PriorityCalculator(PriorityCalculator):
    """Gives each transition of a list its priority, too."""

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Calculate."""
        collected: Any = ctx.trajectories
        if not isinstance(collected, list):
            super().__call__(ctx)
            return
        priority_fn: Callable[[Any], Any] = self._priority_fn
        for row, priority in zip(collected, priority_fn(collected), strict=True):
            row["priority"] = priority


def priority_calculator(priority_calculation_fn: Callable[[Any], Any]) -> PriorityCalculator:
    """Give new rows the priorities that a function of the rows returns."""
    return _PriorityCalculator(priority_calculation_fn)


def reward_estimator(cfg: EasyDict, reward_model: Any) -> Any:
    """Give ``ctx.train_data`` the rewards of a reward model."""

    @declared(roles=(Role.LEARNER,), reads=("train_data",), writes=("train_data",))
    def estimate(ctx: Any) -> None:
        if isinstance(ctx.train_data, list):
            estimated = reward_model.estimate(ctx.train_data)
            # Some change the samples in place.
            ctx.train_data = ctx.train_data if estimated is None else estimated
        else:
            ctx.train_data = rows_of(reward_model.estimate(_transitions(ctx.train_data)))

    return estimate
