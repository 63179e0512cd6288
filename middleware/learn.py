"""Learning: update the policy from data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from dmiddleware.data import (
    MinibatchUnit,
    OfflineDataset,
    ReplayBuffer,
    minibatches,
    n_minibatches,
    select_columns,
)
from dmiddleware.distributed import gather_from_ranks, rank_and_world_size, sum_over_ranks
from dmiddleware.errors import ConfigError, NotEnoughData
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import (
    HasModes,
    LearnMode,
    as_learn_mode,
    late_stops,
    may_be_update,
    update_outputs,
)
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Count, TakesSettings, takes_options
from dmiddleware.tree import Batch, flatten_lead, items_of, to_device, with_columns
from middleware.advantage import AdvantageEstimator
from middleware.base import BaseMiddleware, C, stock_middleware
from middleware.collect import StepCollector, collectors_of
from middleware.context import OfflineRLContext, RLContext
from middleware.exchange import ContextExchanger
from middleware.roles import Role
from middleware.support.counters import RunCounters
from middleware.support.dataset_reader import DatasetReader, check_dataset
from middleware.support.part_name import PartSettings
from middleware.support.policy_settings import count_of, setting_of
from middleware.support.replay import (
    EarlyReturns,
    SkippedDraws,
    bind_to_policy,
    check_buffer,
    check_start,
    counters_for,
    n_step_problems,
    update_priorities,
)
from middleware.support.rows import rows_of

__all__ = [
    "OffPolicyLearner",
    "OffPolicyLearnerSettings",
    "OfflineLearner",
    "OnPolicyLearner",
    "PolicyUpdater",
]

_MANY_ENVS: Final = 64
_ENOUGH_STEPS: Final = 4
"""Of each of many envs: with 1 or 2, PPO and A2C unlearn CartPole again; with 4, they do not."""
_GOOD_STEPS: Final = 32
_log = logging.getLogger(__name__)


class PolicyUpdater(BaseMiddleware[C]):
    """Base of the middleware that learn: it makes updates, and counts them."""

    roles = (Role.LEARNER,)
    writes: tuple[str, ...] = ("train_output", "train_iter")
    _n_ranks = 1

    def __init__(self, policy: HasModes | LearnMode) -> None:
        self._mode = as_learn_mode(policy, user=type(self).__name__)
        self._counters = RunCounters(self._mode.spec.schedules)
        self.snapshot_parts: dict[str, Any] = {"learner": self._mode}

    def setup(self, task: Task[Any]) -> None:
        """Find out how many ranks learn."""
        self._n_ranks = rank_and_world_size()[1]

    def bind(self, chain: ChainView) -> None:
        """Take the limits of the chain, which schedules by progress depend on."""
        self._counters.bind(chain)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject policies that would mix, and ranks that would learn or stop alone."""
        yield from self._counters.preflight(chain)
        yield from self._mixed_with(chain)
        size = rank_and_world_size()[1]
        if size == 1:
            return
        if not self._mode.spec.uses_ranks:
            yield (
                f"{size} ranks run this program, but the policy has multi_gpu=False, so each would "
                "learn alone; build it with multi_gpu=True"
            )
        if not any(isinstance(part, ContextExchanger) for part in chain.middleware):
            yield (
                f"{size} ranks run this program, and would stop in different steps; use "
                "ContextExchanger() first in the chain"
            )

    def _mixed_with(self, chain: ChainView) -> Iterable[str]:
        """Yield the problem that another learner, or another metric, has the same name, or none."""
        learners = [part for part in stock_middleware(chain) if isinstance(part, PolicyUpdater)]
        if learners and self._mode != learners[0]._mode:
            first, place = type(learners[0]).__name__, "no name"
            if chain.part is not None:
                place = f"the name {chain.part!r}"
            yield (
                f"it learns another policy than the {first} before it, and both have {place}, so "
                "their counters, metrics and checkpoints would mix; give each policy a name, such "
                'as name="red", for its collector, learner and all else that belongs to it'
            )
        for part in stock_middleware(chain.of(None)) if chain.part is not None else ():
            if part.metric_prefix == chain.part:
                yield (
                    f"the metrics of the {type(part).__name__} begin with {chain.part!r} too, and "
                    "would mix with those of the part; give it another name"
                )

    def _all_can(self, update: bool) -> bool:
        """Return whether every rank can make its next update; each of them asks."""
        if self._n_ranks == 1:
            return update
        return sum_over_ranks([float(not update)]) == [0.0]

    def _update(self, ctx: RLContext, batch: Batch) -> list[dict[str, Any]]:
        """Call the policy's forward once; each of its outputs counts as an update."""
        if self._counters.needed:
            self._mode.spec.set_counters(self._counters.of(ctx))
        outputs = update_outputs(self._mode.forward(batch))
        ctx.train_iter += sum(map(may_be_update, outputs))
        return outputs


