"""TensorBuffer: a columnar replay buffer that samples n-step returns and sequences."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.data.buffer_state import (
    check_state,
    generator_from_text,
    generator_to_text,
    usable_device,
)
from dmiddleware.data.n_step import LAST_STEP_COLUMNS, n_step_returns
from dmiddleware.data.ring.row_ring import RowRing
from dmiddleware.data.ring.storage import in_memory, mapped_to
from dmiddleware.data.samplers import Eligible, Ints, PrioritySampler, Sampler, UniformSampler
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData
from dmiddleware.files.schema import Array, Rows, as_batch, as_index
from dmiddleware.process.closing import Closing
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.settings import (
    BY_PROGRAM,
    Convert,
    Count,
    Fraction,
    Settings,
    TakesSettings,
    Whole,
    checked,
    plain_values,
    takes_options,
)
from dmiddleware.tree import Batch, as_tree, nest, to_array

__all__ = ["SampleTransform", "TensorBuffer", "TensorBufferSettings"]

# Larger copies are slower than several small ones, which reuse memory.
_BYTES_AHEAD = 2**19

_ON_HOST_ONLY = ("follow_episodes", "frame_stacks", "transform", "storage")

_CLOSED = "this TensorBuffer is closed; create another one"


@runtime_checkable
class SampleTransform(Protocol):
    """Changes the rows of each sample, such as :class:`~dmiddleware.data.HindsightReplay`."""

    def attach(self, buffer: TensorBuffer) -> None:
        """Check that the transform works on a buffer.

        Raises:
            ConfigError: if it does not.
        """
        ...

    def __call__(self, batch: Batch, buffer: TensorBuffer) -> Batch:
        """Return the sample to use instead.

        Args:
            batch: ``[n, …]``, as :meth:`TensorBuffer.sample` returns it; it may be changed.
            buffer: from where it was drawn. Draw random numbers from its ``generator``, so that
                they are part of its state.
        """
        ...


def _as_sampler(sampler: Any) -> Any:
    if isinstance(sampler, type):
        raise ConfigError(f"it must be an object; write sampler={sampler.__name__}()")
    if sampler is not None and not isinstance(sampler, Sampler):
        raise ConfigError(
            "it must be a UniformSampler, a PrioritySampler, or an object with the methods of "
            f"dmiddleware.data.Sampler, got {sampler!r:.100}"
        )
    return sampler


def _as_names(names: Any) -> Any:
    if isinstance(names, str):
        raise ConfigError(f"it takes several names; write ({names!r},)")
    return tuple(names) if isinstance(names, Collection) else names


Names: TypeAlias = Annotated[tuple[str, ...], Convert(_as_names)]


class TensorBufferSettings(Settings):
    """The options of :class:`TensorBuffer`."""

    size: Count = dataclasses.field(kw_only=False)
    """Capacity in rows."""
    sampler: Annotated[Sampler | None, Convert(_as_sampler)] = dataclasses.field(
        default=None, repr=False
    )
    """Draws the rows of a sample; None: ``UniformSampler()``."""
    n_step: Annotated[Count | None, BY_PROGRAM] = None
    """If above 1, ``reward`` is the discounted sum over up to ``n_step`` steps of the episode;
    ``next_obs``, ``next_action_mask``, ``done``, ``terminated`` and ``truncated`` come from the
    last of these steps; ``discount`` is γ^k for k steps, the factor of the bootstrap value. None:
    the policy's, from :meth:`TensorBuffer.bind`; 1 without a policy."""
    discount: Annotated[Fraction | None, BY_PROGRAM] = None
    """γ of the n-step sum; None: the policy's, from :meth:`TensorBuffer.bind`."""
    unroll_len: Count | None = None
    """If given, samples are time-first sequences ``[L, n, …]``, each within one episode, with
    ``L = burn_in + unroll_len`` and ``mask`` bool ``[L, n]``."""
    unroll_pad: bool = True
    """Pad sequences that reach the end of the known part of their episode: the last row is
    repeated, with ``mask`` False. If False, draw only rows that start a complete sequence."""
    burn_in: Annotated[Whole | None, BY_PROGRAM] = None
    """Rows at the beginning of each sequence that only warm up a recurrent state; losses use the
    rows from ``burn_in`` on. Sequences without such a row are never drawn. None: the policy's; 0
    without a policy."""
    stride: Count = 1
    """Every how many rows of an episode a sequence starts, at its first row and then every
    ``stride`` rows; priorities of other rows are ignored. At most ``unroll_len``."""
    start_columns: Annotated[Names | None, BY_PROGRAM] = None
    """Columns that are stored only at the rows where sequences start, such as the state of a
    recurrent policy. Samples have them as ``[n, …]``. None: those of the policy, if any."""
    follow_episodes: bool = False
    """Whether to follow episodes even if no other option needs it, for
    :meth:`TensorBuffer.steps_left`, :meth:`TensorBuffer.ahead` and
    :meth:`TensorBuffer.sample_future`."""
    store_next_obs: bool = True
    """If False, ``next_obs`` takes no memory where it equals the next row's ``obs``; samples have
    it in any case."""
    frame_stacks: Names = ()
    """Dotted paths of the leaves of ``obs`` that are stacks of frames ``[K, …]`` in each row, the
    newest frame last. Each frame is stored once, and samples have the complete stacks. Requires
    ``store_next_obs=False``."""
    transform: SampleTransform | None = dataclasses.field(default=None, repr=False)
    """Changes the rows of each sample."""
    storage: Path | None = None
    """A folder for memory-mapped files, for more rows than fit into memory; None: keep the rows in
    memory. The files have no names; they are gone when the buffer is closed, or its process ends.
    To keep rows, save the buffer's state."""
    device: str | None = None
    """Where to keep the rows, such as ``"cuda"``; they are drawn there, too, and rows of elsewhere
    are moved there. A device takes rows ``[T, E, …]``, always of the same envs, and has no
    ``follow_episodes``, ``frame_stacks``, ``transform``, ``storage`` and ``store_next_obs=False``.
    None: where the first rows are, or on the host, if they are on the CPU or an option is one of
    these."""
    seed: Annotated[Whole | None, BY_PROGRAM] = None
    """Seed of the buffer's random generator; None takes one from the system."""

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        if self.unroll_len is None:
            for name, is_set in (
                ("burn_in", bool(self.burn_in)),
                ("stride", self.stride > 1),
                ("start_columns", bool(self.start_columns)),
            ):
                if is_set:
                    raise ConfigError(f"{name} is an option of sequences; set unroll_len too")
        elif self.stride > self.unroll_len:
            raise ConfigError(
                f"stride must be at most unroll_len={self.unroll_len}, or rows between two "
                f"sequences are never learned from; got {self.stride}"
            )
        for path in self.frame_stacks:
            if path.partition(".")[0] != "obs":
                raise ConfigError(f"frame_stacks takes leaves of obs, such as 'obs', got {path!r}")
        if self.frame_stacks and self.store_next_obs:
            raise ConfigError(
                "frame_stacks stores each frame once, so next_obs must not be stored either; add "
                "store_next_obs=False"
            )


