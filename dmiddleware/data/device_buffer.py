"""A replay buffer on the device of its rows: nothing that it does waits for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

import torch

from dmiddleware.data.buffer_state import check_state
from dmiddleware.data.device_sum_tree import DeviceSumTree
from dmiddleware.data.n_step import LAST_STEP_COLUMNS
from dmiddleware.data.samplers import PrioritySamplerSettings
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.settings import (
    BY_PROGRAM,
    Count,
    Fraction,
    Settings,
    TakesSettings,
    Whole,
    plain_values,
    takes_options,
)
from dmiddleware.tree import Batch, leaves, nest

__all__ = ["DeviceBuffer", "DeviceBufferSettings"]


class DeviceBufferSettings(Settings):
    """The options of :class:`DeviceBuffer`."""

    size: Count = dataclasses.field(kw_only=False)
    """Capacity in rows, rounded down to a multiple of the number of lanes."""
    priority: PrioritySamplerSettings | None = None
    """Draw in proportion to priorities; None: draw all rows alike."""
    n_step: Annotated[Count | None, BY_PROGRAM] = None
    """As in :class:`~dmiddleware.data.TensorBuffer`."""
    discount: Annotated[Fraction | None, BY_PROGRAM] = None
    """γ of the n-step sum; None: the policy's, from :meth:`DeviceBuffer.bind`."""
    seed: Annotated[Whole | None, BY_PROGRAM] = None
    """Seed of the buffer's random generator; None takes one from the system."""


