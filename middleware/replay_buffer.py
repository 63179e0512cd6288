"""Replay buffers in a chain: push collected data and set its priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from dmiddleware.data import ReplayBuffer
from dmiddleware.errors import StructureError
from dmiddleware.settings import TakesSettings, takes_options
from dmiddleware.tree import Batch, as_tree, with_columns
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.part_name import PartSettings
from middleware.support.replay import check_buffer
from middleware.support.rows import rows_of

__all__ = [
    "DataPusher",
    "DataPusherSettings",
    "PriorityCalculator",
]


class DataPusherSettings(PartSettings):
    """The options of :class:`DataPusher`."""

    what: Literal["trajectories", "episodes", "train_data"] = "trajectories"
    """Push trajectories, episodes one after the other, or what an estimator made of them."""


class DataPusher(BaseMiddleware[OnlineRLContext], TakesSettings[DataPusherSettings]):
    """Push collected data into a buffer.

    A column ``priority`` (see :class:`~middleware.PriorityCalculator`) sets the priorities of the
    new rows and is not stored.

    Args:
        buffer: a :class:`~dmiddleware.data.TensorBuffer`, or another
            :class:`~dmiddleware.data.ReplayBuffer`.
        settings: the options, each by keyword; see :class:`DataPusherSettings`.

    Reads:
        ctx.trajectories, ctx.episodes or ctx.train_data: the data collected in this step; None if
        an exchange pauses collecting to keep its pace.

    Raises:
        ConfigError: if ``buffer`` is not a buffer, or an option is not valid.
        StructureError: from the buffer, if a batch differs in structure from the first one.
    """

    roles = (Role.LEARNER,)

    settings: DataPusherSettings

    @takes_options(DataPusherSettings)
    def __init__(self, buffer: ReplayBuffer, settings: DataPusherSettings) -> None:
        check_buffer(buffer)
        self._buffer = buffer
        self.reads = (settings.what,)
        self.fills = (buffer,)
        self.settings = settings
        self.snapshot_parts = {"buffer": buffer}

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Push."""
        push: Any = self._buffer.push
        if self.settings.what == "episodes":
            push = getattr(self._buffer, "push_episode", push)
            batches = [rows_of(episode, name="ctx.episodes") for episode in ctx.episodes or ()]
        else:
            is_estimated = self.settings.what == "train_data"
            collected: object = ctx.train_data if is_estimated else ctx.trajectories
            if collected is None or (isinstance(collected, list) and not collected):
                return
            batches = [collected if isinstance(collected, Batch) else rows_of(collected)]
        for batch in batches:
            priority = batch.get("priority")
            if priority is None:
                push(batch)
                continue
            rows = {name: column for name, column in batch.items() if name != "priority"}
            index = push(as_tree(rows))
            # Of more rows than fit, only the newest were stored.
            self._buffer.update_priority(np.asarray(index), priority.flatten()[-len(index) :])


class PriorityCalculator(BaseMiddleware[OnlineRLContext]):
    """Add a column ``priority`` to the collected transitions, their first priorities in the buffer.

    Args:
        priority_fn: takes the trajectories ``[T, E, …]`` and returns their priorities ``[T, E]``,
            positive.

    Reads:
        ctx.trajectories: the transitions collected in this step.

    Writes:
        ctx.trajectories: with the column ``priority`` float32.

    Raises:
        StructureError: if the priorities have another shape than the rows.
    """

    roles = (Role.COLLECTOR,)
    reads = ("trajectories",)
    writes = ("trajectories",)

    @takes_options(PartSettings)
    def __init__(
        self, priority_fn: Callable[[Batch], torch.Tensor], settings: PartSettings
    ) -> None:
        self.settings = settings
        self._priority_fn = priority_fn

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Calculate."""
        rows = rows_of(ctx.trajectories)
        with torch.no_grad():
            priority = self._priority_fn(rows)
        if priority.shape != rows["done"].shape:
            raise StructureError(
                f"priority_fn returned priorities of shape {tuple(priority.shape)} for rows of "
                f"shape {tuple(rows['done'].shape)}; return one number per row"
            )
        ctx.trajectories = with_columns(rows, priority=priority.float())
