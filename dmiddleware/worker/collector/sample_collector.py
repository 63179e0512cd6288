"""A serial collector that returns a number of training samples."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.worker.collector.serial_collector import (
    SERIAL_COLLECTOR_REGISTRY,
    RolloutSerialCollector,
    Transition,
)
from dmiddleware.worker.collector.transitions import (
    check_fruitful,
    plain_samples,
    samples_of,
    split_rows,
    to_tensor_transitions,
    trajectory_length,
)

__all__ = ["SampleSerialCollector"]


@SERIAL_COLLECTOR_REGISTRY.register("sample")
class SampleSerialCollector(RolloutSerialCollector):
    """Collects training samples.

    The transitions of each env are gathered until its episode ends or they reach the policy's
    trajectory length (``unroll_len``, at least an even share of ``n_sample``; no limit with
    ``traj_len_inf``). Then ``get_train_sample`` turns them into samples. Gathered transitions are
    kept between calls.

    Args:
        cfg: see :class:`ISerialCollector`.
        env: an env manager.
        policy: a policy, or its collect mode.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gathered: dict[int, list[Transition]] = defaultdict(list)
        self._extra: list[Transition] = []

    @property
    def n_extra(self) -> int:
        """Samples that the last call cut off; the next call returns them first."""
        return len(self._extra)

    def collect(  # type: ignore[override]
        self,
        n_sample: int | None = None,
        train_iter: int = 0,
        drop_extra: bool = True,
        random_collect: bool = False,
        record_random_collect: bool = True,
        policy_kwargs: Mapping[str, Any] | None = None,
        level_seeds: Sequence[int] | Mapping[int, int] | None = None,
    ) -> list[Transition]:
        """Collect training samples.

        Args:
            n_sample: number of samples; None takes the policy's ``n_sample``.
            train_iter: the policy's iteration, stored in each transition as ``collect_iter``.
            drop_extra: return exactly ``n_sample``, and keep the rest for the next call. False
                returns the rest too.
            random_collect: act at random.
            record_random_collect: whether logs count what was collected at random.
            policy_kwargs: passed to the policy's forward.
            level_seeds: the seed of each env, a list or a dictionary by env id, stored in its
                transitions as ``seed``. Samples kept from earlier calls without seeds are dropped,
                and counted.

        Raises:
            ConfigError: if ``n_sample`` is not set or not positive, or if ``level_seeds`` does not
                have one seed per env.
            PolicyOutputError: if the policy returns something other than its interface says, or its
                ``get_train_sample`` returned no samples for 10,000 trajectories in a row.
        """
        target = self._target(n_sample, "n_sample", self.policy)
        core = self._core()
        seeds = None if level_seeds is None else _checked_seeds(level_seeds, core.env_num)
        if seeds is not None:
            self._drop_without_seeds()
        began, before = time.perf_counter(), (core.env_step, core.env_episode)
        traj_len = trajectory_length(self.policy, target, core.env_num)
        samples = self._extra  # extended in place: nothing is lost if a step raises
        n_kept = len(samples)
        returns: list[float] = []
        n_fruitless = 0
        while len(samples) < target:
            rows, env_ids = core.collect_step(
                train_iter=train_iter,
                policy_kwargs=policy_kwargs,
                random=random_collect,
            )
            returns += core.episode_returns
            for env, row in zip(env_ids.tolist(), split_rows(rows), strict=True):
                if seeds is not None:
                    row["seed"] = torch.tensor(seeds[env])
                found = self._take(env, row, traj_len)
                if found is None:
                    continue
                samples += found
                n_fruitless = 0 if found else n_fruitless + 1
                check_fruitful(n_fruitless)
        n_made = len(samples) - n_kept
        n_taken = target if drop_extra else len(samples)
        samples, self._extra = samples[:n_taken], samples[n_taken:]
        is_recorded = record_random_collect or not random_collect
        self._count_since(before, began, n_made, returns, is_recorded=is_recorded)
        if is_recorded:
            self._log(train_iter, {"extra_sample_count": self.n_extra})
        return samples

    def _drop_without_seeds(self) -> None:
        """Drop what earlier calls collected without ``level_seeds``."""
        n_kept = len(self._extra)
        self._extra = [sample for sample in self._extra if "seed" in sample]
        self._n_dropped += n_kept - len(self._extra)
        for gathered in self._gathered.values():
            if gathered and "seed" not in gathered[0]:
                self._n_dropped += len(gathered)
                gathered.clear()

    def _take(self, env: int, row: Transition, traj_len: float) -> list[Transition] | None:
        """Add a transition to its env's trajectory; return its samples if it is complete."""
        gathered = self._gathered[env]
        if gathered and gathered[-1]["episode_id"] != row["episode_id"]:
            # The env failed, so its trajectory stays unfinished.
            self._n_dropped += len(gathered)
            gathered.clear()
        gathered.append(row)
        if not row["done"] and len(gathered) < traj_len:
            return None
        self._gathered[env] = []
        trajectory = to_tensor_transitions(gathered, not self._cfg.deepcopy_obs)
        samples: list[Transition] = self.policy.get_train_sample(self._finished(trajectory))
        return samples

    def _drop_unfinished(self) -> None:
        self._n_dropped += sum(map(len, self._gathered.values()))
        self._gathered.clear()
        self._extra = []

    def state_dict(self) -> dict[str, Any]:
        """Return totals, extra samples, gathered transitions, and the state of the envs."""
        gathered = {str(env): plain_samples(rows) for env, rows in self._gathered.items()}
        return {**super().state_dict(), "extra": plain_samples(self._extra), "gathered": gathered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned.

        If the envs' state cannot be restored, transitions of unfinished episodes are dropped, and
        counted.
        """
        super().load_state_dict(state)
        self._extra = samples_of(state["extra"])
        self._gathered.clear()
        for env, rows in state["gathered"].items():
            self._gathered[int(env)] = samples_of(rows)


def _checked_seeds(level_seeds: Sequence[int] | Mapping[int, int], env_num: int) -> Sequence[int]:
    """Return the seed of each env.

    Raises:
        ConfigError: if there is not one seed per env.
    """
    seeds: Any = level_seeds
    if isinstance(level_seeds, Mapping) and set(level_seeds) == set(range(env_num)):
        seeds = [level_seeds[env] for env in range(env_num)]
    if isinstance(seeds, Mapping) or np.shape(seeds) != (env_num,):
        raise ConfigError(
            f"level_seeds must be a list of {env_num} seeds, one per env, or a dictionary with the "
            f"env ids from 0 to {env_num - 1}, got {level_seeds!r:.100}"
        )
    checked: Sequence[int] = seeds
    return checked
