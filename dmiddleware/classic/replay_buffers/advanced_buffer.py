"""AdvancedReplayBuffer: priorities, limits on use and staleness, and rate control."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from easydict import EasyDict

from dmiddleware.classic.buffer_middleware import (
    PriorityExperienceReplay,
    check_priority,
    staleness_check,
    use_time_check,
)
from dmiddleware.classic.config import (
    Option,
    Range,
    at_least,
    check_value,
    count,
    fraction,
    positive,
    whole,
)
from dmiddleware.classic.deque_buffer import BufferedData
from dmiddleware.classic.replay_buffers.rate_limit import RateLimit
from dmiddleware.classic.replay_buffers.replay_buffer import IBuffer
from dmiddleware.errors import NotEnoughData

__all__ = ["AdvancedReplayBuffer"]

_ADDED_TO_UPDATES = 1e-5
_ADDED_TO_ALL = 1e-12  # so small that it only makes items of priority 0 drawable
_INFINITE = float("inf")


def _up_from(least: float) -> Range:
    return Range(
        f"a number ≥ {least:g}, or inf",
        lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        ),
    )


class AdvancedReplayBuffer(IBuffer):
    """A buffer that draws by priority, and limits use, staleness and rates.

    Items are dictionaries. Sampled ones are shallow copies with further keys:

    - ``replay_unique_id``: ``<instance>_<n>``; no two items of a buffer have the same.
    - ``replay_buffer_idx``: the position in the buffer.
    - ``priority``, and ``IS``: the importance weight, ``(N·P)^-beta`` divided by the largest of the
      batch.
    - ``use``: how often the item has been sampled, this time included.
    - ``staleness``: the learner's iteration minus the item's ``collect_iter`` (of several, the
      smallest); -1 if it has none.

    An item's priority is its own ``priority``, or the highest so far, at first 1. It is drawn in
    proportion to ``priority ** alpha``; the draws of a batch are stratified.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.
    """

    config: ClassVar[dict[str, Any]] = {
        "replay_buffer_size": 4096,
        "max_use": Option(_INFINITE, _up_from(1), "how often an item is sampled before it goes"),
        "max_staleness": Option(
            _INFINITE, _up_from(1), "the staleness at which an item goes, in training iterations"
        ),
        "alpha": Option(0.6, at_least(0), "how strongly priorities count; 0 draws uniformly"),
        "beta": Option(0.4, fraction, "how much of the bias the weights correct at first"),
        "anneal_step": Option(100_000, whole, "samples over which beta rises to 1; 0 keeps it"),
        "thruput_controller": {
            "push_sample_rate_limit": {
                "min": Option(0, at_least(0), "fewest items pushed for each one sampled"),
                "max": Option(_INFINITE, _up_from(0), "most items pushed for each one sampled"),
            },
            "window_seconds": Option(
                30, positive, "time in which the counts of the rate decay to a hundredth, in s"
            ),
            "sample_min_limit_ratio": Option(
                1, positive, "items that must be held, as a multiple of the sample's size"
            ),
        },
        "monitor": {
            "sampled_data_attr": {
                "average_range": Option(5, count, "samples over which attributes are averaged"),
                "print_freq": Option(200, count, "samples between two logs of attributes"),
            },
            "periodic_thruput": {
                "seconds": Option(
                    60, positive, "seconds between two logs of how many items came and went"
                ),
            },
        },
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cfg = self._cfg
        self._staleness = staleness_check(self._items, cfg.max_staleness - 1)
        self._uses = use_time_check(self._items, cfg.max_use)
        self._priorities = PriorityExperienceReplay(
            self._items,
            priority_power_factor=cfg.alpha,
            IS_weight_power_factor=cfg.beta,
            IS_weight_anneal_train_iter=int(cfg.anneal_step) or None,
            eps=_ADDED_TO_ALL,
        )
        for middleware in (_complete_meta, self._staleness, self._uses, self._priorities):
            self._items.use(middleware)
        rate = cfg.thruput_controller.push_sample_rate_limit
        self._rate = RateLimit(
            low=rate.min,
            high=rate.max,
            window_s=cfg.thruput_controller.window_seconds,
            clock=self._clock,
        )
        self._counters = dict.fromkeys(
            ("refused_items", "refused_pushes", "refused_samples", "skipped_updates"), 0
        )
        self._envstep = 0
        self._n_samples = 0
        self._attributes: deque[dict[str, float]] = deque(
            maxlen=int(cfg.monitor.sampled_data_attr.average_range)
        )

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse a rate limit that nothing can keep."""
        super().check_config(cfg)
        rate = cfg.thruput_controller.push_sample_rate_limit
        check_value(
            rate.max > rate.min,
            "thruput_controller.push_sample_rate_limit.max",
            rate.max,
            f"above min, which is {rate.min}",
        )

    @property
    def beta(self) -> float:
        """The exponent of the weights; annealing continues from a value that is set."""
        return self._priorities.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        with self._lock:
            self._priorities.beta = beta

    @property
    def counters(self) -> dict[str, int]:
        """What the buffer did not do, counted.

        ``refused_items`` were not dictionaries; ``refused_pushes`` and ``refused_samples`` exceeded
        the rate limit; ``skipped_updates`` were for items that are no longer held.
        """
        with self._lock:
            return dict(self._counters)

    @property
    def _period_s(self) -> float:
        return float(self._cfg.monitor.periodic_thruput.seconds)

    def sample(
        self, size: int, cur_learner_iter: int, sample_range: slice | None = None
    ) -> list[dict[str, Any]] | None:
        """Draw items by priority; an item may be drawn twice.

        Args:
            size: number of items.
            cur_learner_iter: the learner's iteration; items that are too stale go first.
            sample_range: draw only from this part of the items by age.

        Returns:
            The items with the further keys; None, logged once a minute, if there are too few or
            the rate limit is reached.
        """

        def draw() -> list[dict[str, Any]]:
            self._staleness.delete_stale(cur_learner_iter)
            self._check_enough(size)
            items = self._items.sample(
                size, sample_range=sample_range, train_iter_sample_data=cur_learner_iter
            )
            self._rate.sampled(size)
            samples = [self._with_further_keys(item) for item in items]
            self._log_attributes(samples, cur_learner_iter)
            return samples

        return self._draw(size, draw)

    def update(self, info: Mapping[str, Any]) -> None:
        """Set the priorities of sampled items; those that are no longer held are skipped.

        Args:
            info: ``replay_unique_id``, ``replay_buffer_idx`` and ``priority``, each a list, an
                array or a tensor of the same length; without priorities, nothing happens.

        Raises:
            ValueError: if a priority is negative, infinite or NaN, a key is missing, or the lengths
                differ; nothing has changed.
        """
        if info.get("priority") is None:
            return
        missing = [key for key in ("replay_unique_id", "replay_buffer_idx") if key not in info]
        if missing:
            raise ValueError(
                f"priorities without {' and '.join(missing)} belong to no items; pass on what the "
                "sampled items carry"
            )
        unique_ids = list(info["replay_unique_id"])
        positions = _vector(info["replay_buffer_idx"]).tolist()
        priorities = [check_priority(priority) for priority in _vector(info["priority"]).tolist()]
        if not len(unique_ids) == len(positions) == len(priorities):
            raise ValueError(
                f"there are {len(unique_ids)} ids and {len(positions)} positions for "
                f"{len(priorities)} priorities"
            )
        with self._lock:
            for unique_id, position, priority in zip(
                unique_ids, positions, priorities, strict=True
            ):
                index = self._index_of(str(unique_id), int(position))
                if index is None:
                    self._counters["skipped_updates"] += 1
                else:
                    self._items.update(index, meta={"priority": priority + _ADDED_TO_UPDATES})

    def state_dict(self) -> dict[str, Any]:
        """Return items, priorities, counters, rates and random generator."""
        with self._lock:
            return {
                **super().state_dict(),
                "counters": dict(self._counters),
                "rate": self._rate.state_dict(),
                "n_samples": self._n_samples,
                "envstep": self._envstep,
            }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._counters = dict(state["counters"])
        self._rate.load_state_dict(state["rate"])
        self._n_samples = state["n_samples"]
        self._envstep = state["envstep"]

    def _push(self, items: list[Any], envstep: int) -> bool:
        self._envstep = envstep
        held = [item for item in items if isinstance(item, Mapping)]
        if len(held) < len(items):
            self._counters["refused_items"] += len(items) - len(held)
            self._warn("items", "items must be dictionaries; others are refused")
        metas = [_meta_of(item) for item in held]
        if not self._rate.may_push(len(held)):
            self._counters["refused_pushes"] += 1
            self._warn("push", "pushes are refused until more is sampled; see thruput_controller")
            return False
        self._items.import_data(zip(held, metas, strict=True))
        self._rate.pushed(len(held))
        self._pushed(len(held))
        return bool(held) or not items

    def _check_enough(self, size: int) -> None:
        held = self._items.count()
        ratio = self._cfg.thruput_controller.sample_min_limit_ratio
        if held / size < ratio:
            raise NotEnoughData(
                f"a sample of {size} needs {ratio * size:g} items, and the buffer holds {held}"
            )
        if not self._rate.may_sample(size):
            self._counters["refused_samples"] += 1
            raise NotEnoughData("samples wait until more is pushed; see thruput_controller")

    def _with_further_keys(self, item: BufferedData) -> dict[str, Any]:
        assert item.index is not None  # only padding has none
        meta = item.meta
        is_known = meta["train_iter_data_collected"] < _INFINITE
        return {
            **item.data,
            "replay_unique_id": f"{self._instance_name}_{item.index}",
            "replay_buffer_idx": item.index % self._items.size,
            "priority": meta["priority"],
            "IS": meta["priority_IS"],
            "use": meta["use_count"],
            "staleness": int(meta["staleness"]) if is_known else -1,
        }

    def _index_of(self, unique_id: str, position: int) -> int | None:
        """Return the index of an item that is still held, and None otherwise."""
        instance, _, number = unique_id.rpartition("_")
        if instance != self._instance_name or not number.isdecimal():
            return None
        index = int(number)
        is_same = index % self._items.size == position and index in self._items
        return index if is_same else None

    def _log_attributes(self, samples: Sequence[Mapping[str, Any]], cur_learner_iter: int) -> None:
        self._n_samples += 1
        every = int(self._cfg.monitor.sampled_data_attr.print_freq)
        until_log = -self._n_samples % every
        if until_log < (self._attributes.maxlen or 1):
            self._attributes.append(_attributes(samples))
        if not until_log:
            mean = {
                name: float(np.mean([values[name] for values in self._attributes]))
                for name in self._attributes[-1]
            }
            self._show(
                f"sampled items, mean of {len(self._attributes)} samples",
                mean,
                {"iter": cur_learner_iter, "step": self._envstep},
            )