class OffPolicyLearnerSettings(PartSettings):
    """The options of :class:`OffPolicyLearner`."""

    update_per_collect: Count = 1
    """Updates in each step of the task."""
    learn_start: Count | None = None
    """Rows that the buffer must hold before the first update; None: those of one batch."""


class OffPolicyLearner(PolicyUpdater[RLContext], TakesSettings[OffPolicyLearnerSettings]):
    """Update the policy from batches that it draws from a buffer.

    A batch has the policy's ``batch_size`` rows. Learning starts when the buffer holds
    ``learn_start`` rows. Priorities that the policy returns
    are written to the buffer. If the buffer cannot supply enough rows for an update, the update is
    skipped, counted and logged.

    Args:
        policy: a policy, or its learn mode.
        buffer: where batches come from. A :class:`~dmiddleware.data.TensorBuffer` takes the
            discount for its n-step returns from the policy.
        settings: the options, each by keyword; see :class:`OffPolicyLearnerSettings`.

    Reads:
        ctx.train_iter: incremented.

    Writes:
        ctx.train_output: a list with the output of each update; None while the buffer fills, or
            while an exchange pauses learning to keep its pace.
        ctx.train_iter: with the updates made.
        ctx.trained_env_step: with the rows drawn.

    Raises:
        ConfigError: if ``policy`` or ``buffer`` has the wrong type, an option is not valid, the
            buffer's ``n_step`` or discount differs from the policy's, or ``learn_start`` is less
            than the policy's ``batch_size`` or more than the buffer's size. In a step: if the
            first rewards show that the policy cannot learn the env's returns, as C51 and Rainbow
            without ``v_min`` and ``v_max``.
        NonFiniteLoss: from the policy; a step that is not finite, and those after it, are skipped.
    """

    reads = ("train_iter",)

    settings: OffPolicyLearnerSettings

    @takes_options(OffPolicyLearnerSettings)
    def __init__(
        self, policy: HasModes | LearnMode, buffer: ReplayBuffer, settings: OffPolicyLearnerSettings
    ) -> None:
        super().__init__(policy)
        check_buffer(buffer)
        self.settings = settings
        self._batch_size = count_of(self._mode, "batch_size", user="OffPolicyLearner")
        bind_to_policy(buffer, self._mode)
        self._buffer = buffer
        self._counters = counters_for(buffer, self._mode.spec.schedules)
        self._learn_start = check_start(
            buffer, batch_size=self._batch_size, learn_start=settings.learn_start
        )
        self._skipped = SkippedDraws()
        self._early_returns = EarlyReturns.of(buffer, self._mode)
        self._has_updated = False
        self.draws_from = (buffer,)
        self.components = {"buffer": buffer}
        self.snapshot_parts["buffer"] = buffer

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject an n-step length that is not the policy's, and a chain that never explores."""
        yield from super().preflight(chain)
        yield from n_step_problems(self._buffer, self._mode, chain)
        collectors = collectors_of(chain)
        if not collectors or self._mode.spec.explores:
            return
        if chain.writes("collect_kwargs") or any(part.random_steps for part in collectors):
            return
        yield (
            "it learns with a policy that always acts greedily, and nothing in the chain makes it "
            "explore; add EpsGreedyHandler(policy) before the collector"
        )

    def __call__(self, ctx: RLContext) -> None:
        """Learn."""
        buffer, batch_size = self._buffer, self._batch_size
        n_updates = self.settings.update_per_collect
        ready = len(buffer) >= self._learn_start and not ctx.learning_held
        if not self._all_can(update=ready):
            return
        if self._early_returns is not None:
            self._early_returns.show(ctx)
        outputs: list[dict[str, Any]] = []
        drawn: list[Batch] = []
        for n_made in range(n_updates):
            if not drawn:
                counters = self._counters.of(ctx) if self._counters.needed else None
                at_most = n_updates - n_made
                try:
                    drawn = buffer.sample_ahead(batch_size, at_most=at_most, counters=counters)
                except NotEnoughData as error:
                    self._skipped.add(ctx, error)
            if not self._all_can(update=bool(drawn)):
                break
            batch = drawn.pop(0)
            updates = self._update(ctx, batch)
            # The first time also without priorities, which a buffer may need.
            if not self._has_updated or any("priority" in output for output in updates):
                update_priorities(buffer, batch, updates)
                self._has_updated = True
            outputs += updates
            # An item has as many rows to learn from as a sequence, or one.
            ctx.trained_env_step += batch_size * (buffer.unroll_len or 1)
        if outputs:
            ctx.train_output = outputs


