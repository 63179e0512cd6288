"""Running the update of a policy: compiling, schedules, the check for values that are not finite.

Also what an update returns: its outputs, and priorities for rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch

from dmiddleware.distributed import GradientReducer, broadcast_model
from dmiddleware.errors import (
    DMiddlewareError,
    NonFiniteLoss,
    PolicyOutputError,
    StructureError,
)
from dmiddleware.policy.captured import CapturedFunction
from dmiddleware.policy.compiled import CompiledFunction
from dmiddleware.policy.component import Component, broken_weights, take_flag
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import (
    Batch,
    Columns,
    Value,
    items_of,
    leaves,
    map_leaves,
    with_columns,
)

__all__ = [
    "CHECK_EVERY",
    "UpdateOutput",
    "UpdateRunner",
    "check_columns",
    "is_update",
    "late_stops",
    "may_be_update",
    "non_finite_error",
    "priorities_of_rows",
    "standard_columns",
    "update_outputs",
]

CHECK_EVERY: Final = 100
"""Updates between two looks at whether steps on a GPU were skipped."""
_FLAGS: Final = frozenset(("done", "terminated", "truncated", "is_first", "mask"))
_SEEN: Final = frozenset(("obs", "next_obs"))


class UpdateOutput(MutableMapping[str, Any]):
    """The output of an update on a GPU, whose scalars are read when one of them is asked for.

    Reading waits for the GPU, so loggers that look at every hundredth output let the updates
    between them run without a pause.

    Args:
        output: scalars and other tensors, and Python numbers.
        look: called once after the scalars have been read.

    Attributes:
        on_stop: called once if ``kl_stop`` turns out to be true.
    """

    on_stop: Callable[[], None] | None = None

    def __init__(self, output: Mapping[str, Any], look: Callable[[], None]) -> None:
        self._scalars = [key for key, value in output.items() if _is_scalar(value)]
        self._packed = torch.stack([output[key].detach().float() for key in self._scalars])
        self._values = dict(output)
        self._look: Callable[[], None] | None = look

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not _is_scalar(value):
            return value
        self._read()
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    @property
    def may_stop(self) -> bool:
        """Whether it has a ``kl_stop`` that was not read yet."""
        return _is_scalar(self._values.get("kl_stop"))

    def _read(self) -> None:
        self._take(self._packed.tolist())
        self._look_once()

    def _take(self, scalars: Sequence[float]) -> None:
        numbers = zip(self._scalars, scalars, strict=True)
        may_stop = self.may_stop
        self._values |= {key: number for key, number in numbers if key in self._values}
        if may_stop:
            self._values["kl_stop"] = bool(self._values["kl_stop"])
            if self._values["kl_stop"] and self.on_stop is not None:
                self.on_stop()

    def _look_once(self) -> None:
        if self._look is not None:
            look, self._look = self._look, None
            look()

    @staticmethod
    def read_together(outputs: Sequence[UpdateOutput]) -> None:
        """Read the scalars of several outputs in one transfer."""
        scalars = iter(torch.cat([output._packed for output in outputs]).tolist())
        for output in outputs:
            output._take(list(itertools.islice(scalars, len(output._packed))))
        outputs[-1]._look_once()


class UpdateRunner:
    """Runs a policy's update, and prepares the components for it.

    Args:
        update: ``(columns, **drawn)`` to what is logged.
        components: the policy's.
        schedules: the settings that may be schedules, by path.
        device: the policy's.
        compiles: whether to compile the update; ``"graphs"`` also replays it as a CUDA graph, with
            the moves of target networks. On the CPU it is the compiled update.
        reducer: averages gradients over the ranks; None: there are none.
        in_model: the components that belong to the model, by name, with their paths in it.
        user: the policy's name, for messages.

    Attributes:
        not_finite: a float32 scalar on the device, 1 after a step whose loss was not finite.
        present: the settings that are schedules, with their present values. Values that change are
            scalars on the device, because a compiled update would not see a number change.
    """

    def __init__(
        self,
        update: Callable[..., dict[str, Any]],
        components: Mapping[str, Component[Any]],
        schedules: Mapping[str, Schedule],
        *,
        device: str,
        compiles: bool | Literal["graphs"],
        reducer: GradientReducer | None,
        in_model: Mapping[str, str],
        user: str,
    ) -> None:
        self._update = update
        self._components = components
        self._schedules = schedules
        self._on_gpu = device != "cpu"
        self._user = user
        self._compiled = CompiledFunction(update, user=f"{user}.update") if compiles else None
        self._captured: CapturedFunction | None = None
        self._n_outputs = 0
        self.not_finite = torch.zeros((), device=device)
        self._changing = {
            path: torch.tensor(schedule.start, device=device)
            for path, schedule in schedules.items()
            if not schedule.is_constant
        }
        self.present: list[tuple[Schedule, float | torch.Tensor]] = [
            (schedule, self._changing.get(path, schedule.start))
            for path, schedule in schedules.items()
        ]
        for name, component in components.items():
            if reducer is None or not component.is_module:
                component.prepare(not_finite=self.not_finite)
                continue
            if name not in in_model:
                broadcast_model(component.module)
            component.prepare(not_finite=self.not_finite, reducer=reducer)
        trained = [
            component for component in components.values() if component.optimizer is not None
        ]
        learned = [path for name, path in in_model.items() if components[name] in trained]
        if reducer is not None and learned != [""]:
            reducer.close()  # its hooks expect that each backward reaches the whole model
        self._rates = [component for component in trained if component.schedule is not None]
        self._targets = [
            (component, component.target_rule.every)
            for component in components.values()
            if component.target_rule is not None
        ]
        if compiles == "graphs":
            for name, component in components.items():
                component.require_capturable(name)
            self._captured = CapturedFunction(self._update_and_move, device, user=f"{user}.update")
        self._first = trained[0] if trained else None
        # Their logged values; the learning rate is that of the optimizer.
        self._scheduled = {
            path: schedule.start
            for path, schedule in schedules.items()
            if not path.startswith("learning_rate")
        }

    def run(
        self,
        columns: Columns,
        drawn: Mapping[str, Any],
        *,
        n_made: int,
        counters: Counters,
        batch: Batch,
    ) -> Mapping[str, Any]:
        """Make one update, and move the target networks whose turn it is.

        Args:
            columns: what the update learns from.
            drawn: what it takes in addition.
            n_made: updates before this one.
            counters: what else schedules read.
            batch: the columns before observations were normalized, for an error.

        Returns:
            The output in Python numbers; on a GPU they are read when they are asked for.

        Raises:
            NonFiniteLoss: if a step was skipped. A GPU is not waited for: see
                :meth:`check_skipped`.
        """
        if self._rates or self._changing:
            self._follow_schedules(counters._replace(update=n_made))
        moved = [component for component, every in self._targets if (n_made + 1) % every == 0]
        if self._captured is None:
            output = (self._compiled or self._update)(columns, **drawn)
        else:
            output = self._captured(columns, drawn, moved)
        if not self._on_gpu and self.not_finite.item():
            self.not_finite.zero_()
            raise non_finite_error(output, batch, self._components, user=self._user)
        if moved and (self._captured is None or "kl_stop" in output) and not output.get("kl_stop"):
            for component in moved:
                # On a GPU also while steps are skipped, towards weights that do not change.
                component.move_target()
        if self._first is not None:
            output["cur_lr"] = self._first.learning_rate
        output = {**self._scheduled, **output}
        if self._on_gpu:
            return self._output_on_gpu(output)
        if "kl_stop" in output:
            output["kl_stop"] = bool(output["kl_stop"])
        return {key: value.item() if _is_scalar(value) else value for key, value in output.items()}

    def _update_and_move(
        self, columns: Columns, drawn: Mapping[str, Any], moved: Sequence[Component[Any]]
    ) -> dict[str, Any]:
        """Make one update and move targets, except after an update that may have been skipped."""
        assert self._compiled is not None
        output = self._compiled(columns, **drawn)
        if "kl_stop" not in output:
            for component in moved:
                component.move_target()
        return output

    def forget_captured(self) -> None:
        """Capture updates again, because a state was loaded."""
        if self._captured is not None:
            self._captured.forget()

    def _follow_schedules(self, counters: Counters) -> None:
        for component in self._rates:
            assert component.schedule is not None
            component.learning_rate = component.schedule.at(counters)
        for path, value in self._changing.items():
            now = self._schedules[path].at(counters)
            value.fill_(now)
            if path in self._scheduled:
                self._scheduled[path] = now

    def _output_on_gpu(self, output: dict[str, Any]) -> UpdateOutput:
        self._n_outputs += 1
        if self._n_outputs % CHECK_EVERY == 0:
            self.check_skipped()
        return UpdateOutput(output, self.check_skipped)

    def check_skipped(self) -> None:
        """Raise if a step was skipped since the last check.

        Raises:
            NonFiniteLoss: saying what to do.
        """
        if take_flag(self.not_finite):
            raise NonFiniteLoss(
                broken_weights(self._components)
                or "a loss or the norm of a gradient was NaN or infinite in one of the last "
                f"{CHECK_EVERY} updates; its step and all later ones were skipped. Check "
                "observations and rewards for NaN, lower the learning rate or clip gradients"
            )


def non_finite_error(
    output: Mapping[str, Any], batch: Batch, components: Mapping[str, Component[Any]], *, user: str
) -> DMiddlewareError:
    """Return the error for a batch whose loss or gradient is not finite.

    Args:
        output: of the update.
        batch: what it learned from.
        components: the policy's.
        user: the policy's name, for the message.
    """
    broken = broken_weights(components)
    if broken is not None:
        return NonFiniteLoss(broken)
    problem = _what_is_bad(output)
    if any(len(leaf) == 0 for _, leaf in leaves(batch)):
        return StructureError(f"{problem}, since the batch has no rows; {user} needs at least one")
    source = "a batch without a column collect_iter"
    if "collect_iter" in batch:
        column = batch["collect_iter"]
        source = f"a batch collected at train_iter {int(column.min())} to {int(column.max())}"
    odd = _first_odd_value(batch)
    if odd is not None:
        source = f"{source}, {odd}"
    n_trained = sum(component.optimizer is not None for component in components.values())
    outcome = (
        "the parameters were not changed"
        if n_trained <= 1
        else "its step and those of the components that step later in this update were skipped"
    )
    return NonFiniteLoss(
        f"{problem} on {source}; {outcome}. "
        "Check observations and rewards for NaN, lower the learning rate or clip gradients"
    )


def check_columns(needed: Sequence[str], columns: Batch | Mapping[str, Any], *, user: str) -> None:
    """Refuse a batch that lacks columns.

    Args:
        needed: the columns that learning needs.
        columns: the batch, or one sample.
        user: the policy's name, for the message.

    Raises:
        StructureError: naming what it lacks, and what it has.
    """
    missing = [column for column in needed if column not in columns]
    if missing:
        raise StructureError(
            f"{user} learns from the columns {', '.join(needed)}, but the batch lacks "
            f"{', '.join(missing)}; it has {', '.join(map(str, columns))}"
        )


def standard_columns(batch: Batch) -> Batch:
    """Return the columns of a batch in the types that updates have; those that fit as they are.

    Numbers are float32, and flags are bool, also in data that was made by hand or stored in other
    types. Observations are left to the networks, which convert them, and integers stay integers.
    """
    changed = {}
    for name, column in items_of(batch):
        if name in _SEEN or isinstance(column, list):
            continue
        standard = _standard(name, column)
        if standard is not column:
            changed[name] = standard
    return with_columns(batch, **changed) if changed else batch


def _standard(name: str, column: Value) -> Value:
    if isinstance(column, Batch):
        if all(_standard(name, leaf) is leaf for _, leaf in leaves(column)):
            return column
        return map_leaves(lambda leaf: _standard(name, leaf), column)
    if name in _FLAGS:
        return column if column.dtype == torch.bool else column != 0
    if column.dtype != torch.float32 and (column.is_floating_point() or name == "reward"):
        return column.float()
    return column


def _what_is_bad(output: Mapping[str, Any]) -> str:
    for key, value in output.items():
        if _is_scalar(value) and not value.isfinite():
            return f"{key} is {value.item()}"
    return "a loss or gradient is not finite"


def _first_odd_value(batch: Batch) -> str | None:
    """Name the first value of a batch that is NaN or infinite; None: there is none."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            bad = (~leaf.isfinite()).nonzero()
            if len(bad):
                place = bad[0].tolist()
                return f"whose column {path!r} has {leaf[tuple(place)].item()} at {place}"
    return None


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def update_outputs(
    answer: object, *, user: str = "the policy's forward in learn mode"
) -> list[dict[str, Any]]:
    """Return the outputs that a learn mode's ``forward`` returned, as a list.

    Args:
        answer: what it returned.
        user: its name, for the message.

    Raises:
        PolicyOutputError: if it returned anything but a dictionary or a list of dictionaries.
    """
    outputs = answer if isinstance(answer, list | tuple) else [answer]
    for output in outputs:
        if not isinstance(output, Mapping):
            raise PolicyOutputError(
                f"{user} returned {output!r:.100}; it must return a dictionary of numbers to log, "
                "such as {'total_loss': 0.1} from update, or a list of them, one per update"
            )
    return list(outputs)


