"""A serial collector that hands out a number of training samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmiddleware.data import as_tree, to_dict
from dmiddleware.errors import ConfigError
from dmiddleware.worker.collector.serial_collector import (
    SERIAL_COLLECTOR_REGISTRY,
    ISerialCollector,
    Transition,
)
from dmiddleware.worker.collector.transitions import split_rows, to_tensor_transitions

__all__ = ["SampleSerialCollector"]


@SERIAL_COLLECTOR_REGISTRY.register("sample")
class SampleSerialCollector(ISerialCollector):
    """Collects training samples.

    Each env's transitions gather until its episode ends or they are as many as the policy's
    trajectory length (``unroll_len``, at least an even share of ``n_sample``; no limit with
    ``traj_len_inf``); then ``get_train_sample`` makes samples of them. What has gathered stays from
    call to call.

    Args:
        cfg: see :class:`ISerialCollector`.
        env: an env manager.
        policy: a policy, or its collect mode.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: tells collectors apart in logs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gathered: dict[int, list[Transition]] = defaultdict(list)
        self._extra: list[Transition] = []

    @property
    def n_extra(self) -> int:
        """Samples that the last call cut off; the next call hands them out first."""
        return len(self._extra)

    def collect(  # type: ignore[override]
        self,
        n_sample: int | None = None,
        train_iter: int = 0,
        drop_extra: bool = True,
        random_collect: bool = False,
        record_random_collect: bool = True,
        policy_kwargs: Mapping[str, Any] | None = None,
        level_seeds: Sequence[int] | None = None,
    ) -> list[Transition]:
        """Collect training samples.

        Args:
            n_sample: how many; None: the policy's ``n_sample``.
            train_iter: the policy's iteration, stamped on each transition as ``collect_iter``.
            drop_extra: return exactly ``n_sample``; what is over is kept for the next call. False:
                return what is over too.
            random_collect: act at random.
            record_random_collect: False: leave what was collected at random out of the logs.
            policy_kwargs: given to the policy's forward.
            level_seeds: the seed of each env, marked on its transitions as ``seed``.

        Raises:
            ConfigError: if ``n_sample`` is given nowhere or not positive, or if there is not one
                of ``level_seeds`` per env.
        """
        target = self._target(n_sample, "n_sample")
        core = self._core()
        if level_seeds is not None and np.shape(level_seeds) != (core.env_num,):
            raise ConfigError(
                f"level_seeds must be a list of {core.env_num} seeds, one per env, "
                f"got {level_seeds!r:.100}"
            )
        began, before = time.perf_counter(), (core.env_step, core.env_episode)
        traj_len = self._traj_len(target, core.env_num)
        samples = self._extra  # which they stay part of, should a step raise
        n_kept = len(samples)
        returns: list[float] = []
        while len(samples) < target:
            rows, env_ids = core.collect_step(
                train_iter=train_iter,
                policy_kwargs=policy_kwargs,
                random=random_collect,
            )
            returns += core.episode_returns
            for env, row in zip(env_ids.tolist(), split_rows(rows), strict=True):
                if level_seeds is not None:
                    row["seed"] = torch.tensor(level_seeds[env])
                samples += self._take(env, row, traj_len)
        n_made = len(samples) - n_kept
        n_taken = target if drop_extra else len(samples)
        samples, self._extra = samples[:n_taken], samples[n_taken:]
        is_recorded = record_random_collect or not random_collect
        self._count(before, began, n_made, returns, is_recorded=is_recorded)
        if is_recorded:
            self._log(train_iter, {"extra_sample_count": self.n_extra})
        return samples

    def _take(self, env: int, row: Transition, traj_len: float) -> list[Transition]:
        """Add a transition to its env's trajectory; return samples if that is complete."""
        gathered = self._gathered[env]
        if gathered and gathered[-1]["episode_id"] != row["episode_id"]:
            # The env failed: its unfinished trajectory leads nowhere.
            self._n_dropped += len(gathered)
            gathered.clear()
        gathered.append(row)
        if not row["done"] and len(gathered) < traj_len:
            return []
        self._gathered[env] = []
        trajectory = to_tensor_transitions(gathered, not self._cfg.deepcopy_obs)
        samples: list[Transition] = self.policy.get_train_sample(self._finished(trajectory))
        return samples

    def _traj_len(self, target: int, env_num: int) -> float:
        cfg = self.policy.get_attribute("cfg")
        if cfg.traj_len_inf:
            return math.inf
        unroll_len = cfg.get("unroll_len") or cfg.get("collect", {}).get("unroll_len") or 1
        return max(unroll_len, math.ceil(target / env_num))

    def _drop_unfinished(self) -> None:
        self._n_dropped += sum(map(len, self._gathered.values()))
        self._gathered.clear()
        self._extra = []

    def state_dict(self) -> dict[str, Any]:
        """Return totals, extra samples, gathered transitions, and the state of the envs."""
        gathered = {str(env): _plain(rows) for env, rows in self._gathered.items()}
        return {**super().state_dict(), "extra": _plain(self._extra), "gathered": gathered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the collector was that gave ``state``.

        Where the envs' state cannot be restored, what gathered of unfinished episodes is dropped,
        and counted.
        """
        super().load_state_dict(state)
        self._extra = _samples(state["extra"])
        self._gathered.clear()
        for env, rows in state["gathered"].items():
            self._gathered[int(env)] = _samples(rows)


def _plain(samples: list[Transition]) -> list[Transition]:
    return [{key: to_dict(value) for key, value in sample.items()} for sample in samples]


def _samples(plain: list[Transition]) -> list[Transition]:
    return [
        {k: as_tree(v) if isinstance(v, Mapping) else v for k, v in sample.items()}
        for sample in plain
    ]
