"""Policies written for all environments at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from dmiddleware.data.batch import Batch, Value, map_leaves
from dmiddleware.errors import PolicyError
from dmiddleware.policy.base.collate import (
    collate,
    collate_values,
    join_inputs,
    split_outputs,
    to_rows,
)
from dmiddleware.policy.base.policy import Policy, to_be_written

__all__ = ["BatchedPolicy"]


class BatchedPolicy(Policy):
    """A policy whose methods take and return batches.

    A subclass writes ``_forward_learn`` and, for collecting and evaluating,
    ``_forward_collect_batch(obs, env_id, **kwargs)`` and ``_forward_eval_batch(…)``: ``obs`` is a
    tensor or treetensor ``[E, …]``, ``env_id`` an int64 array ``[E]``, and the result a dictionary
    of tensors ``[E, …]`` with at least ``action``. Collectors store everything that
    ``_forward_collect_batch`` returns. ``_get_train_batch(batch)`` turns a collected batch into
    training data; by default it returns the batch unchanged.

    The per-env methods are derived from these, so per-env workers run the policy too.

    Example:
        >>> import torch
        >>> class Upright(BatchedPolicy):
        ...     def _forward_eval_batch(self, obs, env_id):
        ...         return {"action": (obs[:, 2] > 0).long()}
        >>> policy = Upright(model=torch.nn.Identity(), enable_field=["eval"])
        >>> policy.eval_mode.forward(torch.ones(2, 4))
        {'action': tensor([1, 1])}
        >>> policy.eval_mode.forward({7: torch.ones(4)})
        {7: {'action': tensor(1)}}
    """

    batched: ClassVar[bool] = True
    _required: ClassVar[dict[str, str]] = {
        **Policy._required,
        "collect": "_forward_collect_batch",
        "eval": "_forward_eval_batch",
    }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for per_env, remedy in _INSTEAD.items():
            if per_env in vars(cls):
                raise PolicyError(
                    f"{cls.__name__} defines {per_env}, which a BatchedPolicy never calls; "
                    f"{remedy}, or derive from Policy"
                )

    @to_be_written
    def _forward_collect_batch(
        self, obs: Value, env_id: np.ndarray, **kwargs: Any
    ) -> dict[str, Any]:
        """Act while collecting: observations ``[E, …]`` in, ``{"action": [E, …], …}`` out."""
        raise NotImplementedError

    @to_be_written
    def _forward_eval_batch(self, obs: Value, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        """Act greedily: observations ``[E, …]`` in, ``{"action": [E, …]}`` out."""
        raise NotImplementedError

    def _get_train_batch(self, batch: Batch) -> Batch:
        """Turn a collected batch ``[T, E, …]``, or an episode ``[T, …]``, into training data."""
        return batch

    def _get_trajectory_batch(self, batch: Batch) -> Batch:
        """Turn a trajectory ``[T, 1, …]`` that a worker hands over as a list into training data.

        Such workers do no more than this with it, while in a chain the buffer or an estimator
        computes n-step returns and advantages. By default it is ``_get_train_batch``.
        """
        return self._get_train_batch(batch)

    def _forward_collect(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        return self._split("collect", self._forward_collect_batch, data, kwargs)

    def _forward_eval(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        return self._split("eval", self._forward_eval_batch, data, kwargs)

    def _get_train_sample(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        columns = map_leaves(lambda leaf: leaf.unsqueeze(1), collate(transitions))
        batch = self._get_trajectory_batch(columns)
        if batch is columns:
            return transitions
        return to_rows(map_leaves(lambda leaf: leaf.flatten(0, 1), batch))

    def _split(
        self,
        field: str,
        forward: Callable[..., dict[str, Any]],
        data: Mapping[int, Any],
        kwargs: dict[str, Any],
    ) -> dict[int, dict[str, Any]]:
        """Run a batched forward on per-env data."""
        env_ids = list(data)
        obs = self._as_obs(collate_values(list(data.values()), "obs"))
        inputs = self._as_inputs(join_inputs(kwargs, env_ids))
        obs = self._as_seen(obs, collecting=field == "collect")
        return split_outputs(forward(obs, np.array(env_ids), **inputs), env_ids)


_INSTEAD = {
    "_forward_collect": "write _forward_collect_batch(self, obs, env_id, **kwargs)",
    "_forward_eval": "write _forward_eval_batch(self, obs, env_id, **kwargs)",
    "_process_transition": "return what is to be stored from _forward_collect_batch",
    "_get_train_sample": "write _get_train_batch(self, batch)",
}