class TensorBuffer(TakesSettings[TensorBufferSettings], Closing):
    """A replay buffer that keeps the newest ``size`` rows, one preallocated array per leaf.

    The first push fixes the structure. Each row has a permanent index: the number of rows pushed
    before it. With ``n_step``, ``unroll_len``, ``follow_episodes`` or ``store_next_obs=False`` the
    buffer follows episodes: rows of one env with the same ``episode_id`` are consecutive steps,
    also across pushes, where ``next_obs`` of a row must equal ``obs`` of the following one.

    ``n_step``, ``discount``, ``burn_in`` and ``start_columns`` are the policy's unless they are
    given: a learner middleware passes them to :meth:`bind`.

    Methods hold a lock, so several threads may share a buffer.

    Args:
        settings: the options, each by keyword; see :class:`TensorBufferSettings`.

    Attributes:
        size: capacity in rows.
        generator: the buffer's random generator.
        sampler: draws the rows of a sample.
        n_step: the number of steps that a sampled ``reward`` sums over; 1 for plain transitions.
        discount: γ of the n-step sum; None: not known yet.
        burn_in: the number of rows at the beginning of a sequence that losses leave out.
        unroll_len: the number of rows of a sequence after its burn-in; None for single rows.

    Raises:
        ConfigError: if an option is not valid.
    """

    @takes_options(TensorBufferSettings)
    def __init__(self, settings: TensorBufferSettings) -> None:
        self.size = settings.size
        self._n_step_is_given = settings.n_step is not None
        self.discount = settings.discount
        self._lock = threading.RLock()
        self._closed = False
        self.generator = np.random.default_rng(settings.seed)
        self.unroll_len = settings.unroll_len
        self._knows_steps = settings.follow_episodes or settings.unroll_len is not None
        self.sampler: Sampler = settings.sampler or UniformSampler()
        self.sampler.attach(self.size)
        self._transform = settings.transform
        if settings.device is None:
            self._arrange(settings)
        else:
            self._move_to(settings)

    def _arrange(self, settings: TensorBufferSettings) -> None:
        """Take the options of an empty buffer; those that are None have no effect."""
        self._settings = settings
        self.n_step = settings.n_step or 1
        self.burn_in = settings.burn_in or 0
        unroll_len = settings.unroll_len
        # The number of rows that a sequence must have to be drawn.
        self._shortest = self.burn_in + (
            unroll_len if unroll_len and not settings.unroll_pad else 1
        )
        self._rows = RowRing(
            self.size,
            in_memory if settings.storage is None else mapped_to(settings.storage),
            linked=self.n_step > 1 or self._knows_steps or not settings.store_next_obs,
            store_next_obs=settings.store_next_obs,
            stride=settings.stride if self._knows_steps else None,
            start_columns=settings.start_columns or (),
            frame_stacks=settings.frame_stacks,
            needed=("reward",) if self.n_step > 1 else (),
            reserved=(
                "index",
                *self.sampler.adds,
                *(("discount",) if self.n_step > 1 else ()),
                *(("mask",) if unroll_len is not None else ()),
            ),
        )
        if self._transform is not None:
            self._transform.attach(self)

    def _move_to(self, settings: TensorBufferSettings) -> None:
        """Become an empty buffer of a device, which has another implementation."""
        from dmiddleware.data.device_buffer import DeviceBuffer

        implementation: Any = DeviceBuffer
        self.__class__ = implementation
        self._arrange(settings)

    def _lacking_on(self, settings: TensorBufferSettings) -> list[str]:
        """Return which of the options a buffer of a device does not have."""
        lacking = [name for name in _ON_HOST_ONLY if getattr(settings, name)]
        if not settings.store_next_obs:
            lacking.append("store_next_obs=False")
        sampler = self.sampler
        if isinstance(sampler, UniformSampler):
            return lacking if sampler.replace else [*lacking, "UniformSampler(replace=False)"]
        is_known = isinstance(sampler, PrioritySampler)
        return lacking if is_known else [*lacking, type(sampler).__name__]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a buffer with the same rows, priorities and random numbers.

        Raises:
            TypeError: if the rows are in files, which two buffers cannot share.
        """
        if self._settings.storage is not None:
            raise TypeError(
                f"a TensorBuffer with storage={str(self._settings.storage)!r} cannot be copied; "
                "build another one and load this one's state_dict() into it"
            )
        with self._lock:
            memo[id(self._lock)] = threading.RLock()
            copied = memo[id(self)] = object.__new__(type(self))
            vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def settings(self) -> dict[str, Any]:
        """Its options as plain values, with its class, its size and the options of its parts."""
        return {
            "type": type(self).__name__,
            **plain_values(self._settings),
            "n_step": self.n_step,
            "discount": self.discount,
            "burn_in": self.burn_in,
            "start_columns": list(self._settings.start_columns or ()),
            "sampler": _settings_of(self.sampler),
            "transform": None if self._transform is None else _settings_of(self._transform),
        }

    @property
    def lacks_priorities(self) -> bool:
        """Whether rows are drawn by priority, but no priority was ever set."""
        return isinstance(self.sampler, PrioritySampler) and self.sampler.lacks_priorities

    @property
    def reads_counters(self) -> bool:
        """Whether draws read the counters although no setting is a schedule: no."""
        return False

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings of the sampler that are schedules, by name."""
        return self.sampler.schedules if isinstance(self.sampler, PrioritySampler) else {}

    def bind(
        self,
        *,
        n_step: int,
        discount: float | None = None,
        burn_in: int | None = None,
        start_columns: Collection[str] = (),
    ) -> None:
        """Take options from the policy, and check that those that are set already are its own.

        Before the first push, options that were not given become the policy's: ``n_step``, and for
        sequences ``burn_in`` and ``start_columns``. The discount is also taken later. Learner
        middleware call this method. Binding again to the same values has no effect.

        If the first rows that are pushed have the column ``discount``, their rewards are already
        n-step returns, so the buffer does not sum them again: ``n_step`` is 1 then.

        Args:
            n_step: length of the policy's n-step returns.
            discount: the policy's γ; None if it has none, and then no n-step returns.
            burn_in: the policy's burn-in; None if it has none.
            start_columns: the columns that the policy needs only where sequences start.

        Raises:
            ConfigError: if the buffer has a different ``n_step``, ``discount`` or ``burn_in``, it
                lacks ``unroll_len`` for a policy with ``burn_in``, or its ``transform`` does not
                work with the policy's.
        """
        options: dict[str, Any] = {}
        if self.unroll_len is not None:
            options |= {"burn_in": burn_in, "start_columns": tuple(start_columns) or None}
        if discount is not None:
            options["n_step"] = checked("n_step", n_step, Count)
            discount = float(checked("discount", discount, Fraction))
        with self._lock:
            new = {} if self._has_structure else self._missing(options)
            if burn_in not in (None, self.burn_in, new.get("burn_in")):
                raise ConfigError(
                    f"the buffer has burn_in={self.burn_in}, but the policy has "
                    f"burn_in={burn_in}; build it with TensorBuffer(size, unroll_len=...) and "
                    "without burn_in, and push rows only after the learner is built"
                )
            if burn_in is not None and self.unroll_len is None:
                raise ConfigError(
                    "the policy learns from sequences, but the buffer draws single rows; build it "
                    "with TensorBuffer(size, unroll_len=...)"
                )
            if discount is not None:
                if "n_step" not in new:
                    self._compare("n_step", self.n_step, options["n_step"])
                self._compare("discount", self.discount, discount)
                self.discount = discount
            if new:
                self._arrange(dataclasses.replace(self._settings, **new))

    @property
    def _has_structure(self) -> bool:
        return self._rows.has_structure

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(_CLOSED)

    def _missing(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the policy's options that the buffer does not have yet."""
        return {
            name: value
            for name, value in options.items()
            if value is not None and getattr(self._settings, name) is None
        }

    def _compare(self, name: str, value: float | None, policy_value: float) -> None:
        # A buffer of single steps may hold rows whose n steps were summed before.
        if value not in (None, policy_value) and (name, value) != ("n_step", 1):
            raise ConfigError(
                f"the buffer has {name}={value}, but the policy has {name}={policy_value}; set it "
                f"in the policy's config, and build the buffer without {name}"
            )

    @property
    def nbytes(self) -> int:
        """Memory of the rows and their index structures, in bytes; zero before the first push."""
        return self._rows.nbytes

    @property
    def index(self) -> Ints:
        """The index of every row held, oldest first: int64 ``[len(buffer)]``."""
        with self._lock:
            return np.arange(self._rows.first, self._rows.total)

    def __len__(self) -> int:
        return self._rows.total - self._rows.first

    def count(self) -> int:
        """Return the number of rows held."""
        return len(self)

    def push(self, batch: Rows) -> range:
        """Append the rows of a batch; a full buffer drops its oldest rows.

        Args:
            batch: ``[N, …]``, or ``[T, E, …]`` if its ``done`` has two dimensions; or a list of
                transitions, each a batch or dictionary without leading dimensions.

        Returns:
            The indices of the rows stored, ascending; row ``(t, e)`` is number ``t * E + e``.
            If the batch is larger than the buffer, only its newest rows are stored.

        Raises:
            StructureError: if the structure of the batch differs from the first one, or the batch
                does not have a column that the buffer's options need; the buffer is unchanged.
        """
        with self._lock:
            if self._closed:
                raise ValueError(_CLOSED)
            if not self._rows.has_structure:
                batch = as_batch(batch)
                done, settings = batch.get("done"), self._settings
                if (
                    done is not None
                    and done.device.type != "cpu"
                    and done.dim() == 2
                    and not self._lacking_on(settings)
                ):
                    self._move_to(dataclasses.replace(settings, device=str(done.device)))
                    return self.push(batch)
                self._leave_returns(batch)
            first, n = self._rows.push(batch)
            self.sampler.pushed(first, n)
            if self._rows.starts is not None and n:
                index = np.arange(first, first + n)
                self.sampler.exclude(index[~self._rows.is_start(index)])
            return range(first, first + n)

    def sample(self, n: int) -> Batch:
        """Draw rows, as a batch of new tensors that the caller owns.

        Args:
            n: number of rows, or of sequences.

        Returns:
            ``[n, …]`` (``[L, n, …]`` with ``unroll_len``): the stored leaves; ``discount`` float32
            if ``n_step`` is above 1; ``mask`` with ``unroll_len``. In any case ``[n, …]``:
            ``index`` int64, the index of the (first) row; ``weight`` float32 if the sampler returns
            weights; ``start_columns``.

        Raises:
            NotEnoughData: if fewer than ``n`` rows can be drawn.
        """
        if type(n) is not int:
            n = checked("n", n, Count)
        with self._lock:
            eligible = self._eligible(n)
            index, weight = self.sampler.draw(n, eligible, self.generator)
            arrays = self._gather(index)
            arrays["index"] = index
            if weight is not None:
                arrays["weight"] = weight
            batch = _as_batch(arrays)
            return batch if self._transform is None else self._transform(batch, self)

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw several batches for as many updates in a row, with one copy for all of them.

        The batches are those that as many calls of :meth:`sample` would return. It is one batch if
        the next one may depend on what happens in between (priorities, a transform), and few if
        they are large.

        Args:
            n: number of rows, or of sequences, of each batch.
            at_most: the most batches to draw.
            counters: how far the run is, for a sampler with a schedule by progress.

        Returns:
            One to ``at_most`` batches, each as :meth:`sample` returns it.

        Raises:
            NotEnoughData: if fewer than ``n`` rows can be drawn.
        """
        sampler = self.sampler
        if counters is not None and isinstance(sampler, PrioritySampler):
            sampler.progress = counters.progress
        is_independent = isinstance(sampler, UniformSampler) or (
            isinstance(sampler, PrioritySampler) and sampler.alpha == 0.0
        )
        n_batches = 1
        if is_independent and self._transform is None and n > 0:
            length = 1 if self.unroll_len is None else self.burn_in + self.unroll_len
            n_fit = _BYTES_AHEAD // max(1, n * length * self._rows.row_nbytes)
            n_batches = min(n_fit, at_most)
        if n_batches <= 1:
            return [self.sample(n)]
        with self._lock:
            eligible = self._eligible(n)
            drawn = [sampler.draw(n, eligible, self.generator) for _ in range(n_batches)]
            index = np.stack([rows for rows, _ in drawn])
            arrays = self._gather(index)
            arrays["index"] = index
            weights = [weight for _, weight in drawn if weight is not None]
            if weights:
                arrays["weight"] = np.stack(weights)
            parts = {path: torch.from_numpy(array).unbind() for path, array in arrays.items()}
        build = nest if any("." in path or "%2" in path for path in parts) else as_tree
        return [
            build({path: leaves[number] for path, leaves in parts.items()})
            for number in range(n_batches)
        ]

    def get(self, index: Any, leaves: Collection[str] | None = None) -> Batch:
        """Copy rows by index, as they were pushed.

        Args:
            index: int64 ``[n]``.
            leaves: dotted paths of the leaves to copy; None copies all.

        Returns:
            ``[n, …]``

        Raises:
            IndexError: if a row is not held, or ``index`` does not consist of integers.
            KeyError: if a leaf does not exist.
        """
        with self._lock:
            rows = self._held_rows(index)
            for path in leaves or ():
                if path not in self._rows.paths:
                    raise KeyError(f"unknown leaf {path!r}; the leaves are {self._rows.paths}")
            return _as_batch(self._rows.take(rows, leaves))

    def steps_left(self, index: Any) -> torch.Tensor:
        """Return how many rows of its episode the buffer holds after each row.

        Args:
            index: int64 ``[n]``, rows that are held.

        Returns:
            int64 ``[n]``

        Raises:
            IndexError: if a row is not held, or ``index`` does not consist of integers.
            TypeError: if the buffer was built without ``unroll_len`` and ``follow_episodes``.
        """
        with self._lock:
            return torch.from_numpy(self._rows.steps_left(self._rows_of_episodes(index)))

    def ahead(self, index: Any, n_steps: Any) -> torch.Tensor:
        """Return the rows that are a number of steps later in the same episode.

        Args:
            index: int64 ``[n]``, rows that are held.
            n_steps: int64 ``[n]``, or one number for all; at most :meth:`steps_left`.

        Returns:
            Their indices, int64 ``[n]``; pass them to :meth:`get`.

        Raises:
            IndexError: if a row is not held, an episode does not reach so far, or the arguments do
                not consist of integers.
            TypeError: if the buffer was built without ``unroll_len`` and ``follow_episodes``.
        """
        with self._lock:
            rows = self._rows_of_episodes(index)
            steps = np.broadcast_to(as_index(n_steps), rows.shape)
            beyond = (steps < 0) | (steps > self._rows.steps_left(rows))
            if beyond.any():
                raise IndexError(
                    f"the known part of its episode has no row {steps[beyond][0]} steps after row "
                    f"{rows[beyond][0]}; see steps_left"
                )
            return torch.from_numpy(self._rows.ahead(rows, steps))

    def sample_future(self, index: Any) -> torch.Tensor:
        """Draw, for each row, one of the rows from it to the end of its episode's known part.

        Each of them, the row itself included, has the same probability. So ``next_obs`` of the
        drawn row is a state that was reached after the row: the strategy ``future`` of hindsight
        experience replay (Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017,
        section 4.5).

        Args:
            index: int64 ``[n]``, rows that are held.

        Returns:
            The indices of the drawn rows, int64 ``[n]``; pass them to :meth:`get`.

        Raises:
            IndexError: if a row is not held, or ``index`` does not consist of integers.
            TypeError: if the buffer was built without ``unroll_len`` and ``follow_episodes``.
        """
        with self._lock:
            rows = self._rows_of_episodes(index)
            n_later = self._rows.steps_left(rows) + 1
            n_steps = (self.generator.random(len(rows)) * n_later).astype(np.int64)
            return torch.from_numpy(self._rows.ahead(rows, n_steps))

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set priorities, for a :class:`~dmiddleware.data.PrioritySampler`.

        Args:
            index: int64 ``[n]``, from a sample. Rows that are no longer held, or at which no
                sequence starts, are skipped; if an index appears twice, its last priority counts.
            priority: ``[n]``, not negative, finite; usually the absolute TD errors.

        Returns:
            The number of rows whose priority was set.

        Raises:
            ValueError: if a priority is negative, infinite or NaN; nothing has changed.
            IndexError: if an index was never assigned, or is not an integer.
            TypeError: if the sampler does not use priorities.
        """
        with self._lock:
            rows, values = as_index(index), _as_floats(priority)
            if rows.shape != values.shape:
                raise ValueError(
                    f"index and priority need one number per row, got {len(rows)} indices and "
                    f"{len(values)} priorities"
                )
            if not self._are_all_held(rows):
                is_held = self._is_held(rows)
                rows, values = rows[is_held], values[is_held]
            if self._rows.starts is not None:
                starts = self._rows.is_start(rows)
                rows, values = rows[starts], values[starts]
            self.sampler.update_priority(rows, values)
            return len(rows)

    def clear(self) -> None:
        """Remove all rows; structure and memory stay, and indices continue to count."""
        with self._lock:
            self.sampler.cleared()
            self._rows.clear()

    def close(self) -> None:
        """Free the memory, and remove the folder of the storage if it is empty.

        It may be called twice.
        """
        with self._lock:
            self._closed = True
            self._rows.close()
            if self._settings.storage is not None:
                with suppress(OSError):  # it has other files, or is gone already
                    self._settings.storage.rmdir()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later samples depend on: rows, links, priorities, generator.

        It consists of copied arrays, numbers and strings, which ``save_checkpoint`` can write.
        """
        with self._lock:
            return self._state(live=False)

    @contextmanager
    def live_state(self) -> Iterator[dict[str, Any]]:
        """Give access to the state without a copy of the rows, to write it to a file.

        The rows share memory with the buffer, which other threads cannot use until the block ends::

            with buffer.live_state() as state:
                save_checkpoint("buffer.safetensors", state)

        They are in blocks, of which :class:`~dmiddleware.data.BlockFolder` writes only the new
        ones.
        """
        with self._lock:
            yield self._state(live=True)

    def _state(self, *, live: bool) -> dict[str, Any]:
        self._check_open()
        return {
            "rows": self._rows.state_dict(live=live),
            "sampler": self.sampler.state_dict(np.arange(self._rows.first, self._rows.total)),
            "sampler_type": type(self.sampler).__name__,
            "generator": generator_to_text(self.generator),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` or :meth:`live_state` returned.

        Later samples equal the original's.

        Raises:
            CheckpointMismatch: if this buffer has different options or a different structure.
        """
        with self._lock:
            self._check_open()
            device = state.get("device") if isinstance(state, Mapping) else None
            if device is not None and not self._rows.has_structure:
                _check_resumed(device)
                self._move_to(dataclasses.replace(self._settings, device=device))
                self.load_state_dict(state)
                return
            check_state("TensorBuffer", state, ("rows", "sampler", "sampler_type", "generator"))
            self._check_sampler_of(state)
            if not self._rows.has_structure:
                self._leave_returns(state["rows"].get("leaves", ()))
            self._rows.load_state_dict(state["rows"])
            rows = np.arange(self._rows.first, self._rows.total)
            self.sampler.load_state_dict(state["sampler"], rows)
            self.generator = generator_from_text(state["generator"])

    def _check_sampler_of(self, state: Mapping[str, Any]) -> None:
        sampler_type = type(self.sampler).__name__
        if state["sampler_type"] != sampler_type:
            raise CheckpointMismatch(
                f"the state comes from a buffer with a {state['sampler_type']}, but this one "
                f"has a {sampler_type}; build it with the same options"
            )

    def _leave_returns(self, columns: Container[str]) -> None:
        """Leave the rewards of the first rows as they are if they are n-step returns already."""
        if "discount" in columns and self.n_step > 1 and not self._n_step_is_given:
            self._arrange(dataclasses.replace(self._settings, n_step=1))

    def _eligible(self, n: int) -> Eligible:
        """Return the rows that can be drawn, or raise an error if they are fewer than ``n``."""
        if self._closed:
            raise ValueError(_CLOSED)
        rows = self._rows
        count = len(self) if rows.starts is None else len(rows.starts)
        if n > count or n < 1:
            raise _not_enough(n, count, len(self))
        accept = self._begins_sequence if self._shortest > 1 else None
        return Eligible(rows.first, count, rows.total, self.size, index=rows.starts, accept=accept)

    def _gather(self, index: Ints) -> dict[str, Array]:
        extra: dict[str, Array] = {}
        if self.unroll_len is not None:
            extra |= self._rows.take_at_starts(index)
            index, extra["mask"] = self._sequences(index)
        n_step = self.n_step
        if n_step == 1:
            return self._rows.take(index) | extra
        if self.discount is None:
            raise ConfigError(
                f"this buffer sums rewards over n_step={n_step} steps, but has no discount; "
                "build it with discount=policy.discount, or call buffer.bind(...) first"
            )
        window = n_step_returns(
            index,
            self._rows.successor,
            lambda rows: self._rows.take(rows, ("reward",))["reward"],
            n_step=n_step,
            discount=self.discount,
        )
        extra["reward"], extra["discount"] = window.ret, window.discount
        ends = {p for p in self._rows.paths if p.partition(".")[0] in LAST_STEP_COLUMNS}
        at_start = set(self._rows.paths) - ends - {"reward"}
        return self._rows.take(index, at_start) | self._rows.take(window.last, ends) | extra

    def _begins_sequence(self, index: Ints) -> npt.NDArray[np.bool_]:
        begins: npt.NDArray[np.bool_] = self._rows.steps_left(index) >= self._shortest - 1
        return begins

    def _sequences(self, start: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return the rows of the sequences that start at rows ``[…, n]``, with their mask.

        Both are ``[…, L, n]``; after the last known row of an episode, it is repeated.
        """
        assert self.unroll_len is not None
        length = self.burn_in + self.unroll_len
        n_steps = np.arange(length)[:, None]
        n_left = self._rows.steps_left(start)[..., None, :]
        return self._rows.ahead(start[..., None, :], np.minimum(n_steps, n_left)), n_steps <= n_left

    def _rows_of_episodes(self, index: Any) -> Ints:
        if not self._knows_steps:
            raise TypeError(
                "this buffer does not know the steps of its episodes; build it with "
                "follow_episodes=True"
            )
        return self._held_rows(index)

    def _held_rows(self, index: Any) -> Ints:
        rows = as_index(index)
        gone = rows[~self._is_held(rows)]
        if len(gone):
            raise IndexError(
                f"row {gone[0]} is no longer held; the oldest row is {self._rows.first}"
            )
        return rows

    def _are_all_held(self, index: Ints) -> bool:
        """Return quickly whether all of these rows (at least one) are certainly held."""
        if not len(index):
            return False
        # As unsigned numbers, indices before the first one are greater than the last one.
        age = (index - self._rows.first).view(np.uint64)
        return bool(np.maximum.reduce(age) < self._rows.total - self._rows.first)

    def _is_held(self, index: Ints) -> npt.NDArray[np.bool_]:
        if len(index) and (index.min() < 0 or index.max() >= self._rows.total):
            raise IndexError(
                f"{self._rows.total} rows have been pushed, so indices are 0 … "
                f"{self._rows.total - 1}, but got {index.min()} … {index.max()}"
            )
        is_held: npt.NDArray[np.bool_] = index >= self._rows.first
        return is_held


def _check_resumed(device: str) -> None:
    try:
        usable_device(device)
    except ConfigError as error:
        raise CheckpointMismatch(
            f"the rows of this state were on {device}, which this machine does not have; resume "
            "the run on one that has it, or build the buffer with device='cpu'"
        ) from error


def _as_batch(arrays: Mapping[str, Array]) -> Batch:
    return nest({path: torch.from_numpy(array) for path, array in arrays.items()})


def _as_floats(values: Any) -> npt.NDArray[np.float64]:
    if isinstance(values, torch.Tensor) and values.dtype is torch.bfloat16:
        values = values.float()  # from an autocast loss; numpy does not have this dtype
    array = to_array(values).astype(np.float64)
    return array if array.ndim == 1 else array.reshape(-1)


def _not_enough(n: int, count: int, held: int) -> Exception:
    if n < 1:
        return ValueError(f"n must be at least 1, got {n}")
    where = f"the buffer holds {held}"
    if count != held:
        where += f", of which {count} can be drawn"
    return NotEnoughData(
        f"asked for {n} rows, but {where}; push {n - count} more before sampling, or sample fewer"
    )


def _settings_of(part: Sampler | SampleTransform) -> dict[str, Any]:
    return {"type": type(part).__name__, **plain_values(getattr(part, "settings", {}))}
