"""A TensorBuffer on a device: nothing that it does in a step waits for the device."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.data.buffer_state import check_state, usable_device
from dmiddleware.data.device_sum_tree import DeviceSumTree
from dmiddleware.data.n_step import LAST_STEP_COLUMNS
from dmiddleware.data.samplers import Ints, PrioritySampler, PrioritySamplerSettings
from dmiddleware.data.tensor_buffer import TensorBuffer, TensorBufferSettings
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError
from dmiddleware.files.schema import Rows, as_batch, as_index
from dmiddleware.schedule import Counters
from dmiddleware.settings import Count, checked
from dmiddleware.tree import Batch, leaves, nest

__all__ = ["DeviceBuffer"]

_EVENLY: Final = PrioritySamplerSettings(alpha=0.0, beta=0.0)
_BEFORE_ALL: Final = -(2**62)


class DeviceBuffer(TensorBuffer):
    """A :class:`TensorBuffer` on a device, which one becomes with its first rows.

    It is for rows ``[T, E, …]``: every push has the same lanes ``E``, and a lane continues where it
    ended in the push before. So a row is a step and a lane, and the steps that follow a row need no
    index. Where it differs from a buffer of the host:

    - random numbers are drawn on the device;
    - ``start_columns`` are stored with every row;
    - sequences are drawn from strata of equal mass, also without priorities, and those that cannot
      be drawn yet, because too few of their rows are known, have no priority;
    - of several priorities for a row, any one counts, and one that is not valid makes all weights
      NaN, because nobody waits for the device to check it.

    Raises:
        ConfigError: if an option is not valid, or is one of those that a device does not have.
    """

    def _arrange(self, settings: TensorBufferSettings) -> None:
        """Take the options of an empty buffer; those that are None have no effect."""
        lacking = self._lacking_on(settings)
        if lacking:
            raise ConfigError(
                f"a buffer with device={settings.device!r} has no {', '.join(lacking)}; use "
                "device=None, and options that need it keep the rows on the host"
            )
        assert settings.device is not None
        self._device = usable_device(settings.device)
        super()._arrange(settings)
        self._forget()

    def _forget(self) -> None:
        self._leaves: dict[str, torch.Tensor] = {}
        self._n_slots = 0  # steps that are held, of all lanes
        self._n_lanes = 0
        self._n_pushed = 0  # steps
        self._n_cleared = 0  # of these, before the buffer was cleared
        self._tree: DeviceSumTree | None = None
        # The step of its episode that a row is, as far as the episode is known, [slots, lanes].
        self._place: torch.Tensor | None = None
        # The number of pushed steps up to which there are certainly enough sequences.
        self._can_draw_until = 0
        self._device_generator = torch.Generator(self._device)
        # Taken from the generator of the host, so both depend on the same seed.
        self._device_generator.manual_seed(int(self.generator.integers(2**62)))

    @property
    def _has_structure(self) -> bool:
        return bool(self._leaves)

    @property
    def _oldest(self) -> int:
        return max(self._n_pushed - self._n_slots, self._n_cleared)

    @property
    def nbytes(self) -> int:
        """Memory of the rows on the device, in bytes; zero before the first push."""
        return sum(leaf.nbytes for leaf in self._leaves.values())

    @property
    def index(self) -> Ints:
        """The index of every row held, oldest first: int64 ``[len(buffer)]``."""
        return np.arange(self._oldest * self._n_lanes, self._n_pushed * self._n_lanes)

    def __len__(self) -> int:
        return (self._n_pushed - self._oldest) * self._n_lanes

    def push(self, batch: Rows) -> range:
        """Append the steps of a batch ``[T, E, …]``; a full buffer drops its oldest ones.

        Rows of other devices are moved.

        Returns:
            The indices of the rows stored; row ``(t, e)`` is number ``t * E + e``.

        Raises:
            StructureError: if the batch has another structure, or other lanes, than the first one,
                or lacks a column that the buffer's options need; the buffer is unchanged.
        """
        with self._lock:
            self._check_open()
            batch = as_batch(batch)
            if not self._leaves:
                self._leave_returns(batch)
            rows = {path: leaf.to(self._device) for path, leaf in leaves(batch)}
            n_steps, n_lanes = self._checked_lead(batch)
            if self._leaves:
                self._check_structure(rows)
            else:
                self._check_columns(batch)
                self._allocate(rows, n_lanes)
            place = None if self._place is None else self._places(rows)
            self._write(rows, place, n_steps)
            n_kept = min(n_steps, self._n_slots)
            return range((self._n_pushed - n_kept) * n_lanes, self._n_pushed * n_lanes)

    def _write(
        self, rows: Mapping[str, torch.Tensor], place: torch.Tensor | None, n_steps: int
    ) -> None:
        """Write steps ``[T, E, …]`` in place of the oldest ones, and make them drawable."""
        n_kept = min(n_steps, self._n_slots)
        start = self._n_pushed + n_steps - n_kept
        stop = start + n_kept
        for first, last, at in self._runs(start, stop):
            new = slice(first - stop + n_steps, last - stop + n_steps)
            for path, leaf in rows.items():
                self._leaves[path][at : at + last - first] = leaf[new]
            if self._place is not None and place is not None:
                self._place[at : at + last - first] = place[new]
            if self._tree is not None:
                fill = self._tree.fill if place is None else self._tree.empty
                fill(at * self._n_lanes, (at + last - first) * self._n_lanes)
        self._n_pushed = stop
        if place is not None:
            self._admit(start, stop)

    def _admit(self, start: int, stop: int) -> None:
        """Make sequences drawable whose shortest part ends with one of these steps."""
        assert self._tree is not None and self._place is not None
        later, stride = self._shortest - 1, self._settings.stride
        for first, last, at in self._runs(max(start - later, self._oldest), stop - later):
            step = torch.arange(first, last, device=self._device)
            begins = self._place[(step + later) % self._n_slots] - later
            starts = (begins >= 0) & (begins % stride == 0)
            self._tree.fill_where(at * self._n_lanes, starts.flatten())

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of steps that are in adjacent slots, and the first slot of each."""
        while start < stop:
            at = start % self._n_slots
            end = min(stop, start + self._n_slots - at)
            yield start, end, at
            start = end

    def _places(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return which step of its known episode each new row is, ``[T, E]``."""
        assert self._place is not None
        done, ids = rows["done"], rows["episode_id"]
        step = torch.arange(len(done), device=self._device).unsqueeze(1).expand_as(ids)
        begins = torch.ones_like(done)
        begins[1:] = done[:-1] | (ids[1:] != ids[:-1])
        began = torch.where(begins, step, _BEFORE_ALL)
        if self._n_pushed:
            newest = (self._n_pushed - 1) % self._n_slots
            is_other = self._leaves["done"][newest] | (self._leaves["episode_id"][newest] != ids[0])
            began[0] = torch.where(is_other, 0, -1 - self._place[newest])
        return step - began.cummax(0).values

    def _checked_lead(self, batch: Batch) -> tuple[int, int]:
        if "done" not in batch:
            raise StructureError(
                "a TensorBuffer with a device takes rows with the column done, got "
                f"{', '.join(batch) or 'none'}"
            )
        shape = batch["done"].shape
        if len(shape) != 2 or (self._n_lanes and shape[1] != self._n_lanes):
            lanes = self._n_lanes or "E"
            raise StructureError(
                f"a TensorBuffer with a device takes rows [T, {lanes}, …] of the same envs, got "
                f"done of shape {tuple(shape)}; push what StepCollector collected, or leave out "
                "device"
            )
        return shape[0], shape[1]

    def _check_columns(self, batch: Container[str]) -> None:
        """Refuse the first rows if they lack a column, or have one that samples add."""
        needed = [*(("reward",) if self.n_step > 1 else ()), *(self._settings.start_columns or ())]
        if self.n_step > 1 or self.unroll_len is not None:
            needed.append("episode_id")
        missing = [name for name in needed if name not in batch]
        if missing:
            raise StructureError(
                f"the options of this buffer need the columns {', '.join(missing)}, which the "
                "batch does not have; push what StepCollector collected"
            )
        added = ["index", *self.sampler.adds]
        added += ["discount"] if self.n_step > 1 else []
        added += ["mask"] if self.unroll_len is not None else []
        reserved = [name for name in added if name in batch]
        if reserved:
            raise StructureError(
                f"the batch has the column {reserved[0]}, which samples add; rename or remove it"
            )

    def _allocate(self, rows: Mapping[str, torch.Tensor], n_lanes: int) -> None:
        n_slots, n_needed = self.size // n_lanes, max(self.n_step + 1, self._shortest)
        if n_slots < n_needed:
            raise ConfigError(
                f"size={self.size} holds {n_slots} steps of {n_lanes} envs, but the buffer's "
                f"options need {n_needed}; make it at least {n_lanes * n_needed}"
            )
        self._n_lanes, self._n_slots = n_lanes, n_slots
        self._leaves = {
            path: torch.zeros((n_slots, *leaf.shape[1:]), dtype=leaf.dtype, device=self._device)
            for path, leaf in rows.items()
        }
        priority = self._priority or (None if self.unroll_len is None else _EVENLY)
        if priority is not None:
            self._tree = DeviceSumTree(n_slots * n_lanes, priority, self._device)
        if self.unroll_len is not None:
            shape = (n_slots, n_lanes)
            self._place = torch.zeros(shape, dtype=torch.int64, device=self._device)

    @property
    def _priority(self) -> PrioritySamplerSettings | None:
        return self.sampler.settings if isinstance(self.sampler, PrioritySampler) else None

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

    def sample(self, n: int) -> Batch:
        """Draw rows or sequences on the device; see :meth:`TensorBuffer.sample`.

        Before the first sequences are drawn, and once for each turn of a full buffer, the host
        reads whether there are enough.

        Raises:
            NotEnoughData: if fewer than ``n`` rows can be drawn.
            ConfigError: if rewards are summed without a discount.
        """
        n = checked("n", n, Count)
        with self._lock:
            self._check_open()
            if n > len(self):
                raise self._shortage(n, len(self))
            row, weight = self._draw(n)
            step, lane = row // self._n_lanes, row % self._n_lanes
            if self.unroll_len is None:
                columns = self._rows_at(step, lane)
            else:
                columns = self._sequences_at(step, lane)
            columns["index"] = row
            if weight is not None:
                columns["weight"] = weight
            return nest(columns)

    def _draw(self, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the index of ``n`` rows at which something drawable begins, and their weights."""
        sampler, lanes = self.sampler, self._n_lanes
        if self._tree is None:
            low, high = self._oldest * lanes, self._n_pushed * lanes
            where: dict[str, Any] = {"generator": self._device_generator, "device": self._device}
            return torch.randint(low, high, (n,), **where), None
        if self.unroll_len is not None and self._n_pushed >= self._can_draw_until:
            n_drawable = self._tree.count()
            if n > n_drawable:
                raise self._shortage(n, n_drawable)
            self._can_draw_until = self._n_pushed + self._n_slots
        beta = 0.0
        if isinstance(sampler, PrioritySampler):
            sampler.n_pushed = self._n_pushed * lanes
            beta = sampler.beta
            sampler.n_draws += 1
        slot, weight = self._tree.draw(n, beta, self._device_generator)
        newest = self._n_pushed - 1
        step = newest - (newest - slot // lanes) % self._n_slots
        return step * lanes + slot % lanes, weight if "weight" in sampler.adds else None

    def _shortage(self, n: int, n_drawable: int) -> NotEnoughData:
        unit = "rows" if self.unroll_len is None else "sequences"
        return NotEnoughData(
            f"cannot draw {n} {unit}: the buffer has {n_drawable} of them in {len(self)} rows; "
            "collect more first"
        )

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw one batch; see :meth:`TensorBuffer.sample_ahead`."""
        if counters is not None and isinstance(self.sampler, PrioritySampler):
            self.sampler.progress = counters.progress
        return [self.sample(n)]

    def _sequences_at(self, step: torch.Tensor, lane: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the sequences that start at steps and lanes ``[n]``, ``[L, n, …]``."""
        assert self._place is not None and self.unroll_len is not None
        length, starts = self.burn_in + self.unroll_len, self._settings.start_columns or ()
        ahead = torch.arange(length, device=self._device).unsqueeze(1)
        place = self._place[(step + ahead) % self._n_slots, lane]
        # Only in the same episode do places grow as steps do.
        mask = (place == place[0] + ahead) & (step + ahead < self._n_pushed)
        last = mask.sum(0) - 1
        rows = self._rows_at(step + torch.minimum(ahead, last), lane, without=starts)
        first = step % self._n_slots, lane
        at_start = {p: leaf[first] for p, leaf in self._leaves.items() if _root(p) in starts}
        return {**rows, **at_start, "mask": mask}

    def _rows_at(
        self, step: torch.Tensor, lane: torch.Tensor, *, without: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return the rows of steps ``[…, n]`` and lanes ``[n]``, with n-step returns."""
        slots = self._n_slots
        stored = {p: leaf for p, leaf in self._leaves.items() if _root(p) not in without}
        if self.n_step == 1:
            return {path: leaf[step % slots, lane] for path, leaf in stored.items()}
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
            path: leaf[end if _root(path) in LAST_STEP_COLUMNS else first]
            for path, leaf in stored.items()
        }
        rows["reward"] = total
        rows["discount"] = self.discount ** (last + 1).float()
        return rows

    def get(self, index: Any, leaves: Collection[str] | None = None) -> Batch:
        """Copy rows by index, as they were pushed; see :meth:`TensorBuffer.get`."""
        with self._lock:
            rows = as_index(index)
            low, high = self._oldest * self._n_lanes, self._n_pushed * self._n_lanes
            gone = rows[(rows < low) | (rows >= high)]
            if len(gone):
                raise IndexError(f"row {gone[0]} is not held; the rows are {low} … {high - 1}")
            for path in leaves or ():
                if path not in self._leaves:
                    raise KeyError(f"unknown leaf {path!r}; the leaves are {list(self._leaves)}")
            row = torch.from_numpy(rows).to(self._device)
            at = row // self._n_lanes % self._n_slots, row % self._n_lanes
            paths = self._leaves if leaves is None else leaves
            return nest({path: self._leaves[path][at] for path in paths})

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of rows, for a :class:`~dmiddleware.data.PrioritySampler`.

        Rows that are no longer held, or at which nothing drawable begins, are skipped.

        Args:
            index: int64 ``[n]``.
            priority: ``[n]``, not negative, finite. Nobody waits for the device to check it: after
                any other value, the weights of all samples are NaN.

        Returns:
            The number of rows given, because those that are skipped are not counted on the host.

        Raises:
            TypeError: if the sampler does not use priorities.
            ValueError: if there is not one priority for each index.
        """
        with self._lock:
            sampler = self.sampler
            if not isinstance(sampler, PrioritySampler):
                sampler.update_priority(np.empty(0, np.int64), np.empty(0))
                return 0
            index = torch.as_tensor(index, device=self._device)
            value = torch.as_tensor(priority, device=self._device).detach()
            if index.shape != value.shape:
                raise ValueError(
                    f"index and priority need one number per row, got {index.numel()} indices and "
                    f"{value.numel()} priorities"
                )
            if self._tree is None or len(index) == 0:
                return 0
            sampler.lacks_priorities = False
            step = index // self._n_lanes
            slot = step % self._n_slots * self._n_lanes + index % self._n_lanes
            self._tree.set(slot, value, is_held=step >= self._oldest)
            return len(index)

    def clear(self) -> None:
        """Remove all rows; structure and memory stay, and indices continue to count."""
        with self._lock:
            self._n_cleared, self._can_draw_until = self._n_pushed, 0
            if self._tree is not None:
                self._tree.empty(0, self._n_slots * self._n_lanes)

    def close(self) -> None:
        """Free the memory; it may be called twice."""
        with self._lock:
            self._closed = True
            self._leaves, self._tree, self._place = {}, None, None
            self._n_cleared = self._n_pushed

    def _state(self, *, live: bool) -> dict[str, Any]:
        self._check_open()
        copied = {path: leaf.cpu() for path, leaf in self._leaves.items()}
        return {
            "leaves": copied if live else {path: leaf.clone() for path, leaf in copied.items()},
            "place": None if self._place is None else self._place.cpu().clone(),
            "n_pushed": self._n_pushed,
            "n_cleared": self._n_cleared,
            "can_draw_until": self._can_draw_until,
            "n_step": self.n_step,
            "device": str(self._device),
            "generator": self._device_generator.get_state(),
            "tree": None if self._tree is None else self._tree.state_dict(),
            "sampler": self.sampler.state_dict(np.empty(0, np.int64)),
            "sampler_type": type(self.sampler).__name__,
            "lengths": [self.burn_in, self.unroll_len, self._settings.stride],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; later samples equal the original's.

        Raises:
            CheckpointMismatch: if this buffer has other options.
        """
        with self._lock:
            self._check_open()
            needed = ("leaves", "n_pushed", "generator", "tree", "place", "sampler", "lengths")
            check_state("TensorBuffer with a device", state, needed)
            self._check_sampler_of(state)
            self._leave_returns(state["leaves"])
            self._load(state)
            self._device_generator.set_state(state["generator"].cpu())
            self.sampler.load_state_dict(state["sampler"], np.empty(0, np.int64))

    def _load(self, state: Mapping[str, Any]) -> None:
        if not state["leaves"]:
            self._forget()
            return
        n_slots, n_lanes = state["leaves"]["done"].shape
        lengths = [self.burn_in, self.unroll_len, self._settings.stride]
        if (n_slots, state["n_step"]) != (self.size // n_lanes, self.n_step) or lengths != list(
            state["lengths"]
        ):
            raise CheckpointMismatch(
                f"the state has {n_slots} steps of {n_lanes} envs, n_step={state['n_step']} and "
                f"sequences of {list(state['lengths'])} (burn_in, unroll_len, stride), but this "
                f"buffer has size={self.size}, n_step={self.n_step} and {lengths}; build it with "
                "the same options"
            )
        self._forget()
        self._allocate(state["leaves"], n_lanes)
        for path, leaf in state["leaves"].items():
            self._leaves[path].copy_(leaf)
        self._n_pushed, self._n_cleared = state["n_pushed"], state["n_cleared"]
        self._can_draw_until = state["can_draw_until"]
        if self._place is not None:
            self._place.copy_(state["place"])
        if self._tree is not None:
            self._tree.load_state_dict(state["tree"])


def _root(path: str) -> str:
    return path.partition(".")[0]
