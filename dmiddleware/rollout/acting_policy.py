"""A policy as a function: observations in, actions out, without an env manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from dmiddleware.env.batching import describe_unusable, has_items, make_check, make_value_check
from dmiddleware.env.batching import index_rows as row_of
from dmiddleware.env.team import ACTION_MASK, AGENT_MASK
from dmiddleware.env.team import STATE as TEAM_STATE
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.model import action_mask_of
from dmiddleware.model.action_mask import as_mask
from dmiddleware.model.spaces import array_shape, is_one_hot, obs_shape_of, shape_leaves
from dmiddleware.policy import ActionCodec, Policy
from dmiddleware.policy.acting import info_names, previous_action_codec
from dmiddleware.rollout.acting_memory import ActingMemory
from dmiddleware.tree import (
    Batch,
    Nested,
    Value,
    from_numpy,
    leaves,
    map_leaves,
    to_array,
    to_numpy,
)

__all__ = ["ActingPolicy"]


class ActingPolicy:
    """A policy that is called with observations, and returns actions for the environment.

    It keeps what the policy remembers from step to step: the recurrent state, and the previous
    action. Call :meth:`reset` where an episode starts::

        act = ActingPolicy(policy)
        obs, _ = env.reset()
        done = False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            done = terminated or truncated
        act.reset()

    A policy that sees the previous reward, as recurrent ones do, takes it as ``prev_reward``.

    Args:
        policy: the policy. Its settings have the shape of the observations, as those of
            :meth:`~dmiddleware.policy.Policy.for_env` do.

    Attributes:
        policy: as given.

    Raises:
        ConfigError: if the policy does not say which observations it takes, or needs an env for the
            actions of several agents.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._mode = policy.eval_mode
        self._names = policy.act_inputs
        self._path, self._rank = _one_observation(policy)
        # A previous reward comes with each call, but not in the first step.
        names = {*self._names, "is_first"} - {"prev_reward"}
        if policy.spaces is None:
            codec: ActionCodec | None = policy.codec
            if policy.several_agents and "prev_action" in names:
                raise ConfigError(
                    f"this {type(policy).__name__} acts on the agents' previous actions, and has "
                    "met no env that says what they are; build it with for_env(env)"
                )
        else:
            codec = previous_action_codec(names, policy.spaces[1])
        self._new_memory = partial(ActingMemory, names, policy.initial_state, codec)
        self._memory: ActingMemory | None = None  # None: all episodes begin

    def __call__(
        self,
        obs: Nested,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        prev_reward: npt.ArrayLike | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the action for one observation, or the actions ``[E, …]`` for a batch.

        Args:
            obs: one observation as the environment returns it, or a batch ``[E, …]`` of them:
                numpy arrays, in dictionaries or tuples where the space has them.
            deterministic: False draws from the distribution of the policy; a policy without one,
                such as DQN's, refuses it.
            action_mask: ``[A]`` or ``[E, A]``, not 0 where an action is allowed; None: the mask
                that the observations have, or every action.
            prev_reward: a number or ``[E]``, the reward of the step before, for a policy that asks
                for it; not used in the first step of an episode.
            info: the infos that a policy asks for, by name; values ``[…]`` or ``[E, …]``.

        Returns:
            Numpy arrays, nested like the action space. For one observation, what ``env.step``
            takes.

        Raises:
            StructureError: if the number of observations changes between steps and the policy
                remembers them, or an observation has another form.
            ConfigError: if an input that the policy asks for is missing, or it cannot draw actions.
        """
        if not isinstance(deterministic, bool):
            raise ConfigError(f"deterministic must be True or False, got {deterministic!r:.100}")
        batch, is_batch = self._batch_of(obs)
        n = len(next(leaves(batch))[1])
        memory = self._memory = self._memory_of(n)
        inputs: dict[str, Any] = {**memory.columns}
        inputs |= self._inputs(batch, n, is_batch=is_batch, mask=action_mask, info=info)
        if "prev_reward" in self._names:
            inputs["prev_reward"] = self._reward(prev_reward, inputs["is_first"])
        if "is_first" not in self._names:
            del inputs["is_first"]
        if not deterministic:
            inputs["deterministic"] = False
        output = dict(self._mode.forward(batch, **inputs))
        memory.record(from_numpy(output["action"]), memory.next_state(output, n))
        action = _with_tuples(to_numpy(output["action"]))
        return action if is_batch else map_leaves(lambda leaf: leaf[0], action)

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Begin new episodes.

        Args:
            rows: the rows of the batch whose episodes ended; None: all, and the next batch may have
                another number of rows.
        """
        if rows is None:
            self._memory = None
            self._mode.reset()
            return
        index = list(rows)
        if self._memory is not None and index:
            self._memory.restart(index)
            self._mode.reset(index)

    def _memory_of(self, n: int) -> ActingMemory:
        """Return the memory of ``n`` rows, a new one where no episode has begun.

        Raises:
            StructureError: if the policy remembers the steps of another number of rows.
        """
        memory = self._memory
        if memory is None:
            return self._new_memory(n)
        n_before = len(memory.columns["is_first"])
        if n_before == n:
            return memory
        if memory.columns.keys() != {"is_first"}:
            raise StructureError(
                f"{type(self.policy).__name__} remembers the steps before, which were of "
                f"{n_before} observation(s), and now has {n}; call reset() before it acts on others"
            )
        return self._new_memory(n)

    def _inputs(
        self,
        batch: Value,
        n: int,
        *,
        is_batch: bool,
        mask: Nested | None,
        info: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Return what the policy asks for in addition to observations, ``[n, …]``."""
        inputs: dict[str, Any] = {}
        if "action_mask" in self._names:
            if mask is None:
                allowed = action_mask_of(batch)
            else:
                allowed = self._given_mask(mask, n, is_batch=is_batch)
            if allowed is not None:
                # As where envs are stepped: rows that allow nothing allow everything.
                inputs["action_mask"] = allowed | ~allowed.any(-1, keepdim=True)
        elif mask is not None:
            raise ConfigError(f"{type(self.policy).__name__} takes no action_mask; leave it out")
        names = info_names(self._names)
        if names:
            missing = [name for name in names if name not in (info or {})]
            if missing or info is None:
                raise ConfigError(
                    f"{type(self.policy).__name__} asks for {', '.join(missing)} of the infos; "
                    "pass info=, with which the env returned the observation"
                )
            arrays = {name: np.asarray(info[name]) for name in names}
            inputs["info"] = _rows(arrays, is_batch=is_batch)
        return inputs

    def _given_mask(self, mask: Nested, n: int, *, is_batch: bool) -> torch.Tensor:
        """Return a mask as ``[n, A]`` bool.

        Raises:
            StructureError: if it is not one for these observations and this action.
        """
        lead = (n,) if is_batch else ()
        arrays = map_leaves(to_array, mask)
        for _, leaf in leaves(arrays):
            array = np.asarray(leaf)
            if array.shape[:-1] != lead or array.ndim == 0 or array.dtype.kind not in "biuf":
                expected = f"[{n}, A]" if is_batch else "[A]"
                raise StructureError(
                    f"action_mask must be {expected} of True and False, or of numbers, for these "
                    f"observations, got the shape {array.shape} and the dtype {array.dtype}"
                )
        allowed = as_mask(_rows(arrays, is_batch=is_batch))
        self.policy.codec.check_mask(allowed)
        return allowed

    def _reward(self, prev_reward: npt.ArrayLike | None, is_first: torch.Tensor) -> torch.Tensor:
        n = len(is_first)
        if prev_reward is None:
            if not is_first.all():
                raise ConfigError(
                    f"{type(self.policy).__name__} asks for the reward of the step before; pass "
                    "prev_reward="
                )
            return torch.zeros(n)
        reward = torch.as_tensor(np.asarray(prev_reward, np.float32)).reshape(-1)
        if len(reward) not in (1, n) or not reward.isfinite().all():
            raise StructureError(
                f"prev_reward must be a finite number for each of the {n} observation(s), got "
                f"{prev_reward!r:.100}"
            )
        return reward.expand(n).masked_fill(is_first, 0.0)

    def _batch_of(self, obs: Nested) -> tuple[Value, bool]:
        """Return checked observations as a batch, and whether they were one already.

        The check is that of env managers: the structure, shapes and dtypes of the space of the env
        that the policy was built for, and values that a network can use.
        """
        if self.policy.spaces is None:
            arrays = map_leaves(np.array, map_leaves(to_array, obs))  # its own, to be written to
            is_batch = self._is_batch(arrays)
            return _rows(arrays, is_batch=is_batch), is_batch
        space, user = self.policy.acting_space, type(self.policy).__name__
        assert space is not None
        if self.policy.parts is not None:
            obs = self.policy.parts.of_actor(obs)
        try:
            arrays = _arrays_of(space, obs)
            is_batch = self._is_batch(arrays)
            rows = arrays if is_batch else map_leaves(lambda leaf: leaf[None], arrays)
            space = self._without_absent(space, rows)
            checked = make_check(space, is_strict=True)(rows)
            lengths = {len(leaf) for _, leaf in leaves(checked)}
            if len(lengths) > 1:
                raise ValueError(f"its parts have {sorted(lengths)} rows")
        except (TypeError, ValueError) as error:  # of which a StructureError is one
            if isinstance(error, StructureError) and "dimension(s)" in str(error):
                raise
            raise StructureError(
                f"{user} takes one observation of {space}, or a batch of them, got "
                f"{_described(obs)}: {error}"
            ) from error
        if not make_value_check(space)(checked):
            described = (
                describe_unusable(space, row_of(checked, row)) for row in range(lengths.pop())
            )
            raise StructureError(
                f"{user} was given an observation with the value {next(filter(None, described))}; "
                "no network can act on it. Correct what makes the observations"
            )
        return from_numpy(checked), is_batch

    def _without_absent(self, space: gym.Space[Any], obs: Nested) -> gym.Space[Any]:
        """Return the space without the parts that acting does not need, if they are absent."""
        if not isinstance(space, gym.spaces.Dict) or not isinstance(obs, Mapping):
            return space
        optional = {ACTION_MASK, TEAM_STATE} if self.policy.several_agents else {ACTION_MASK}
        absent = optional - obs.keys()
        return gym.spaces.Dict(
            [(key, part) for key, part in space.spaces.items() if key not in absent]
        )

    def _is_batch(self, obs: Nested) -> bool:
        """Return whether there are several observations, by the dimensions of one array."""
        leaf, n_more = obs, -1
        try:
            for name in self._path:
                leaf = leaf[int(name) if isinstance(leaf, tuple) else name]
            n_more = int(leaf.ndim) - self._rank
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            pass
        if n_more not in (0, 1):
            where = f" at {'.'.join(self._path)}" if self._path else ""
            raise StructureError(
                f"{type(self.policy).__name__} takes an observation with {self._rank} dimension(s)"
                f"{where}, or a batch of them with one more, got {_described(obs)}"
            )
        return n_more == 1


def _one_observation(policy: Policy) -> tuple[tuple[str, ...], int]:
    """Return the path of an array in an observation, and its number of dimensions."""
    if policy.several_agents:
        return (AGENT_MASK,), 1
    shape = policy.cfg.model.get("obs_shape")
    if policy.acting_space is not None and (shape is None or policy.parts is not None):
        shape = obs_shape_of(policy.acting_space)
    if shape is None:
        raise ConfigError(
            f"this {type(policy).__name__} does not say which observations it takes, because its "
            "model is a module of its own; add model={'obs_shape': ...} to its settings"
        )
    path, leaf = next(shape_leaves(shape))
    # One-hot vectors are made of a number, or of a vector of numbers.
    return path, min(len(leaf) - 2, 1) if is_one_hot(leaf) else len(array_shape(leaf))


def _arrays_of(space: gym.Space[Any], obs: Nested) -> Any:
    """Return observations as new arrays, nested like their space as far as they are.

    Raises:
        ValueError: for a list that is not an array, or a tuple of another length.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(obs, Mapping | Batch):
        inner = space.spaces
        return {
            key: _arrays_of(inner[key], obs[key]) if key in inner else np.array(to_array(obs[key]))
            for key in obs
        }
    if isinstance(space, gym.spaces.Tuple) and isinstance(obs, list | tuple):
        if len(obs) != len(space.spaces):
            raise ValueError(f"it has {len(obs)} parts, but the space has {len(space.spaces)}")
        pairs = zip(space.spaces, obs, strict=True)
        return tuple(_arrays_of(part, item) for part, item in pairs)
    if isinstance(obs, Mapping | Batch | tuple):
        return map_leaves(lambda leaf: np.array(to_array(leaf)), obs)
    array = np.array(to_array(obs))
    is_flag = isinstance(space, gym.spaces.Discrete) and array.dtype.kind == "b"
    return array.astype(np.int64) if is_flag else array


def _rows(arrays: Nested, *, is_batch: bool) -> Value:
    """Return a batch ``[E, …]``; a single item becomes one of one row."""
    return from_numpy(arrays if is_batch else map_leaves(lambda leaf: leaf[None], arrays))


def _with_tuples(action: Any) -> Any:
    """Return an action with tuples where its space has them, whose items are named "0", "1", …."""
    if not isinstance(action, dict):
        return action
    parts = {name: _with_tuples(part) for name, part in action.items()}
    return (
        tuple(parts[str(at)] for at in range(len(parts))) if has_items(parts, len(parts)) else parts
    )


def _described(obs: Nested) -> str:
    try:
        shapes = {path: tuple(np.shape(leaf)) for path, leaf in leaves(obs)}
    except ValueError:  # of a list that is not an array
        return f"{obs!r:.100}"
    shape = shapes.get("", shapes)
    return f"the shape {shape}" if isinstance(shape, tuple) else f"the shapes {shape}"
