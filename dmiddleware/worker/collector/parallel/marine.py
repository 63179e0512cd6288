"""A parallel collector for games of two players."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gymnasium.envs.registration import load_env_creator

from dmiddleware.classic import BattleEnvManager, BattleTimestep, GameResult, game_result
from dmiddleware.classic.battle_stepper import TurnTracker
from dmiddleware.classic.config import Option, anything
from dmiddleware.errors import ConfigError
from dmiddleware.rollout.opponents import check_sees_games
from dmiddleware.tree import from_numpy, to_numpy
from dmiddleware.worker.collector.parallel.base import PARALLEL_COLLECTOR_REGISTRY
from dmiddleware.worker.collector.parallel.zergling import ZerglingParallelCollector

__all__ = ["MarineParallelCollector"]

_SIDES = 2


@PARALLEL_COLLECTOR_REGISTRY.register("marine")
class MarineParallelCollector(ZerglingParallelCollector):
    """Two policies play against each other, or one is evaluated against the env's own opponent.

    When collecting, ``env.id`` names a function that makes a game
    (:class:`~dmiddleware.env.BattleEnv`), as ``"module:name"``; when evaluating, it is an env of
    one player, as for zergling. A transition of a player runs from its move to its own next turn.
    The transitions of active players (``policy_update_flag``) become samples; the others' weights
    are loaded once, and their transitions are not stored. The result of a
    game is that of the left player; it moves first.

    Args:
        cfg: see :class:`TrajectoryCollector`. ``policy``, ``policy_update_path`` and
            ``policy_update_flag`` are lists with one entry for each policy; ``collect_setting`` may
            be one.
        clock: seconds that never decrease.

    Raises:
        ConfigError: for an unusable config, or if there is not one policy when evaluating and two
            when collecting.
    """

    config: ClassVar[dict[str, Any]] = {
        "policy_update_flag": Option(
            None, anything, "whether each policy is active: learns, and changes; None: all are"
        ),
    }

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(cfg, clock=clock)
        self._turns = TurnTracker()
        self._game_result: list[list[GameResult]] = [[] for _ in range(self._env_num)]

    @property
    def policy(self) -> Any:
        """The modes of the policies, a list: two when collecting, one when evaluating.

        Raises:
            ConfigError: when it is set to another number of policies, or to one that collects and
                has neither ``n_sample`` nor ``n_episode``.
        """
        return list(self._modes)

    @policy.setter
    def policy(self, policy: Any) -> None:
        wanted = 1 if self._eval_flag else _SIDES
        if not isinstance(policy, list | tuple) or len(policy) != wanted:
            raise ConfigError(
                f"{self} plays with {wanted} {'policy' if self._eval_flag else 'policies'}, got "
                f"{policy!r:.100}; give a list of {wanted}"
            )
        self._use_policies(policy)

    def _create_policies(self) -> None:
        given = self._cfg.policy
        if given:
            self.policy = (
                [self._make_policy(one, player) for player, one in enumerate(given)]
                if _is_list(given)
                else given
            )
        for name in ("policy_update_path", "policy_update_flag"):
            value = self._cfg[name]
            if value is not None and not (_is_list(value) and len(value) == len(self._modes)):
                raise ConfigError(
                    f"{type(self).__name__}: {name} must be a list with one entry for each of the "
                    f"{len(self._modes)} policies, got {value!r:.100}"
                )

    def _policy_paths(self) -> list[tuple[Any, bool]]:
        paths = self._cfg.policy_update_path or [None] * len(self._modes)
        return [(path, self._is_active(player)) for player, path in enumerate(paths)]

    def _is_active(self, player: int) -> bool:
        flags = self._cfg.policy_update_flag
        return flags is None or bool(flags[player])

    def _make_env_manager(self) -> Any:
        if self._eval_flag:
            return super()._make_env_manager()
        options = self._env_options()
        if options["mode"] != "sync":
            raise ConfigError(f"env.mode must be 'sync' for games, got {options['mode']!r}")
        game = options["id"]
        if isinstance(game, str):
            game = load_env_creator(game)
        make = functools.partial(_wrapped, game, options["env_kwargs"], options["wrappers"])
        return BattleEnvManager([make] * options["env_num"], _SIDES, seed=options["seed"])

    def _prepare_acting(self) -> None:
        if self._eval_flag:
            super()._prepare_acting()
        else:
            check_sees_games(self._modes, user=str(self))

    def _ready_obs(self) -> dict[int, Any]:
        if self._eval_flag:
            return super()._ready_obs()
        ready = self._env_manager.ready_obs
        return {env_id: ready[env_id] for env_id in self._goal.unfinished}

    def _policy_inference(self, obs: dict[int, Any]) -> dict[int, Any]:
        """Return a list of two actions for each game, None for players that are not to move."""
        if self._eval_flag:
            return super()._policy_inference(obs)
        to_move = self._env_manager.to_move
        actions: dict[int, list[Any]] = {env_id: [None] * _SIDES for env_id in obs}
        for player, mode in enumerate(self._modes):
            seen = {
                env_id: from_numpy(sides[player])
                for env_id, sides in obs.items()
                if player in to_move[env_id]
            }
            outputs = mode.forward(seen, **self._collect_kwargs(player)) if seen else {}
            for env_id, output in outputs.items():
                actions[env_id][player] = output["action"]
                self._turns.begin(env_id, player, seen[env_id], output)
        return actions

    def _env_step(self, action: dict[int, Any]) -> dict[int, Any]:
        if self._eval_flag:
            return super()._env_step(action)
        timestep: dict[int, BattleTimestep] = self._env_manager.step(
            {
                env_id: [None if one is None else _as_action(one) for one in sides]
                for env_id, sides in action.items()
            }
        )
        return timestep

    def _process_timestep(self, timestep: dict[int, Any]) -> None:
        if self._eval_flag:
            super()._process_timestep(timestep)
            return
        for env_id, one in timestep.items():
            if one.abnormal:
                self._drop(env_id)
                self._turns.drop(env_id)
                continue
            self._step_count += 1
            turns = self._turns.advance(one, [from_numpy(obs) for obs in one.obs])
            for player, turn in turns.items():
                if self._is_active(player):
                    transition = self._modes[player].process_transition(
                        turn.obs, turn.output, turn.timestep
                    )
                    self._gather(env_id, player, transition, is_end=False)
            if one.done:
                # A player whose last turn was handed over already may have a rest to hand over.
                for player in range(_SIDES):
                    self._hand_over(env_id, player)
                self._count_episode(env_id, one.info[0])
        abnormal = [env_id for env_id, one in timestep.items() if one.abnormal]
        self._end_step({env_id: one.done for env_id, one in timestep.items()}, abnormal)

    def _count_episode(self, env_id: int, last_info: Mapping[str, Any]) -> None:
        super()._count_episode(env_id, last_info)
        self._game_result[env_id].append(game_result(last_info))

    def get_finish_info(self) -> dict[str, Any]:
        """Return the task's result, with ``game_result``: wins, draws and losses of each env."""
        return {
            **super().get_finish_info(),
            "game_result": [list(one) for one in self._game_result],
        }

    def _train_iter(self) -> Any:
        return list(self._policy_iters)


def _as_action(value: Any) -> Any:
    """Return an action as games take it: a number or an array."""
    action = to_numpy(value)
    return action[()] if getattr(action, "ndim", None) == 0 else action


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _wrapped(make: Callable[..., Any], kwargs: Mapping[str, Any], wrappers: list[Any]) -> Any:
    game = make(**kwargs)
    for wrapper in wrappers:
        game = wrapper(game)
    return game
