"""Acting written once, in either style; the other style is derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dmiddleware.data.batch import as_tree, from_numpy, leaves, map_leaves, map_nested, to_device
from dmiddleware.errors import PolicyError
from dmiddleware.policy.base import styles

__all__ = ["TwoStyles"]

Act = Callable[..., dict[Any, Any]]


class TwoStyles:
    """The methods of both styles, each derived from the other, and the dispatch between them.

    For every pair of methods the class that is nearest in the inheritance order decides: what it
    overrides is the style, what it does not is derived.
    """

    _model: nn.Module
    _device: torch.device
    _on_gpu: bool
    _enabled: frozenset[str]

    _pairs: ClassVar[dict[str, tuple[str, str]]] = {
        "collect": ("_forward_collect", "_forward_collect_batch"),
        "eval": ("_forward_eval", "_forward_eval_batch"),
        "train": ("_get_train_sample", "_get_train_batch"),
    }

    def _forward_collect(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Act while collecting: env id → observation in, env id → ``{"action": …, …}`` out."""
        return self._per_env_from_batch(self._forward_collect_batch, data, kwargs)

    def _forward_collect_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        """Act while collecting: observations ``[E, …]`` in, ``{"action": [E, …], …}`` out."""
        return self._batch_from_per_env(self._forward_collect, obs, env_id, kwargs)

    def _forward_eval(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Act greedily: env id → observation in, env id → ``{"action": …}`` out."""
        return self._per_env_from_batch(self._forward_eval_batch, data, kwargs)

    def _forward_eval_batch(self, obs: Any, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        """Act greedily: observations ``[E, …]`` in, ``{"action": [E, …]}`` out."""
        return self._batch_from_per_env(self._forward_eval, obs, env_id, kwargs)

    def _process_transition(
        self, obs: Any, policy_output: Mapping[str, Any], timestep: Any
    ) -> dict[str, Any]:
        """Return one transition: the standard columns and all that forward returned."""
        return {
            "obs": obs,
            "next_obs": timestep.next_obs,
            **policy_output,
            "reward": timestep.reward,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
        }

    def _get_train_sample(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn one trajectory into training samples."""
        if self._styles["train"] == "neither":
            return transitions
        columns = styles.collate(transitions)
        batch = self._get_train_batch(map_leaves(lambda leaf: leaf.unsqueeze(1), columns))
        return styles.to_rows(map_leaves(lambda leaf: leaf.flatten(0, 1), batch))

    def _get_train_batch(self, batch: Any) -> Any:
        """Turn a collected batch ``[T, E, …]``, or an episode ``[T, …]``, into training data."""
        if self._styles["train"] == "neither":
            return batch
        return styles.sample_by_trajectory(batch, self._get_train_sample)

    @property
    def batched(self) -> bool:
        """Whether collecting is written batched, so that batched calls cost no conversion."""
        return self._styles["collect"] in ("batched", "both")

    @property
    def own_transition(self) -> bool:
        """Whether the class makes its transitions itself, one by one."""
        return type(self)._process_transition is not TwoStyles._process_transition

    def _find_styles(self) -> None:
        """See which style each pair of methods is written in, and bind the other to it.

        Raises:
            PolicyError: if an enabled part is written in neither style.
        """
        self._styles = {field: _style_of(type(self), *pair) for field, pair in self._pairs.items()}
        for field in ("collect", "eval"):
            if field in self._enabled and self._styles[field] == "neither":
                per_env, batch = self._pairs[field]
                raise PolicyError(
                    f"{type(self).__name__} cannot {field}: write {per_env}(self, data, **kwargs), "
                    f"which maps env ids to observations and answers by env id, or "
                    f"{batch}(self, obs, env_id, **kwargs), which takes and gives tensors "
                    f"[E, …]; or leave {field!r} out of enable_field"
                )
        self._per_env = {
            field: self._bind(field, 0, native=("per env", "both")) for field in self._pairs
        }
        self._batch = {
            field: self._bind(field, 1, native=("batched", "both")) for field in self._pairs
        }

    def _bind(self, field: str, position: int, *, native: tuple[str, ...]) -> Callable[..., Any]:
        name = self._pairs[field][position]
        if self._styles[field] in native:
            return getattr(self, name)  # type: ignore[no-any-return]
        return MethodType(vars(TwoStyles)[name], self)

    def _public_collect(self, data: Any, *, env_id: Any = None, **kwargs: Any) -> dict[Any, Any]:
        return self._act("collect", data, env_id, kwargs)

    def _public_eval(self, data: Any, *, env_id: Any = None, **kwargs: Any) -> dict[Any, Any]:
        return self._act("eval", data, env_id, kwargs)

    def _act(self, field: str, data: Any, env_id: Any, kwargs: dict[str, Any]) -> dict[Any, Any]:
        if field not in self._enabled:
            raise self._not_enabled(field)
        if self._model.training:
            self._model.eval()
        with torch.set_grad_enabled(False):  # no_grad() does the same in twice the time
            if isinstance(data, dict) and styles.is_per_env(data):
                outputs = self._per_env[field](data, **kwargs) if data else {}
            else:
                obs = self._as_obs(data)
                if env_id is None:
                    env_id = np.arange(len(next(iter(leaves(obs)))[1]))
                outputs = self._batch[field](obs, np.asarray(env_id), **kwargs)
        return _to_cpu(outputs) if self._on_gpu else outputs

    def _public_transition(self, obs: Any, policy_output: Any, timestep: Any) -> Any:
        """Make one transition, or, of batched data, the columns of one step of all envs."""
        if not isinstance(timestep.env_id, np.ndarray):
            return self._process_transition(obs, policy_output, timestep)
        if not self.own_transition:
            return as_tree(self._process_transition(obs, policy_output, timestep))
        outputs = styles.split_outputs(policy_output, list(range(len(timestep.env_id))))
        return styles.collate(
            [
                self._process_transition(styles.row(from_numpy(obs), position), output, one)
                for (position, output), one in zip(outputs.items(), timestep, strict=True)
            ]
        )

    def _public_train_sample(self, data: Any) -> Any:
        """Turn a list of transitions, or a batch, into training samples of the same kind."""
        return (self._per_env if isinstance(data, list) else self._batch)["train"](data)

    def _not_enabled(self, field: str) -> PolicyError:
        return PolicyError(
            f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)} and "
            f"cannot {field}; add {field!r}, or build it with enable_field=None"
        )

    def _as_obs(self, data: Any) -> Any:
        """Bring a batch of observations to the policy's device, as a tensor or treetensor."""
        if not isinstance(data, torch.Tensor) and isinstance(data, np.ndarray | Mapping | tuple):
            data = from_numpy(data)
        return to_device(data, self._device) if self._on_gpu else data

    def _per_env_from_batch(
        self, forward: Act, data: dict[int, Any], kwargs: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        env_ids = [int(env_id) for env_id in data]
        obs = self._as_obs(styles.collate_values(list(data.values()), "obs"))
        return styles.split_outputs(forward(obs, np.asarray(env_ids), **kwargs), env_ids)

    def _batch_from_per_env(
        self, forward: Act, obs: Any, env_id: np.ndarray, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        env_ids = env_id.tolist()
        data = {one: styles.row(obs, position) for position, one in enumerate(env_ids)}
        return styles.join_outputs(forward(data, **kwargs), env_ids)


def _style_of(cls: type, per_env: str, batch: str) -> str:
    for base in cls.__mro__:
        if base is TwoStyles:
            break
        own = vars(base)
        if per_env in own and batch in own:
            return "both"
        if batch in own:
            return "batched"
        if per_env in own:
            return "per env"
    return "neither"


def _to_cpu(outputs: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: _to_cpu(value)
        if isinstance(value, dict)
        else map_nested(lambda leaf: leaf.cpu() if hasattr(leaf, "cpu") else leaf, value)
        for key, value in outputs.items()
    }
