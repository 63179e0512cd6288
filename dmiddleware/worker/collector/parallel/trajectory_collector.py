"""What parallel collectors share: envs, trajectories, and what is said about them."""

from __future__ import annotations

import copy
import itertools
import math
import time
import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from gymnasium.envs.registration import load_env_creator

from dmiddleware.classic import CollectMode, EvalMode, as_collect_mode, as_eval_mode, create_policy
from dmiddleware.classic.config import Option, above, anything, mapping, one_of
from dmiddleware.classic.modes import spec_attribute
from dmiddleware.errors import ConfigError, WaitTimeout
from dmiddleware.rollout.stepper import first_episode_id
from dmiddleware.seeding import derive_seed
from dmiddleware.worker.collector.parallel.base import BaseParallelCollector
from dmiddleware.worker.collector.parallel.episode_goal import EpisodeGoal
from dmiddleware.worker.collector.transitions import to_tensor_transitions

__all__ = ["TrajectoryCollector"]

_POLL_S: Final = 0.1


class TrajectoryCollector(BaseParallelCollector):
    """Plays a fixed number of episodes in every env, and hands over trajectories as samples.

    The transitions of each env are gathered until its episode ends or, where the policy's config
    has ``n_sample`` and no ``n_episode``, until there are ``n_sample`` of them. Then
    ``get_train_sample`` turns them into samples. Each sample is stored under its ``data_id``, and
    announced with its metadata. Progress is reported whenever an episode has ended.

    Args:
        cfg: what differs from ``default_config()``. ``env`` has ``id`` (``env_id``), ``kwargs``,
            ``wrappers`` (functions, or ``"module:name"``), ``mode`` (``"sync"``), ``env_num``,
            ``seed``, and ``manager.episode_num``: the episodes of each env.
        clock: seconds that never decrease.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "compressor": Option(
            "lz4", one_of("none", "zlib", "lz4"), "how the store compresses step data"
        ),
        "update_policy_second": Option(
            3, above(0), "seconds from one update of the policy to the next, when collecting"
        ),
        "policy_timeout_s": Option(
            60.0, above(0), "how long to wait for the first weights of the policy, in seconds"
        ),
        "policy_update_path": Option(
            None, anything, "the id of the policy that brings new weights; None: none"
        ),
        "policy": Option({}, anything, "the policy's config, with type"),
        "collect_setting": Option({}, anything, "keyword arguments of the policy's forward"),
        "env": Option(
            {},
            mapping,
            "`id`, `kwargs`, `wrappers`, `mode`, `env_num`, `seed` and `manager.episode_num`",
        ),
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(cfg, clock=clock)
        self._episode_num = self._checked_episode_num()
        self._env_manager = self._make_env_manager()
        self._env_num: int = self._env_manager.env_num
        self._goal = EpisodeGoal(self._env_manager, self._episode_num)
        self._ids = itertools.count(first_episode_id())
        self._episode_id = [next(self._ids) for _ in range(self._env_num)]
        self._modes: list[Any] = []
        self._policy_iters: list[int] = []
        self._traj_lens: list[float] = []
        self._gathered: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        self._returns: list[float] = []
        self._step_count = self._sample_count = self._episode_count = 0
        self._last_update = -math.inf
        self._collector_done = False

    @abstractmethod
    def _make_env_manager(self) -> Any:
        """Return the envs, closed."""

    def _is_done(self) -> bool:
        return self._goal.done

    @abstractmethod
    def _policy_paths(self) -> list[tuple[Any, bool]]:
        """Return where the weights of each policy come from, and whether they change."""

    def _use_policies(self, modes: Sequence[Any]) -> None:
        """Play with these policies.

        Raises:
            ConfigError: if a policy that collects has neither ``n_sample`` nor ``n_episode``.
        """
        modes = [self._as_mode(mode) for mode in modes]
        self._traj_lens = [
            math.inf if self._eval_flag else self._longest_trajectory(mode) for mode in modes
        ]
        self._policy_iters = [0] * len(modes)
        self._modes = modes

    def _as_mode(self, policy: Any) -> CollectMode | EvalMode:
        adopt = as_eval_mode if self._eval_flag else as_collect_mode
        return adopt(policy, user=type(self).__name__)

    def _run(self) -> None:
        if not self._modes:
            raise ConfigError(f"{self} has no policy; set policy in its config, or its property")
        manager = self._env_manager
        manager.launch()
        spaces = manager.observation_space, manager.action_space
        for mode in self._modes if None not in spaces else ():
            mode.spec.check_spaces(*spaces)
        self._prepare_acting()
        super()._run()

    @abstractmethod
    def _prepare_acting(self) -> None:
        """Build what the policies need to act; called before the first step."""

    def _update_policy(self) -> None:
        is_first = math.isinf(self._last_update)
        if not self._is_update_due():
            return
        fetched: dict[Any, Mapping[str, Any] | None] = {None: None}
        for player, (path, changes) in enumerate(self._policy_paths()):
            if not (is_first or changes):
                continue
            if path not in fetched:  # in self-play, both policies have the same path
                fetched[path] = self._fetch(path, is_first=is_first)
            found = fetched[path]
            if found is not None:
                self._policy_iters[player] = int(found["iter"])
                state = {key: value for key, value in found.items() if key != "iter"}
                self._modes[player].load_state_dict(state)

    def _iter_after_hook(self) -> None:
        super()._iter_after_hook()
        self._update_policy()

    def _env_options(self) -> dict[str, Any]:
        """Return the arguments of an env manager, from the config's ``env``."""
        env = self._cfg.env
        name = env.get("id", env.get("env_id"))
        if name is None:
            raise ConfigError(
                f"{type(self).__name__}: env has no id; set env.id to the id of an env, for "
                "example 'CartPole-v1'"
            )
        return {
            "id": name,
            "env_num": env.get("env_num", 1),
            "mode": env.get("mode", "sync"),
            "env_kwargs": env.get("kwargs") or {},
            "wrappers": [
                load_env_creator(one) if isinstance(one, str) else one
                for one in env.get("wrappers") or ()
            ],
            "seed": env.get("seed"),
        }

    def _checked_episode_num(self) -> int | None:
        value = (self._cfg.env.get("manager") or {}).get("episode_num")
        return None if value is None or value == math.inf else int(value)

    def _make_policy(self, cfg: Mapping[str, Any], player: int = 0) -> CollectMode | EvalMode:
        """Build a policy with the one field that the task needs; return its mode."""
        policy = create_policy(cfg, enable_field=["eval" if self._eval_flag else "collect"])
        mode = self._as_mode(policy)
        if self._cfg.env.get("seed") is not None:
            mode.seed(derive_seed(self._cfg.env.seed, "policy", player))
        return mode

    def _fetch(self, path: str, *, is_first: bool) -> Mapping[str, Any] | None:
        """Return a policy's newest state, or None; the first time, wait until there is one."""
        deadline = self._clock() + self._cfg.policy_timeout_s
        while True:
            found = self.get_policy_update_info(path)
            if found is not None or not is_first:
                return found
            if self._clock() > deadline:
                raise WaitTimeout(
                    f"{self} got no weights of the policy {path!r} within "
                    f"{self._cfg.policy_timeout_s:g} s; check that a learner publishes them"
                )
            if self._end.wait(_POLL_S):
                return None

    def _is_update_due(self) -> bool:
        """Return whether to look for newer weights: once when evaluating, else at intervals."""
        now = self._clock()
        if math.isfinite(self._last_update) and (
            self._eval_flag or now - self._last_update < self._cfg.update_policy_second
        ):
            return False
        self._last_update = now
        return True

    def _collect_kwargs(self, player: int) -> Mapping[str, Any]:
        """Return the keyword arguments of a player's forward when collecting."""
        setting = self._cfg.collect_setting
        chosen: Mapping[str, Any] = setting[player] if isinstance(setting, list) else setting
        return chosen

    def _longest_trajectory(self, mode: CollectMode) -> float:
        """Return the longest trajectory that is handed over.

        Raises:
            ConfigError: if the policy's config has neither ``n_sample`` nor ``n_episode``.
        """
        if spec_attribute(mode.spec, "n_episode") is not None:
            return math.inf
        n_sample: Any = spec_attribute(mode.spec, "n_sample")
        if n_sample is None:
            raise ConfigError(
                f"{self} does not know when a trajectory is complete; set collect.n_sample or "
                "collect.n_episode in the policy's config"
            )
        return int(n_sample)

    def _gather(
        self, env_id: int, player: int, transition: Mapping[str, Any], *, is_end: bool
    ) -> None:
        """Add a player's transition; hand over the trajectory if it is complete."""
        gathered = self._gathered[env_id, player]
        gathered.append(
            {
                **transition,
                "episode_id": self._episode_id[env_id],
                "collect_iter": self._policy_iters[player],
            }
        )
        if is_end or len(gathered) >= self._traj_lens[player]:
            self._hand_over(env_id, player)

    def _hand_over(self, env_id: int, player: int) -> None:
        trajectory = self._gathered.pop((env_id, player), [])
        if not trajectory:
            return
        for sample in self._modes[player].get_train_sample(to_tensor_transitions(trajectory)):
            self._sample_count += 1
            metadata = self._get_metadata(sample, env_id, player)
            ref = self.send_stepdata(metadata["data_id"], sample)
            if ref is not None:
                metadata["object_ref"] = ref
            self.send_metadata(metadata)

    def _get_metadata(self, sample: Any, env_id: int, player: int) -> dict[str, Any]:
        cfg = spec_attribute(self._modes[player].spec, "cfg")
        unroll_len = cfg.get("unroll_len") or cfg.get("collect", {}).get("unroll_len") or 1
        return {
            "data_id": f"env_{env_id}_{uuid.uuid4()}",
            "env_id": env_id,
            "policy_iter": self._policy_iters[player],
            "collect_iter": self._policy_iters[player],  # what buffers measure staleness by
            "unroll_len": len(sample) if isinstance(sample, list) else int(unroll_len),
            "compressor": self._cfg.compressor,
            "get_data_time": time.time(),
            "priority": 1.0,
            **self._counts(),
        }

    def _get_collector_info(self) -> dict[str, Any]:
        return {
            "collector_done": self._collector_done,
            "get_info_time": time.time(),
            **self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        return {
            "eval_flag": self._eval_flag,
            "cur_episode": self._episode_count,
            "cur_sample": self._sample_count,
            "cur_step": self._step_count,
        }

    def _end_step(self, done: Mapping[int, bool], abnormal: Sequence[int]) -> None:
        """Reset the policies where an episode starts; report progress if one has ended.

        Args:
            done: whether its episode has ended, for each env that was stepped.
            abnormal: the envs that failed.
        """
        ended = [env_id for env_id, is_end in done.items() if is_end]
        for env_id in (*ended, *abnormal):
            self._episode_id[env_id] = next(self._ids)
        if ended or abnormal:
            for mode in self._modes:
                mode.reset([*ended, *abnormal])
        if ended:
            self._collector_done = self._goal.done
            self.send_metadata(self._get_collector_info())

    def _drop(self, env_id: int) -> None:
        """Drop the unfinished trajectories of an env that failed."""
        for player in range(len(self._modes)):
            self._gathered.pop((env_id, player), None)

    def _count_episode(self, env_id: int, last_info: Mapping[str, Any]) -> None:
        self._episode_count += 1
        self._returns.append(float(last_info["eval_episode_return"]))

    def get_finish_info(self) -> dict[str, Any]:
        """Return the task's result: counts, durations in seconds, and the episodes' returns.

        ``reward_mean`` and ``reward_std`` are None if no episode has ended.
        """
        duration = self._duration()
        episodes, steps, samples = self._episode_count, self._step_count, self._sample_count
        info = {
            "eval_flag": self._eval_flag,
            "env_num": self._env_num,
            "duration": duration,
            "train_iter": self._train_iter(),
            "collector_done": self._collector_done,
            "predefined_episode_count": (
                None if self._episode_num is None else self._env_num * self._episode_num
            ),
            "real_episode_count": episodes,
            "step_count": steps,
            "sample_count": samples,
            "avg_time_per_episode": duration / max(1, episodes),
            "avg_time_per_step": duration / max(1, steps),
            "avg_time_per_train_sample": duration / max(1, samples),
            "avg_step_per_episode": steps / max(1, episodes),
            "avg_sample_per_episode": samples / max(1, episodes),
            "reward_mean": float(np.mean(self._returns)) if self._returns else None,
            "reward_std": float(np.std(self._returns)) if self._returns else None,
            "reward_raw": list(self._returns),
            "finish_time": time.time(),
        }
        if not self._eval_flag:
            info["collect_setting"] = copy.deepcopy(self._cfg.collect_setting)
        return info

    @abstractmethod
    def _train_iter(self) -> Any:
        """Return the iteration of the weights that the policy has."""

    def __repr__(self) -> str:
        """Return the class's name, and whether it evaluates."""
        return f"{type(self).__name__}({self._prefix})"
