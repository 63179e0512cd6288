"""The rows of a TensorBuffer, in a ring of preallocated columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.data.ring.episode_table import EpisodeTable, SequenceStarts
from dmiddleware.data.ring.frame_stacks import FrameStacks
from dmiddleware.data.ring.row_links import NONE, EpisodeLinks, Pushed, SideTable
from dmiddleware.data.ring.storage import Allocate
from dmiddleware.data.samplers import Ints
from dmiddleware.errors import CheckpointMismatch, StructureError
from dmiddleware.files.schema import Array, Leaf, Rows, Schema, as_batch, lead_of, same_rows
from dmiddleware.files.serialization import StateBlock
from dmiddleware.tree import Batch

__all__ = ["RowRing"]

_Structure: TypeAlias = EpisodeLinks | EpisodeTable | SequenceStarts | SideTable | FrameStacks

Bools: TypeAlias = npt.NDArray[np.bool_]

_NEXT = "next_obs"

# A snapshot writes a whole block again if one of its rows is new: the number of blocks in a ring,
# and the fewest bytes that are worth a file.
_BLOCKS = 128
_SMALLEST_BLOCK = 2**18

_log = logging.getLogger(__name__)


class RowRing:
    """A ring that holds the newest ``size`` rows.

    A row is identified by its index: the number of rows pushed before it. Its ``obs`` is what was
    acted on, and its ``next_obs`` what followed.

    Attributes:
        has_structure: whether the first push has fixed the structure of the rows.

    Args:
        size: capacity in rows.
        allocate: returns an array of zeros for ``(name, shape, dtype)``.
        linked: whether to link consecutive rows of an episode, by the columns ``episode_id`` and
            ``done``.
        store_next_obs: whether ``next_obs`` is stored in full. If not, it is read from the
            following row's ``obs``; rows that have no following row yet, or a different ``obs``
            there, keep theirs in a side table. Requires ``linked``.
        stride: if given, every how many rows of an episode a sequence starts; keeps a table of the
            steps of every episode. Requires ``linked``.
        start_columns: columns that are stored only at rows where a sequence starts.
        frame_stacks: leaves of ``obs`` whose frames are stored once. Requires
            ``store_next_obs=False``.
        needed: leaves that a pushed batch must have.
        reserved: keys that no pushed batch may have.
    """

    def __init__(
        self,
        size: int,
        allocate: Allocate,
        *,
        linked: bool,
        store_next_obs: bool,
        stride: int | None = None,
        start_columns: Collection[str] = (),
        frame_stacks: Collection[str] = (),
        needed: Collection[str] = (),
        reserved: Collection[str] = (),
    ) -> None:
        self.size = size
        self.first = 0
        self.total = 0
        self.row_nbytes = 0  # of a row as it is pushed
        self._allocate = allocate
        self._linked = linked
        self._store_next_obs = store_next_obs
        self._stride = stride
        self._start_columns = frozenset(start_columns)
        self._frame_stacks = frozenset(frame_stacks)
        self._needed = (
            *needed,
            *(("episode_id", "done") if linked else ()),
            *sorted(self._start_columns),
        )
        self._reserved = reserved
        self._schema: Schema | None = None
        self.has_structure = False
        # Of the leaves that every row has, [size, …] by path.
        self._columns: dict[str, Array] = {}
        self._links: EpisodeLinks | None = None
        self._episodes: EpisodeTable | None = None
        self._starts: SequenceStarts | None = None
        self._side: SideTable | None = None
        self._stacks: FrameStacks | None = None
        self._at_starts: SideTable | None = None
        # Of as many rows, from slot 0 on, the states are saved together.
        self._block_size = size
        # Renewed when other rows take the indices of those that were held.
        self._history = object()
        self._has_warned = False
        # Rows from here on were pushed since the ring was restored.
        self._restored = 0
        # Leaves of next_obs that can be compared with obs of the following row.
        self._compared: list[str] = []

    @property
    def paths(self) -> list[str]:
        """Dotted paths of the leaves that every row has; empty before the first push."""
        return [path for path in self._leaves() if _root(path) not in self._start_columns]

    @property
    def nbytes(self) -> int:
        """Memory of columns and index structures, in bytes; zero before the first push."""
        structures = (*self._columns.values(), *self._structures())
        return sum(structure.nbytes for structure in structures)

    def push(self, batch: Rows) -> tuple[int, int]:
        """Append a batch ``[N, …]``, or ``[T, E, …]`` if its ``done`` has two dimensions.

        Returns:
            The index of the first of its rows that is held now, and their number.

        Raises:
            StructureError: if the batch differs in structure from the first one, or does not have a
                column that the buffer's options need; nothing has changed.
        """
        if type(batch) is not Batch:
            batch = as_batch(batch)
        lead = lead_of(batch)
        schema = self._schema
        if schema is None:
            schema = Schema.of(batch, len(lead))
            self._check(schema)
        rows = schema.arrays(batch, lead)
        if self._schema is None:
            self._set_up(schema)
        n_pushed = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        first, size = self.total, self.size
        n = n_pushed
        newest = rows
        if n_pushed > size:
            n = size
            newest = {path: array[n_pushed - n :] for path, array in rows.items()}
        if first + n_pushed - size > self.first:
            self.drop_before(first + n_pushed - size)
        self.total = total = first + n_pushed
        if n:
            self._store(newest, total - n, n)
        if self._links is not None and n_pushed:
            self._link(self._links, rows, first, lead)
        return total - n, n

    def take(self, index: Ints, paths: Collection[str] | None = None) -> dict[str, Array]:
        """Copy rows that are held.

        Args:
            index: int64, of any shape.
            paths: the leaves to copy; None copies all.

        Returns:
            New arrays ``[*index.shape, …]`` by path.
        """
        slots = index if self.total <= self.size else index % self.size
        columns = self._columns
        if paths is not None:
            columns = {path: column for path, column in columns.items() if path in paths}
        stacks = self._stacks
        arrays = {
            path: column.take(slots, axis=0)
            if stacks is None or path not in stacks.paths
            else stacks.take(path, index)
            for path, column in columns.items()
        }
        if self._side is not None:
            self._take_next_obs(self._side, arrays, index, paths)
        return arrays

    def successor(self, index: Ints) -> Ints:
        """Return the rows that follow, -1 where there is none (yet); any shape."""
        assert self._links is not None  # options that follow episodes switch links on
        return self._links.of(index)

    def steps_left(self, index: Ints) -> Ints:
        """Return how many rows of its episode follow each row; any shape."""
        assert self._episodes is not None  # options that need it have a stride
        return self._episodes.steps_left(index)

    def ahead(self, index: Ints, n_steps: Ints) -> Ints:
        """Return the rows that are ``n_steps <= steps_left`` later; the shapes are broadcast."""
        assert self._episodes is not None  # as above
        return self._episodes.ahead(index, n_steps)

    @property
    def starts(self) -> Ints | None:
        """The rows that are held at which sequences start, ascending; None if these are all."""
        return None if self._starts is None else self._starts.index

    def is_start(self, index: Ints) -> Bools:
        """Return whether sequences start at rows; any shape."""
        if self._starts is None:
            return np.ones(index.shape, np.bool_)
        assert self._episodes is not None and self._stride is not None  # as there are starts
        starts: Bools = self._episodes.step(index) % self._stride == 0
        return starts

    def take_at_starts(self, index: Ints) -> dict[str, Array]:
        """Copy the columns that are stored only where sequences start."""
        table = self._at_starts
        if table is None:
            return {}
        return {path: table.get(path, index % self.size) for path in table.paths}

    def drop_before(self, first: int) -> None:
        """Remove the rows before ``first``."""
        last = min(first, self.total)
        if self._stacks is not None and self._links is not None:
            index = np.arange(self.first, last)
            self._stacks.drop(index, self._links.of(index), first=first)
        if self._episodes is not None:
            self._episodes.drop(self.first, last)
        if self._starts is not None:
            self._starts.drop_before(first)
        self.first = first

    def clear(self) -> None:
        """Remove all rows; structure and memory stay, and indices continue to count."""
        self.first = self.total
        for structure in self._structures():
            structure.clear()

    def close(self) -> None:
        """Free the memory; may be called twice."""
        self.first = self.total
        self._columns.clear()
        self._links = self._episodes = self._starts = None
        self._side = self._at_starts = self._stacks = None

    def state_dict(self, *, live: bool = False) -> dict[str, Any]:
        """Return all rows that are held, in blocks, and their links.

        Args:
            live: whether the blocks share memory with this ring, and change with it, instead of
                copies; they are :class:`StateBlock` then.
        """
        return {
            **self._options(),
            "first": self.first,
            "total": self.total,
            "leaves": {path: str(leaf.dtype.str) for path, leaf in self._leaves().items()},
            "shapes": {path: list(leaf.shape) for path, leaf in self._leaves().items()},
            "tails": None if self._links is None else self._links.tails(),
            "blocks": [self._block_state(rows, live=live) for rows in self._blocks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if the buffer has different options or a different structure.
        """
        if "blocks" not in state:
            raise CheckpointMismatch(
                "the rows of this buffer were saved by an earlier version of dmiddleware, in "
                "another form; begin with an empty buffer, and load the policy's checkpoint instead"
            )
        for option, value in self._options().items():
            if state.get(option) != value:
                raise CheckpointMismatch(
                    f"the state comes from a buffer with {option}={state.get(option)}, but this "
                    f"one has {value}; build it with the same options"
                )
        if state["leaves"]:
            self._load_structure(state)
        self.clear()
        self._history = object()
        self.first, self.total = state["first"], state["total"]
        self._restored = self.total
        if not state["leaves"]:
            return  # the state of a buffer before its first push
        for block in state["blocks"]:
            columns = {path: np.asarray(column) for path, column in block["columns"].items()}
            self._write(columns, block["start"], block["stop"] - block["start"])
        if self._links is not None:
            self._load_links(self._links, state)

    def _blocks(self) -> Iterator[range]:
        """Yield the rows that are held, in blocks, oldest first.

        The slots of a block are one stretch. They are always the same, apart from those of the
        oldest and the newest block, so that a push changes few blocks.
        """
        start = self.first
        while start < self.total:
            slot = start % self.size
            end = min(slot - slot % self._block_size + self._block_size, self.size)
            stop = min(start + end - slot, self.total)
            yield range(start, stop)
            start = stop

    def _block_state(self, rows: range, *, live: bool) -> dict[str, Any]:
        columns = partial(self._columns_of, rows, copy=not live)
        links = None if self._links is None else partial(self._links_of, self._links, rows)
        state: dict[str, Any] = {"start": rows.start, "stop": rows.stop}
        if live:  # columns never change; links do, when the next step arrives
            state["columns"] = StateBlock(columns, key=(self._history, rows))
            state["links"] = links and StateBlock(links)
        else:
            state["columns"], state["links"] = columns(), links and links()
        return state

    def _columns_of(self, rows: range, *, copy: bool) -> dict[str, Array]:
        start = rows.start % self.size
        views = {path: array[start : start + len(rows)] for path, array in self._columns.items()}
        return {path: view.copy() for path, view in views.items()} if copy else views

    def _links_of(self, links: EpisodeLinks, rows: range) -> dict[str, Any]:
        """Return what is known of rows, apart from the columns."""
        index = np.arange(rows.start, rows.stop)
        slots = index % self.size
        state: dict[str, Any] = {"successor": links.of(index)}
        if self._episodes is not None:
            state["step"] = self._episodes.step(index)
        return {**state, **{name: table.state_dict(slots) for name, table in self._kept().items()}}

    def _kept(self) -> dict[str, SideTable | FrameStacks]:
        """Return the tables of what only some rows have, by name."""
        tables = {"side": self._side, "at_starts": self._at_starts, "stacks": self._stacks}
        return {name: table for name, table in tables.items() if table is not None}

    def _load_links(self, links: EpisodeLinks, state: Mapping[str, Any]) -> None:
        links.load_tails(state["tails"])
        index = np.arange(self.first, self.total)
        loaded = [block["links"] for block in state["blocks"]]
        links.load(index, _joined(block["successor"] for block in loaded))
        if self._episodes is not None:
            self._episodes.load(index, _joined(block["step"] for block in loaded), links.of(index))
        if self._starts is not None:
            self._starts.push(index[self.is_start(index)])
        if self._stacks is not None:
            self._stacks.link(index, links.of(index))
        for block in state["blocks"]:
            slots = np.arange(block["start"], block["stop"]) % self.size
            for name, table in self._kept().items():
                table.load(block["links"][name], slots)

    def _structures(self) -> list[_Structure]:
        """Return everything except the columns."""
        structures = (
            self._links,
            self._episodes,
            self._starts,
            self._side,
            self._at_starts,
            self._stacks,
        )
        return [structure for structure in structures if structure is not None]

    def _options(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "linked": self._linked,
            "store_next_obs": self._store_next_obs,
            "stride": self._stride,
            "start_columns": sorted(self._start_columns) or None,
            "frame_stacks": sorted(self._frame_stacks) or None,
        }

    def _leaves(self) -> dict[str, Leaf]:
        return {} if self._schema is None else self._schema.leaves

    def _load_structure(self, state: Mapping[str, Any]) -> None:
        schema = Schema(
            [
                Leaf(path, tuple(state["shapes"][path]), np.dtype(dtype))
                for path, dtype in state["leaves"].items()
            ]
        )
        if self._schema is None:
            self._set_up(schema)
        elif schema.leaves != self._schema.leaves:
            raise CheckpointMismatch(
                "the rows of the state have other leaves than this buffer's rows; load it into a "
                "new buffer"
            )

    def _check(self, schema: Schema) -> None:
        reserved = sorted({_root(path) for path in schema.leaves} & set(self._reserved))
        if reserved:
            raise StructureError(
                f"the batch has a column {', '.join(reserved)}, but the buffer adds a column of "
                "that name to its samples; rename or remove it"
            )
        for name in self._needed:
            if not schema.below(name):
                raise StructureError(
                    f"this buffer's options need the columns {', '.join(self._needed)}, but the "
                    f"batch has no {name}; add it, or leave out n_step, unroll_len, start_columns, "
                    "follow_episodes and store_next_obs=False"
                )
        for name in ("episode_id", "done") if self._linked else ():
            if schema.leaves[name].shape:
                raise StructureError(
                    f"{name} must be one number per row, but is {schema.leaves[name]}"
                )
        reward = schema.leaves.get("reward")
        is_team = "obs.agent_mask" in schema.leaves  # maybe of one agent
        if reward is not None and reward.shape == (1,) and not is_team:
            raise StructureError(
                "reward has the shape [N, 1], but done has [N], and losses would combine every "
                "row with every other; push reward.squeeze(-1)"
            )
        if not self._store_next_obs:
            _check_next_obs(schema)
        for path in self._frame_stacks:
            if path not in schema.leaves or len(schema.leaves[path].shape) < 2:
                actual = schema.leaves.get(path, "missing")
                raise StructureError(
                    f"frame_stacks names the leaf {path!r}, which must be a stack of frames "
                    f"[K, …] in each row, but is {actual}"
                )

    def _set_up(self, schema: Schema) -> None:
        stored = schema if self._store_next_obs else schema.without(_NEXT)
        for name in self._start_columns:
            stored = stored.without(name)
        stacked = [schema.leaves[path] for path in sorted(self._frame_stacks)]
        frames = [Leaf(leaf.path, leaf.shape[1:], leaf.dtype) for leaf in stacked]
        self._columns |= {
            leaf.path: self._allocate(leaf.path, (self.size, *leaf.shape), leaf.dtype)
            for leaf in (*stored.leaves.values(), *frames)
        }
        self._schema = schema
        self.has_structure = True
        width = max(1, sum(column.nbytes for column in self._columns.values()) // self.size)
        self._block_size = max(-(-self.size // _BLOCKS), _SMALLEST_BLOCK // width, 1)
        sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in schema.leaves.values()]
        self.row_nbytes = sum(sizes)
        if self._linked:
            self._links = EpisodeLinks(self.size)
            self._compared = [
                leaf.path
                for leaf in schema.below(_NEXT)
                if str(schema.leaves.get(_obs_path(leaf.path))) == str(leaf)
            ]
        if self._stride is not None:
            self._episodes = EpisodeTable(self.size)
            self._starts = SequenceStarts() if self._stride > 1 else None
        if not self._store_next_obs:
            self._side = SideTable(self.size, schema.below(_NEXT))
        if stacked:
            self._stacks = FrameStacks(self.size, stacked, self._columns)
        if self._start_columns:
            at_starts = [
                leaf for name in sorted(self._start_columns) for leaf in schema.below(name)
            ]
            self._at_starts = SideTable(self.size, at_starts)

    def _store(self, rows: Mapping[str, Array], first: int, n: int) -> None:
        if len(self._columns) < len(rows):
            rows = {path: rows[path] for path in self._columns}
        for path in self._frame_stacks:
            rows = {**rows, path: rows[path][:, -1]}
        self._write(rows, first, n)
        for side in (self._side, self._at_starts):
            if side is not None:
                side.free(np.arange(first, first + n) % self.size)

    def _write(self, rows: Mapping[str, Array], first: int, n: int) -> None:
        """Write ``n <= size`` rows, the first of which has the index ``first``."""
        start = first % self.size
        until_end = self.size - start
        for path, array in rows.items():
            column = self._columns[path]
            if n <= until_end:
                column[start : start + n] = array
            else:
                column[start:], column[: n - until_end] = array[:until_end], array[until_end:]

    def _link(
        self, links: EpisodeLinks, rows: Mapping[str, Array], first: int, lead: tuple[int, ...]
    ) -> None:
        shape = lead if len(lead) == 2 else (*lead, 1)
        entered = links.push(
            first,
            rows["episode_id"].astype(np.int64, copy=False).reshape(shape),
            rows["done"].astype(np.bool_, copy=False).reshape(shape),
            oldest=self.first,
            continues=partial(self._continues, rows, first),
        )
        if self._episodes is not None:
            self._number_steps(self._episodes, links, entered, rows, first)
        if self._stacks is not None:
            index = np.arange(max(first, self.total - self.size), self.total)
            self._stacks.push(first, rows, index, links.of(index), entered)
        if self._side is not None:
            self._keep_next_obs(self._side, links, rows, first)
            self._release(self._side, entered)

    def _number_steps(
        self,
        episodes: EpisodeTable,
        links: EpisodeLinks,
        entered: Pushed,
        rows: Mapping[str, Array],
        first: int,
    ) -> None:
        """Enter new rows in the table of episodes; keep what is stored only at starts."""
        index = np.arange(max(first, self.total - self.size), self.total)
        episodes.push(int(index[0]), links.of(index), entered)
        starts = index
        if self._starts is not None:
            starts = index[self.is_start(index)]
            self._starts.push(starts)
        if self._at_starts is not None:
            at_starts = {path: rows[path][starts - first] for path in self._at_starts.paths}
            self._at_starts.put(starts % self.size, at_starts)

    def _continues(self, rows: Mapping[str, Array], first: int, tail: Ints, head: Ints) -> Bools:
        """Return whether ``next_obs`` of each tail is ``obs`` of its head, bit for bit.

        Episode ids alone are not enough, because two data sources may use the same ids.
        """
        same = np.ones(len(tail), np.bool_)
        if not self._compared or not len(tail):
            return same
        inner = tail >= first
        n_inner = np.count_nonzero(inner)
        old: Any = slice(None) if n_inner == 0 else ~inner
        new: Any = slice(None) if n_inner == len(tail) else inner
        for path in self._compared:
            obs = rows[_obs_path(path)]
            if n_inner < len(tail):
                before = self._next_obs_of_tails(path, tail[old] % self.size)
                same[old] &= same_rows(before, obs[head[old] - first])
            if n_inner:
                same[new] &= same_rows(rows[path][tail[new] - first], obs[head[new] - first])
        if not same.all():
            self._report_gaps(rows["episode_id"].reshape(-1)[head - first], tail, ~same)
        return same

    def _report_gaps(self, episode_id: Ints, tail: Ints, gap: Bools) -> None:
        """Log which rows do not continue those of their episode that are held."""
        # A restart loses the rows that were collected since the snapshot.
        restart = gap & (tail < self._restored)
        if restart.any():
            _log.info(
                "%d episodes, such as episode_id %d, lack the steps between the state that was "
                "restored and the first rows since then; their parts are separate episodes",
                np.count_nonzero(restart), episode_id[restart][0],
            )  # fmt: skip
        others = gap & ~restart
        if others.any() and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rows pushed with episode_id %d do not continue the rows of that id before them: "
                "obs differs from the last next_obs, as if steps between them were left out, or "
                "two collectors used the same ids. They are treated as separate episodes; push "
                "every step, and give every episode a unique id",
                episode_id[others][0],
            )

    def _next_obs_of_tails(self, path: str, slots: Ints) -> Array:
        if self._side is not None:  # an open tail always has its next_obs there
            return self._side.get(path, slots)
        return self._columns[path].take(slots, axis=0)

    def _keep_next_obs(
        self, side: SideTable, links: EpisodeLinks, rows: Mapping[str, Array], first: int
    ) -> None:
        """Keep ``next_obs`` of new rows that have no successor, or one that differs."""
        start = max(first, self.total - self.size)
        index = np.arange(start, self.total)
        successor = links.of(index)
        keep = successor == NONE
        linked = np.flatnonzero(~keep)
        here, there = index[linked] - first, successor[linked] - first
        for path in side.paths:
            same = same_rows(rows[path][here], rows[_obs_path(path)][there])
            keep[linked[~same]] = True
        rows_kept = index[keep]
        side.put(
            rows_kept % self.size, {path: rows[path][rows_kept - first] for path in side.paths}
        )

    def _release(self, side: SideTable, entered: Pushed) -> None:
        """Remove the side-table rows of open tails whose successor has arrived."""
        slots = entered.tail % self.size
        obs = self.take(entered.head, [_obs_path(path) for path in side.paths])
        same = np.ones(len(slots), np.bool_)
        for path in side.paths:
            same &= same_rows(side.get(path, slots), obs[_obs_path(path)])
        side.free(slots[same])

    def _take_next_obs(
        self,
        side: SideTable,
        taken: dict[str, Array],
        index: Ints,
        paths: Collection[str] | None,
    ) -> None:
        assert self._links is not None  # as there is a side table
        chosen = [path for path in side.paths if paths is None or path in paths]
        if not chosen:
            return
        # Without a successor any row will do, and the side table has next_obs.
        successor = self._links.of(index)
        successor = np.where(successor == NONE, index, successor)
        obs = self.take(successor, [_obs_path(path) for path in chosen])
        for path in chosen:
            taken[path] = obs[_obs_path(path)]
            side.overlay(path, index % self.size, taken[path])


def _check_next_obs(schema: Schema) -> None:
    obs, following = schema.below("obs"), schema.below(_NEXT)
    here = {leaf.path.removeprefix("obs"): str(leaf) for leaf in obs}
    there = {leaf.path.removeprefix(_NEXT): str(leaf) for leaf in following}
    if not here or here != there:
        raise StructureError(
            "store_next_obs=False reads next_obs from obs, so both must have the same leaves, but "
            f"obs has {here} and next_obs has {there}"
        )


def _joined(parts: Iterable[Any]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _obs_path(path: str) -> str:
    return "obs" + path.removeprefix(_NEXT)


def _root(path: str) -> str:
    return path.partition(".")[0]