class DeviceBuffer(TakesSettings[DeviceBufferSettings]):
    """A replay buffer that keeps the newest rows where they are, one preallocated tensor per leaf.

    It is for rows ``[T, E, …]`` of envs that return tensors: every push has the same lanes ``E``,
    and a lane continues where it ended in the push before. So a row is a step and a lane, and the
    steps that follow a row need no index. Rows of the host belong into a
    :class:`~dmiddleware.data.TensorBuffer`, which can do more.

    Draws, returns and priorities are those of a ``TensorBuffer``, but the random numbers are drawn
    on the device.

    Args:
        settings: the options, each by keyword; see :class:`DeviceBufferSettings`.

    Attributes:
        size: capacity in rows, as given.
        n_step: the number of steps that a sampled ``reward`` sums over.
        discount: γ of the n-step sum; None: not known yet.

    Raises:
        ConfigError: if an option is not valid.
    """

    unroll_len: int | None = None

    @takes_options(DeviceBufferSettings)
    def __init__(self, settings: DeviceBufferSettings) -> None:
        self._settings = settings
        self.size = settings.size
        self.n_step = settings.n_step or 1
        self.discount = settings.discount
        self._clear()
        self._progress: float | None = None
        priority = settings.priority
        self._beta = Schedule.of(0.0 if priority is None else priority.beta)
        self.lacks_priorities = priority is not None

    def _clear(self) -> None:
        self._leaves: dict[str, torch.Tensor] = {}
        self._n_slots = 0  # steps that are held, of all lanes
        self._n_lanes = 0
        self._n_pushed = 0  # steps
        self._generator = torch.Generator()
        self._tree: DeviceSumTree | None = None
        self._n_draws = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Its options as plain values, with its class."""
        priority = self._settings.priority
        return {
            "type": type(self).__name__,
            **plain_values(self._settings),
            "priority": None if priority is None else plain_values(priority),
            "n_step": self.n_step,
            "discount": self.discount,
        }

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings that are schedules, by name."""
        return {} if self._settings.priority is None else {"beta": self._beta}

    @property
    def reads_counters(self) -> bool:
        """Whether draws read the counters although no setting is a schedule: no."""
        return False

    def bind(
        self,
        *,
        n_step: int,
        discount: float | None = None,
        burn_in: int | None = None,
        start_columns: Collection[str] = (),
    ) -> None:
        """Take the n-step length and the discount of the policy, or compare them.

        Raises:
            ConfigError: if the buffer has others, or the policy learns from sequences.
        """
        if burn_in is not None or start_columns:
            raise ConfigError(
                "a DeviceBuffer draws single rows, but the policy learns from sequences; use "
                "TensorBuffer(size, unroll_len=...)"
            )
        if discount is None:
            return
        if self._settings.n_step is None and not self._n_pushed:
            self.n_step = n_step
        for name, value, policy_value in (
            ("n_step", self.n_step, n_step),
            ("discount", self.discount, discount),
        ):
            if value not in (None, policy_value):
                raise ConfigError(
                    f"the buffer has {name}={value}, but the policy has {name}={policy_value}; set "
                    f"it in the policy's config, and build the buffer without {name}"
                )
        self.discount = discount

    @property
    def device(self) -> torch.device | None:
        """Where the rows are; None: there are none yet."""
        return next((leaf.device for leaf in self._leaves.values()), None)

    def __len__(self) -> int:
        return min(self._n_pushed, self._n_slots) * self._n_lanes

    def push(self, batch: Batch, /) -> range:
        """Append the steps of a batch ``[T, E, …]``; a full buffer drops its oldest ones.

        Returns:
            The indices of the rows stored; row ``(t, e)`` is number ``t * E + e``.

        Raises:
            StructureError: if the batch has another structure, or other lanes, than the first one;
                the buffer is unchanged.
        """
        rows = dict(leaves(batch))
        n_steps, n_lanes = self._checked_lead(batch)
        if not self._leaves:
            self._allocate(rows, n_lanes)
        self._check_structure(rows)
        n_kept = min(n_steps, self._n_slots)
        self._n_pushed += n_steps - n_kept
        for start, stop, at in self._runs(n_kept):
            first = n_steps - n_kept + start
            for path, leaf in rows.items():
                self._leaves[path][at : at + stop - start] = leaf[first : first + stop - start]
            if self._tree is not None:
                self._tree.fill(at * n_lanes, (at + stop - start) * n_lanes)
        first_row = self._n_pushed * n_lanes
        self._n_pushed += n_kept
        return range(first_row, self._n_pushed * n_lanes)

    def _runs(self, n_steps: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of new steps, and the slot at which each of them begins."""
        start = 0
        while start < n_steps:
            at = (self._n_pushed + start) % self._n_slots
            stop = min(n_steps, start + self._n_slots - at)
            yield start, stop, at
            start = stop

    def _checked_lead(self, batch: Batch) -> tuple[int, int]:
        if "done" not in batch:
            raise StructureError(
                f"a DeviceBuffer takes rows with the column done, got {', '.join(batch) or 'none'}"
            )
        shape = batch["done"].shape
        if len(shape) != 2 or (self._n_lanes and shape[1] != self._n_lanes):
            lanes = self._n_lanes or "E"
            raise StructureError(
                f"a DeviceBuffer takes rows [T, {lanes}, …] of the same envs, got done of shape "
                f"{tuple(shape)}; push what StepCollector collected, or use a TensorBuffer"
            )
        return shape[0], shape[1]

    def _allocate(self, rows: Mapping[str, torch.Tensor], n_lanes: int) -> None:
        device = rows["done"].device
        n_slots = self.size // n_lanes
        if n_slots <= self.n_step:
            raise ConfigError(
                f"size={self.size} holds {n_slots} steps of {n_lanes} envs, but n_step="
                f"{self.n_step} needs more; make it at least {n_lanes * (self.n_step + 1)}"
            )
        self._n_lanes, self._n_slots = n_lanes, n_slots
        self._leaves = {
            path: torch.zeros((n_slots, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
            for path, leaf in rows.items()
        }
        if device.type != "cpu":
            self._generator = torch.Generator(device)
        if self._settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self._settings.seed)
        if self._settings.priority is not None:
            self._tree = DeviceSumTree(n_slots * n_lanes, self._settings.priority, device)

    def _check_structure(self, rows: Mapping[str, torch.Tensor]) -> None:
        if rows.keys() != self._leaves.keys():
            raise StructureError(
                f"the batch has the leaves {', '.join(sorted(rows))}, but the buffer has "
                f"{', '.join(sorted(self._leaves))}"
            )
        for path, leaf in rows.items():
            stored = self._leaves[path]
            if leaf.shape[1:] != stored.shape[1:] or leaf.dtype != stored.dtype:
                raise StructureError(
                    f"the leaf {path} is {leaf.dtype} of shape {tuple(leaf.shape)}, but the buffer "
                    f"has {stored.dtype} of shape [T, {', '.join(map(str, stored.shape[1:]))}]"
                )
            if leaf.device != stored.device:
                raise StructureError(
                    f"the leaf {path} is on {leaf.device}, but the buffer is on {stored.device}"
                )

    def sample(self, n: int) -> Batch:
        """Draw ``n`` rows, as :meth:`TensorBuffer.sample` does, on the device.

        Raises:
            NotEnoughData: if the buffer has fewer than ``n`` rows.
            ConfigError: if rewards are summed without a discount.
        """
        n_held = len(self)
        if not 1 <= n <= n_held:
            raise NotEnoughData(
                f"cannot draw {n} rows: the buffer has {n_held}; collect more first"
            )
        lanes, oldest = self._n_lanes, max(self._n_pushed - self._n_slots, 0)
        weight = None
        if self._tree is None:
            row = torch.randint(
                oldest * lanes,
                self._n_pushed * lanes,
                (n,),
                generator=self._generator,
                device=self.device,
            )
        else:
            slot, weight = self._tree.draw(n, self._present_beta(), self._generator)
            newest = self._n_pushed - 1
            step = newest - (newest - slot // lanes) % self._n_slots
            row = step * lanes + slot % lanes
        self._n_draws += 1
        columns = self._rows(row // lanes, row % lanes)
        columns["index"] = row
        if weight is not None:
            columns["weight"] = weight
        return nest(columns)

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw one batch; see :meth:`ReplayBuffer.sample_ahead`."""
        if counters is not None:
            self._progress = counters.progress
        return [self.sample(n)]

    def _present_beta(self) -> float:
        if self._beta.is_constant:
            return self._beta.start
        n_rows = self._n_pushed * self._n_lanes
        return self._beta.at(
            Counters(env_step=n_rows, update=self._n_draws, progress=self._progress)
        )

    def _rows(self, step: torch.Tensor, lane: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows of single steps and lanes, ``[n, …]``, with n-step returns."""
        slots = self._n_slots
        if self.n_step == 1:
            return {path: leaf[step % slots, lane] for path, leaf in self._leaves.items()}
        if self.discount is None:
            raise ConfigError(
                f"this buffer sums rewards over n_step={self.n_step} steps, but has no discount; "
                "build it with discount=policy.discount, or call buffer.bind(...) first"
            )
        reward, done, ids = (self._leaves[name] for name in ("reward", "done", "episode_id"))
        first = step % slots, lane
        total, last = reward[first].float(), torch.zeros_like(step)
        goes_on, episode = ~done[first], ids[first]
        for ahead in range(1, self.n_step):
            at = (step + ahead) % slots
            is_next = ids[at, lane] == episode
            goes_on = goes_on & is_next & (step + ahead < self._n_pushed)
            total = total + torch.where(goes_on, reward[at, lane] * self.discount**ahead, 0.0)
            last = torch.where(goes_on, ahead, last)
            goes_on = goes_on & ~done[at, lane]
        end = (step + last) % slots, lane
        rows = {
            path: leaf[end if path.partition(".")[0] in LAST_STEP_COLUMNS else first]
            for path, leaf in self._leaves.items()
        }
        rows["reward"] = total
        rows["discount"] = self.discount ** (last + 1).float()
        return rows

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of rows; those that are no longer held are skipped.

        Args:
            index: int64 ``[n]``.
            priority: ``[n]``, not negative, finite. Nobody waits for the device to check it: after
                any other value, the weights of all samples are NaN.

        Returns:
            The number of rows given, because those that are skipped are not counted on the host.
        """
        if self._tree is None or len(index) == 0:
            return 0
        self.lacks_priorities = False
        index = torch.as_tensor(index, device=self.device)
        value = torch.as_tensor(priority, device=self.device).detach()
        step = index // self._n_lanes
        slot = step % self._n_slots * self._n_lanes + index % self._n_lanes
        self._tree.set(slot, value, is_held=step >= self._n_pushed - self._n_slots)
        return len(index)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later samples depend on, on the CPU."""
        return {
            "leaves": {path: leaf.cpu().clone() for path, leaf in self._leaves.items()},
            "n_pushed": self._n_pushed,
            "n_draws": self._n_draws,
            "n_step": self.n_step,
            "generator": self._generator.get_state(),
            "tree": None if self._tree is None else self._tree.state_dict(),
            "device": str(self.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; later samples equal the original's.

        The rows go to the device on which they were.

        Raises:
            CheckpointMismatch: if this buffer has other options, or this machine lacks the device.
        """
        check_state("DeviceBuffer", state, ("leaves", "n_pushed", "generator", "tree"))
        if state["leaves"] and (state["tree"] is None) is not (self._settings.priority is None):
            raise CheckpointMismatch(
                "the state comes from a buffer that draws in another way; build this one with the "
                "same priority="
            )
        if not state["leaves"]:
            self._clear()
            return
        device = _usable_device(state["device"])
        rows = {path: leaf.to(device) for path, leaf in state["leaves"].items()}
        n_slots, n_lanes = rows["done"].shape
        if n_slots != self.size // n_lanes or state["n_step"] != self.n_step:
            raise CheckpointMismatch(
                f"the state has {n_slots} steps of {n_lanes} envs and n_step={state['n_step']}, "
                f"this buffer has size={self.size} and n_step={self.n_step}; build it with the "
                "same options"
            )
        self._n_pushed, self._n_draws = state["n_pushed"], state["n_draws"]
        self._allocate(rows, n_lanes)
        for path, leaf in rows.items():
            self._leaves[path].copy_(leaf)
        self._generator.set_state(state["generator"].cpu())
        if self._tree is not None:
            self._tree.load_state_dict(state["tree"])
            self.lacks_priorities = False


def _usable_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise CheckpointMismatch(
            f"the rows of this state were on {name}, which cannot be used here: {error}; "
            "resume the run on a machine that has this device"
        ) from error