def _complete_meta(action: str, chain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Buffer middleware that lets items of other buffers' files be loaded."""
    if action == "push" and "train_iter_data_collected" not in (kwargs["meta"] or {}):
        kwargs["meta"] = _meta_of(*args)
    return chain(*args, **kwargs)


def _meta_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the buffer middleware needs to know about a new item.

    Raises:
        TypeError: if it is not a dictionary.
        ValueError: if its priority is negative, infinite or NaN.
    """
    if not isinstance(item, Mapping):
        raise TypeError(f"the items of an AdvancedReplayBuffer are dictionaries, got {item!r:.100}")
    collected = item.get("collect_iter")
    if collected is None:
        at = _INFINITE
    else:
        at = float(collected if isinstance(collected, int) else np.min(_vector(collected)))
    meta: dict[str, Any] = {"train_iter_data_collected": at}
    if item.get("priority") is not None:
        meta["priority"] = check_priority(item["priority"])
    return meta


def _vector(values: Any) -> npt.NDArray[Any]:
    """Return a number, or a list, an array or a tensor of numbers, as an array ``[n]``."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return np.asarray(values).reshape(-1)


def _attributes(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    use, staleness, priority = (
        np.array([sample[key] for sample in samples], np.float64)
        for key in ("use", "staleness", "priority")
    )
    return {
        "use_avg": use.mean(),
        "use_max": use.max(),
        "staleness_avg": staleness.mean(),
        "staleness_max": staleness.max(),
        "priority_avg": priority.mean(),
        "priority_max": priority.max(),
        "priority_min": priority.min(),
    }
