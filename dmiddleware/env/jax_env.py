"""Envs written as functions of JAX: those of Brax and of MuJoCo Playground."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from dmiddleware.callable_names import callable_named
from dmiddleware.env.batching import map_arrays
from dmiddleware.env.simulator import Groups, chosen_groups, chosen_spaces
from dmiddleware.errors import CheckpointMismatch, ConfigError, EnvProtocolError

__all__ = ["JaxEnv"]

_STEPS_PER_RENEWAL: Final = 16
_OF_TRAINING: Final = ("first_obs", "_first_obs", "truncation")
"""How keys end that the wrappers of Brax and Playground for training add to a state's info."""


class JaxEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector env of Gymnasium around an env whose ``reset`` and ``step`` are functions of JAX.

    Envs of Brax and of MuJoCo Playground have the same two: ``reset(rng)`` returns a state with
    ``obs``, ``reward``, ``done``, ``metrics`` and ``info``, and ``step(state, action)`` the next
    one. Both are of one world; here they are mapped over all worlds and compiled together with the
    ends of episodes, and torch gets the results through DLPack, without a copy. The arrays belong
    to JAX: do not write to them. Floating-point observations and rewards are float32.

    Where the env says ``done``, an episode is terminated; after ``episode_length`` steps it is
    truncated. The next episode begins in the same step, from a state that is there already: one
    sixteenth of these first states is drawn again in each step, because a reset of all worlds can
    take a fifth of the time of a step. ``final_obs`` has the observations before that.

    Args:
        env: the env, without the wrappers of its own training; or a function that makes it, or the
            name of one: ``"brax.envs:get_environment('ant')"``.
        num_envs: number of worlds, ``E``.
        episode_length: steps after which an episode is truncated; None: it never is. Brax trains
            with 1000. Playground has it in ``registry.get_default_config(name)``.
        device: "cpu", "cuda" or "cuda:1"; where JAX and torch keep the arrays.
        groups: as those of :class:`~dmiddleware.env.SimulatorEnv`: which entries of observations
            that are dictionaries to return; one name gives its tensor.
        infos: names of the state's ``metrics`` and ``info`` to return in the infos, ``[E, …]``.
        action_space: of one world; None: ``env.action_size`` numbers in ±1.

    Raises:
        ConfigError: if JAX is not installed or lacks the device, if the env has another interface
            or wrappers that reset it, and for infos that its state lacks.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        env: Any,
        num_envs: int = 1,
        *,
        episode_length: int | None,
        device: str = "cpu",
        groups: Groups = None,
        infos: Sequence[str] = (),
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        if episode_length is not None and episode_length <= 0:
            raise ConfigError(f"episode_length must be positive or None, got {episode_length}")
        self._jax = _imported_jax()
        self._device = _jax_device(self._jax, device)
        with self._jax.default_device(self._device):
            self.env = _made(env)
        self.num_envs = num_envs
        self.episode_length = episode_length
        self.groups = groups
        self.infos = tuple(infos)
        first = self._checked_first()
        # MJX keeps some arrays for all worlds together, when it runs on Warp.
        self._n_axes = [leaf.ndim for leaf in self._jax.tree.leaves(first)]
        self.single_observation_space = chosen_spaces(_space_of(first.obs), groups)
        self.single_action_space = action_space or _action_space(self.env)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._first = self._jax.jit(self._first_worlds)
        self._next = self._jax.jit(self._next_worlds)
        self._worlds: Any = None
        self._key = self._key_of(int(np.random.SeedSequence().generate_state(1)[0]))

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every world."""
        if seed is not None:
            self._key = self._key_of(int(seed[0] if isinstance(seed, list | tuple) else seed))
        self._worlds, arrays = self._first(self._key)
        self._key = self._worlds["key"]
        obs, infos = self._to_torch(arrays)
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all worlds; those whose episode ended begin another one."""
        self._worlds, results = self._next(self._worlds, map_arrays(self._to_jax, actions))
        obs, final_obs, reward, terminated, truncated, done, infos = self._to_torch(results)
        infos.update(final_obs=final_obs, _final_obs=done)
        return obs, reward, terminated, truncated, infos

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all worlds and of the random numbers, as plain data."""
        return {name: self._plain(leaf) for name, leaf in self._leaves().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; :meth:`reset` must have been called.

        Raises:
            CheckpointMismatch: if it is the state of another env.
        """
        jax, leaves = self._jax, self._leaves()
        shapes = {name: np.shape(self._plain(leaf)) for name, leaf in leaves.items()}
        if shapes != {name: np.shape(array) for name, array in state.items()}:
            raise CheckpointMismatch(
                f"the saved worlds are not those of {type(self.env).__name__} with {self.num_envs} "
                "worlds; make it in the same way as when they were saved"
            )
        restored = [self._restored(leaf, state[name]) for name, leaf in leaves.items()]
        self._worlds = jax.tree.unflatten(jax.tree.structure(self._worlds), restored)

    # Functions that JAX compiles

    def _first_worlds(self, key: Any) -> tuple[dict[str, Any], Any]:
        """Begin an episode in every world, and draw the states from which the next ones begin."""
        jax = self._jax
        key, draw = jax.random.split(key)
        drawn = self._drawn(draw, 2 * self.num_envs)
        state = self._map_worlds(lambda leaf: leaf[: self.num_envs], drawn)
        spare = self._map_worlds(lambda leaf: leaf[self.num_envs :], drawn)
        worlds = {
            "state": state,
            "spare": spare,
            "n_steps": jax.numpy.zeros(self.num_envs, jax.numpy.int32),
            "n_renewals": jax.numpy.zeros((), jax.numpy.int32),
            "key": key,
        }
        return worlds, (self._seen(state), self._chosen_infos(state))

    def _next_worlds(self, worlds: dict[str, Any], actions: Any) -> tuple[dict[str, Any], Any]:
        jax = self._jax
        key, draw = jax.random.split(worlds["key"])
        state = jax.vmap(self.env.step)(worlds["state"], actions)
        _check_alike(jax, worlds["state"], state)
        n_steps = worlds["n_steps"] + 1
        terminated = state.done != 0
        truncated = ~terminated & (n_steps >= self._limit())
        done = terminated | truncated

        def begun(last: Any, first: Any) -> Any:
            is_over = done.reshape(-1, *(1,) * (first.ndim - 1))
            return jax.numpy.where(is_over, first, last.astype(first.dtype))

        following = self._map_worlds(begun, state, worlds["spare"])
        spare, n_renewals = self._renewed(draw, worlds["spare"], worlds["n_renewals"])
        worlds = {
            "state": following,
            "spare": spare,
            "n_steps": jax.numpy.where(done, 0, n_steps),
            "n_renewals": n_renewals,
            "key": key,
        }
        reward = state.reward.astype(jax.numpy.float32)
        return worlds, (
            self._seen(following),
            self._seen(state),
            reward,
            terminated,
            truncated,
            done,
            self._chosen_infos(state),
        )

    def _limit(self) -> int:
        return np.iinfo(np.int32).max if self.episode_length is None else self.episode_length

    def _renewed(self, key: Any, spare: Any, n_renewals: Any) -> tuple[Any, Any]:
        """Draw the first states of the next few worlds again."""
        jax = self._jax
        size = -(-self.num_envs // _STEPS_PER_RENEWAL)
        n_blocks = -(-self.num_envs // size)
        start = (n_renewals % n_blocks) * size  # JAX moves the last block to where it fits

        def written(old: Any, new: Any) -> Any:
            return jax.lax.dynamic_update_slice_in_dim(old, new, start, 0)

        spare = self._map_worlds(written, spare, self._drawn(key, size))
        return spare, (n_renewals + 1) % n_blocks

    def _drawn(self, key: Any, n_worlds: int) -> Any:
        """Return states of the start of an episode, with leaves ``[n_worlds, …]``."""
        jax = self._jax
        states = jax.vmap(self.env.reset)(jax.random.split(key, n_worlds))
        # Without weak types, for which JAX would compile a step twice.
        return jax.tree.map(
            lambda leaf: (
                jax.lax.convert_element_type(leaf, leaf.dtype)
                if jax.numpy.issubdtype(leaf.dtype, jax.numpy.number)
                else leaf
            ),
            states,
        )

    def _map_worlds(self, function: Callable[..., Any], state: Any, *others: Any) -> Any:
        """Apply a function to the leaves that have an axis of worlds; others stay as they are."""
        tree, structure = self._jax.tree, self._jax.tree.structure(state)
        columns = zip(*map(tree.leaves, (state, *others)), strict=True)
        mapped = [
            function(*leaves) if leaves[0].ndim > n_axes else leaves[0]
            for leaves, n_axes in zip(columns, self._n_axes, strict=True)
        ]
        return tree.unflatten(structure, mapped)

    def _seen(self, state: Any) -> Any:
        """Return the observations ``[E, …]`` of the chosen groups, as nested dicts."""
        numpy = self._jax.numpy

        def single(array: Any) -> Any:
            is_float = numpy.issubdtype(array.dtype, numpy.floating)
            return array.astype(numpy.float32) if is_float else array

        return self._jax.tree.map(single, chosen_groups(_as_dicts(state.obs), self.groups))

    def _chosen_infos(self, state: Any) -> dict[str, Any]:
        columns = {**state.info, **state.metrics}
        return {name: columns[name] for name in self.infos}

    # What an env must be like

    def _checked_first(self) -> Any:
        """Return the shapes of the state of one world, from its reset."""
        jax, kind = self._jax, type(self.env).__name__
        if not (callable(getattr(self.env, "reset", None)) and hasattr(self.env, "step")):
            raise ConfigError(
                f"{kind} has no reset(rng) and step(state, action); JaxEnv takes an env of Brax or "
                "MuJoCo Playground, or one with their interface"
            )
        first = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0))
        missing = [
            name
            for name in ("obs", "reward", "done", "metrics", "info")
            if not hasattr(first, name)
        ]
        if missing:
            raise ConfigError(
                f"{kind}.reset(rng) returned a {type(first).__name__} without "
                f"{', '.join(missing)}; JaxEnv takes states like those of Brax"
            )
        if first.done.shape != () or any(name.endswith(_OF_TRAINING) for name in first.info):
            raise ConfigError(
                f"{kind} maps or resets its worlds itself, as the wrappers of Brax's training do; "
                "pass the env without them: brax.envs.get_environment(name), or registry.load(name)"
            )
        columns = [*first.info, *first.metrics]
        for name in self.infos:
            if name not in columns:
                raise ConfigError(
                    f"the states of {kind} have no {name!r} in metrics or info; they have "
                    f"{', '.join(columns) or 'none'}"
                )
        return first

    # Arrays of JAX, tensors, and plain data

    def _to_torch(self, arrays: Any) -> Any:
        from torch.utils.dlpack import from_dlpack  # torch only where envs are stepped

        return self._jax.tree.map(from_dlpack, arrays)

    def _to_jax(self, tensor: Any) -> Any:
        import torch

        if tensor.dtype == torch.int64:  # which JAX has only in its 64-bit mode
            tensor = tensor.int()
        return self._jax.dlpack.from_dlpack(tensor.contiguous())

    def _key_of(self, seed: int) -> Any:
        # PRNGKey drops the upper half of a seed of 64 bits.
        key = self._jax.random.PRNGKey(seed % 2**32)
        key = self._jax.random.fold_in(key, seed >> 32) if seed >> 32 else key
        return self._jax.device_put(key, self._device)

    def _leaves(self) -> dict[str, Any]:
        tree = self._jax.tree_util
        leaves = tree.tree_flatten_with_path(self._worlds)[0]
        return {tree.keystr(path): leaf for path, leaf in leaves}

    def _is_key(self, leaf: Any) -> bool:
        return bool(self._jax.numpy.issubdtype(leaf.dtype, self._jax.dtypes.prng_key))

    def _plain(self, leaf: Any) -> npt.NDArray[Any]:
        return np.array(self._jax.random.key_data(leaf) if self._is_key(leaf) else leaf)

    def _restored(self, leaf: Any, array: npt.NDArray[Any]) -> Any:
        value = self._jax.device_put(np.asarray(array), self._device)
        if self._is_key(leaf):
            return self._jax.random.wrap_key_data(value, impl=self._jax.random.key_impl(leaf))
        return value


