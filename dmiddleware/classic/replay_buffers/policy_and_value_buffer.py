"""PolicyAndValueBuffer: two buffers of the same data, one for the policy and one for values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dmiddleware.classic.config import Option, anything
from dmiddleware.classic.replay_buffers.advanced_buffer import AdvancedReplayBuffer

__all__ = ["PolicyAndValueBuffer"]


class PolicyAndValueBuffer(AdvancedReplayBuffer):
    """Two buffers of the same data: the policy learns from one, and values learn from the other.

    It is the ``multi_buffer`` of DI-engine's PPG. The options are those of the policy's buffer;
    ``value`` has those of the other one. Sampled items are those of the policy, each with the
    column ``valued_rows``, the ``obs`` and ``ret`` of an item of the other buffer, as
    :class:`~dmiddleware.policy.OffPolicyPPGPolicy` learns from them.
    """

    config: ClassVar[dict[str, Any]] = {
        "value": Option({}, anything, "options of the buffer from which values learn"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = f"{self._instance_name}_of_values"
        options = {"seed": self._cfg.seed, **self._cfg.value}
        self._values = AdvancedReplayBuffer(options, *args[1:], **{**kwargs, "instance_name": name})

    def push(self, data: Any, cur_collector_envstep: int) -> bool:
        """Append items to both buffers; see :meth:`IBuffer.push`."""
        self._values.push(data, cur_collector_envstep)
        return super().push(data, cur_collector_envstep)

    def sample(self, size: int, cur_learner_iter: int, *args: Any, **kwargs: Any) -> Any:
        """Draw items from both buffers; None if either has too few."""
        valued = self._values.sample(size, cur_learner_iter, *args, **kwargs)
        if valued is None:
            return None
        items = super().sample(size, cur_learner_iter, *args, **kwargs)
        if items is None:
            return None
        return [
            {**item, "valued_rows": {name: row[name] for name in ("obs", "ret")}}
            for item, row in zip(items, valued, strict=True)
        ]

    def clear(self) -> None:
        """Remove all items from both buffers."""
        super().clear()
        self._values.clear()

    def close(self) -> None:
        """Close both buffers."""
        self._values.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both buffers."""
        return {**super().state_dict(), "value": self._values.state_dict()}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._values.load_state_dict(state["value"])