def is_update(output: Mapping[str, Any]) -> bool:
    """Return whether an output counts as an update: one with ``kl_stop`` does not.

    With ``kl_stop`` the policy reports that it skipped the update.
    """
    return not output.get("kl_stop")


def may_be_update(output: Mapping[str, Any]) -> bool:
    """Return :func:`is_update`, or True while only the GPU knows; see :func:`late_stops`."""
    may_stop = isinstance(output, UpdateOutput) and output.may_stop
    return may_stop or not output.get("kl_stop")


def late_stops(outputs: Sequence[Mapping[str, Any]]) -> int:
    """Find out how many outputs seemed to be updates and were none; waits once for a GPU."""
    unread = [item for item in outputs if isinstance(item, UpdateOutput) and item.may_stop]
    if not unread:
        return 0
    UpdateOutput.read_together(unread)
    return sum(not is_update(output) for output in unread)


def priorities_of_rows(
    outputs: Sequence[Mapping[str, Any]], n_rows: int
) -> tuple[torch.Tensor | None, Any] | None:
    """Join the priorities in the outputs of one forward, and find the rows that they are for.

    The ``priority`` of an output has one value for each row in its ``priority_index``. Without
    ``priority_index``, it has one for each row of the batch, or for each row after the rows of the
    previous output. If a row gets several values, the last one counts.

    Args:
        outputs: the outputs, in order.
        n_rows: number of rows in the batch.

    Returns:
        The rows, int64 ``[k]`` (None: all, in order), and their priorities ``[k]``; None without
        priorities.

    Raises:
        PolicyOutputError: if it is unclear which rows the priorities are for.
    """
    with_priority = [output for output in outputs if output.get("priority") is not None]
    if not with_priority:
        return None
    last = with_priority[-1]
    if "priority_index" not in last and len(last["priority"]) == n_rows:
        return None, last["priority"]
    parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    start = 0
    for output in with_priority:
        n = len(output["priority"])
        if "priority_index" in output:
            rows = np.asarray(torch.as_tensor(output["priority_index"]).cpu(), np.int64)
            if len(rows) != n or (n and not 0 <= rows.min() <= rows.max() < n_rows):
                raise PolicyOutputError(
                    f"priority_index must list a row of the batch (0 to {n_rows - 1}) for each of "
                    f"the {n} priorities, got {rows.tolist()!r:.100}"
                )
        elif n == n_rows:
            rows = np.arange(n_rows)
        else:
            rows = np.arange(start, start + n)
            start += n
        parts.append(rows)
    if start not in (0, n_rows):
        sizes = ", ".join(str(len(output["priority"])) for output in with_priority)
        raise PolicyOutputError(
            f"the policy returned {sizes} priorities for a batch of {n_rows} rows; return one "
            "priority per row, or add priority_index, the row of the batch for each priority"
        )
    newest = np.full(n_rows, -1)
    every = np.concatenate(parts)
    newest[every] = np.arange(len(every))
    rows = np.flatnonzero(newest >= 0)
    priority = torch.cat(
        [torch.as_tensor(output["priority"]).detach().cpu() for output in with_priority]
    )
    return torch.from_numpy(rows), priority[torch.from_numpy(newest[rows])]