class OnPolicyLearner(PolicyUpdater[RLContext]):
    """Update the policy from all of the collected data, in minibatches, for several epochs.

    The number of epochs is the policy's ``epoch_per_collect``.

    The data are in ``ctx.train_data``, where an estimator of advantages puts them, or in
    ``ctx.trajectories`` if the policy computes its targets itself, as IMPALA and PQN do
    (``learns_from_trajectories``).

    Each epoch divides the data at random into minibatches whose sizes differ by at most one and
    are at least the policy's ``batch_size`` rows (if there are that many). What they consist of,
    single rows, whole lanes ``[T, …]`` of envs, or everything, is its ``minibatch_unit``. Only the
    columns that the policy learns from (its ``learn_columns``, ``optional_columns``, ``act_inputs``
    and recurrent ``state``) are moved to its device, once, and gathered. When the policy returns
    ``kl_stop``, because it has moved too far from the policy that collected, the remaining
    minibatches and epochs are skipped. A GPU is asked at the end of an epoch, so there the other
    minibatches of the epoch are tried, each by itself.

    With the policy's ``recompute_advantage``, every epoch but the first starts with new
    values, advantages and returns, from the value function as it is then (Andrychowicz et al.,
    "What Matters for On-Policy Deep Actor-Critic Methods?", 2021, section 3.5).

    If several ranks learn, all make as many minibatches as the rank with the fewest rows.

    Before the first step, a warning is logged if a :class:`StepCollector` has 64 envs or more and
    collects only 1 to 3 steps of each at a time, unless the policy learns from single steps (λ of
    0).

    Args:
        policy: a policy, or its learn mode.

    The mean number of updates that the policy has made since it collected the rows is logged as
    ``learn/policy_lag``.

    Reads:
        ctx.train_data, ctx.trajectories: one of them: a batch ``[N, …]`` or ``[T, E, …]``, used
            once.
        ctx.train_iter: incremented.

    Writes:
        ctx.train_output: a list with the output of each update.
        ctx.train_iter: with the updates made.

    Raises:
        ConfigError: if ``policy`` is not a policy, or has no ``batch_size`` or
            ``epoch_per_collect``.
        StructureError: if the policy learns from lanes, and the data is not ``[T, E, …]``.
        NonFiniteLoss: from the policy; a step that is not finite, and those after it, are skipped.
    """

    @takes_options(PartSettings)
    def __init__(self, policy: HasModes | LearnMode, settings: PartSettings) -> None:
        super().__init__(policy)
        self.settings = settings
        mode, user = self._mode, "OnPolicyLearner"
        self._takes_trajectories: bool = mode.spec.learns_from_trajectories
        self.reads = ("trajectories" if self._takes_trajectories else "train_data", "train_iter")
        self._batch_size = count_of(mode, "batch_size", user=user)
        self._epochs = count_of(mode, "epoch_per_collect", user=user)
        self._unit: MinibatchUnit = mode.spec.minibatch_unit
        self._columns = _columns_to_learn(mode)
        self._estimator: AdvantageEstimator | None = None
        if setting_of(mode, "recompute_advantage"):
            if self._unit != "rows":
                raise ConfigError(
                    "recompute_advantage computes the values of single rows, but this policy "
                    "learns from lanes; set it to False"
                )
            self._estimator = AdvantageEstimator(mode, user=user)
        self._generator = torch.Generator()
        # Orders rows that are on a device already.
        self._on_device: torch.Generator | None = None

    def bind(self, chain: ChainView) -> None:
        """Take the limits of the chain, and warn of a collector with few steps of many envs."""
        super().bind(chain)
        if self._learns_from_single_steps():
            return
        for collector in collectors_of(chain):
            if isinstance(collector, StepCollector):
                _warn_of_few_steps(collector)

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        super().setup(task)
        self._generator.manual_seed(task.seed_for("learner", "minibatches"))

    def _learns_from_single_steps(self) -> bool:
        """Return whether the policy's targets have one reward each, as with λ = 0."""
        spec = self._mode.spec
        trace = setting_of(self._mode, "trace_decay") if self._takes_trajectories else None
        return self._unit != "lanes" and 0.0 in (trace, spec.gae_lambda)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators that order the minibatches."""
        on_device = self._on_device
        return {
            "generator": self._generator.get_state(),
            "on_device": None if on_device is None else on_device.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._generator.set_state(state["generator"])
        if state.get("on_device") is not None and self._mode.spec.device != "cpu":
            self._generator_for(torch.device(self._mode.spec.device)).set_state(
                state["on_device"].cpu()
            )

    def _generator_for(self, device: torch.device) -> torch.Generator:
        """Return what orders rows that came on this device, so that no order is moved to it."""
        if device.type == "cpu":
            return self._generator
        if self._on_device is None:
            seed = derive_seed(self._generator.initial_seed(), device.type)
            self._on_device = torch.Generator(device).manual_seed(seed)
        return self._on_device

    def __call__(self, ctx: RLContext) -> None:
        """Learn."""
        if self._takes_trajectories:
            rows = self._mode.spec.add_targets(rows_of(ctx.trajectories))
        else:
            rows = rows_of(ctx.train_data, name="ctx.train_data")
        if "collect_iter" in rows:
            ctx.log("learn/policy_lag", ctx.train_iter - rows["collect_iter"].float().mean())
        n_lead, generator = rows["done"].dim(), self._generator_for(rows["done"].device)
        data = self._to_learn(rows, n_lead)
        n = n_minibatches(data, self._batch_size, unit=self._unit)
        if self._n_ranks > 1:
            n = min(gather_from_ranks(n))
        outputs: list[dict[str, Any]] = []
        ctx.train_output = outputs
        for epoch in range(self._epochs):
            if epoch and self._estimator is not None:
                new = self._to_learn(self._estimator.again(rows, data["obs"]), n_lead)
                data = with_columns(data, **dict(items_of(new)))
            if not self._one_epoch(ctx, data, n, outputs, generator):
                break

    def _to_learn(self, rows: Batch, n_lead: int) -> Batch:
        """Return the columns that the policy learns from, on its device."""
        if self._columns is not None:
            rows = select_columns(rows, self._columns)
        if self._unit != "lanes" and n_lead == 2:
            rows = flatten_lead(rows, 2)
        return to_device(rows, self._mode.spec.device)

    def _one_epoch(
        self,
        ctx: RLContext,
        data: Batch,
        n: int,
        outputs: list[dict[str, Any]],
        generator: torch.Generator,
    ) -> bool:
        """Learn from all rows once; return whether to continue with another epoch.

        What a GPU decides on the way is read at the end.
        """
        n_before = len(outputs)
        for batch in minibatches(data, n, unit=self._unit, generator=generator):
            for output in self._update(ctx, batch):
                outputs.append(output)
                if not may_be_update(output):
                    return False
        n_late = late_stops(outputs[n_before:])
        ctx.train_iter -= n_late
        return n_late == 0


def _warn_of_few_steps(collector: StepCollector) -> None:
    """Warn if a batch has only few steps of each env because the envs are many."""
    n_sample, env_num = collector.settings.n_sample, collector.env_num
    n_steps = -(-n_sample // env_num)
    if env_num < _MANY_ENVS or n_steps >= _ENOUGH_STEPS:
        return
    enough = _GOOD_STEPS * env_num
    _log.warning(
        "the policy learns from %d step%s of each env at a time, since n_sample is %s and there "
        "are %s envs. Its returns then look no further ahead, and learning often collapses. "
        "Collect about %d steps of each, and learn from larger minibatches, such as n_sample=%d "
        "for the collector and batch_size=%d for the policy (ditask train: --collector.n-sample %d "
        "--policy.batch-size %d)",
        n_steps,
        "s" * (n_steps > 1),
        f"{n_sample:,}",
        f"{env_num:,}",
        _GOOD_STEPS,
        *(enough, env_num, enough, env_num),
    )


class OfflineLearner(PolicyUpdater[OfflineRLContext]):
    """Update the policy from the next minibatch of a dataset, once in each step of the task.

    A minibatch has the policy's ``batch_size`` rows. The dataset is read epoch after epoch, each in
    a new random order. Rows that are left over at the end of an epoch are skipped.

    Args:
        policy: a policy, or its learn mode.
        dataset: the dataset. It stays open; its owner closes it.

    Reads:
        ctx.train_iter, ctx.trained_env_step: incremented.

    Writes:
        ctx.train_output: a list with the output of each update.
        ctx.train_iter: with the updates made.
        ctx.train_epoch: passes over the dataset that are finished with this minibatch.
        ctx.trained_env_step: with the rows of the minibatch.

    Raises:
        ConfigError: if ``policy`` or ``dataset`` has the wrong type, or the policy has no
            ``batch_size``.
        NotEnoughData: if the dataset has fewer rows than a minibatch.
        ChainError: before the first step, if the policy has ``n_step`` above 1, and the dataset has
            no n-step returns.
        NonFiniteLoss: from the policy; a step that is not finite, and those after it, are skipped.
    """

    reads = ("train_iter", "trained_env_step")
    writes = ("train_output", "train_iter", "train_epoch", "trained_env_step")

    @takes_options(PartSettings)
    def __init__(
        self, policy: HasModes | LearnMode, dataset: OfflineDataset, settings: PartSettings
    ) -> None:
        super().__init__(policy)
        self.settings = settings
        user = "OfflineLearner"
        check_dataset(dataset, user=user)
        n_rows = count_of(self._mode, "batch_size", user=user)
        self._reader = DatasetReader(dataset, batch_size=n_rows)
        self.components = {"dataset": dataset.path}

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        super().setup(task)
        self._reader.setup(task)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a dataset without the n-step returns that the policy learns from."""
        yield from super().preflight(chain)
        if not self._reader.has_n_step:
            yield from n_step_problems(None, self._mode, chain)

    def __call__(self, ctx: OfflineRLContext) -> None:
        """Learn."""
        ctx.train_output = self._update(ctx, self._reader.read())
        self._reader.count(ctx)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset."""
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._reader.load_state_dict(state)


def _columns_to_learn(mode: LearnMode) -> tuple[str, ...] | None:
    """Return the columns that the policy may read when it learns; None: any of them."""
    optional = mode.spec.optional_columns
    if optional is None:
        return None
    # What it saw when it acted; the infos are one nested column.
    inputs = (name.partition(".")[0] for name in mode.spec.act_inputs)
    return (*mode.spec.learn_columns, *optional, *inputs, "state")