def _imported_jax() -> Any:
    try:
        jax = importlib.import_module("jax")
        importlib.import_module("jax.dlpack")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "JaxEnv needs the package jax; run: pip install 'dmiddleware[jax]'"
        ) from error
    return jax


def _jax_device(jax: Any, name: str) -> Any:
    """Return the device of JAX that has the name which torch gives it, and that torch has too."""
    import torch

    kind, _, index = name.partition(":")
    try:
        devices = jax.devices(kind)
        torch.empty(0, device=name)
        return devices[int(index or 0)]
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        raise ConfigError(
            f"JAX and torch do not both have the device {name!r} ({error}); JAX has "
            f"{', '.join(map(str, jax.devices()))}. Install JAX with the GPU's libraries "
            "(pip install 'jax[cuda12]'), or pass device='cpu'"
        ) from error


def _made(env: Any) -> Any:
    if isinstance(env, str):
        env = callable_named(env)
    is_maker = isinstance(env, type) or (callable(env) and not hasattr(env, "reset"))
    return env() if is_maker else env


def _action_space(env: Any) -> spaces.Space[Any]:
    size = getattr(env, "action_size", None)
    if size is None:
        raise ConfigError(
            f"{type(env).__name__} has no action_size; pass action_space= of one world to JaxEnv"
        )
    return spaces.Box(-1.0, 1.0, (int(size),), np.float32)


def _as_dicts(obs: Any) -> Any:
    """Return observations with dicts in the place of other mappings."""
    if isinstance(obs, Mapping):
        return {str(name): _as_dicts(item) for name, item in obs.items()}
    return obs


def _space_of(obs: Any) -> spaces.Space[Any]:
    if isinstance(obs, Mapping):
        return spaces.Dict({str(name): _space_of(item) for name, item in obs.items()})
    dtype = np.dtype(obs.dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, obs.shape, dtype.type)
    if dtype.kind == "b":
        return spaces.MultiBinary(obs.shape)
    return spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def _check_alike(jax: Any, before: Any, after: Any) -> None:
    """Check that a step returns a state with the leaves of the one that it got."""
    is_alike = jax.tree.structure(before) == jax.tree.structure(after)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(state)] for state in (before, after)]
    if not is_alike or shapes[0] != shapes[1]:
        raise EnvProtocolError(
            "step(state, action) returned a state with other entries or shapes than reset(rng) "
            f"did; JAX needs them equal: {jax.tree.map(np.shape, before)} and "
            f"{jax.tree.map(np.shape, after)}"
        )
