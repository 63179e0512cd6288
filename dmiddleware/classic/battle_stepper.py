"""Acting in games of several players, whose own turns become their transitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmiddleware.classic.battle_manager import BattleEnvManager, BattleTimestep
from dmiddleware.env import EnvTimestep
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.policy import CollectMode, EvalMode
from dmiddleware.rollout.opponents import check_sees_games
from dmiddleware.rollout.stepper import first_episode_id
from dmiddleware.tree import Batch, Value, as_tree, from_numpy, to_dict, to_numpy

__all__ = ["BattleStep", "BattleStepper", "PlayerTurn", "TurnTracker"]


@dataclass(frozen=True, slots=True)
class PlayerTurn:
    """One transition of one player.

    Attributes:
        obs: what the player acted on.
        output: what its policy returned, with ``action``.
        timestep: the rewards from its move to its own next turn, summed, and what it sees then; or
            what it sees at the end of the episode.
    """

    obs: Value
    output: Mapping[str, Any]
    timestep: EnvTimestep


class TurnTracker:
    """Sums up what happens to a player between its move and its own next turn.

    Rewards before a player's first move belong to none of its turns.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, dict[str, Any]]] = {}

    def begin(self, env_id: int, player: int, obs: Value, output: Mapping[str, Any]) -> None:
        """Begin a turn: a player has chosen an action."""
        self._open.setdefault(env_id, {})[player] = {"obs": obs, "output": output, "reward": 0.0}

    def advance(self, timestep: BattleTimestep, obs: Sequence[Value]) -> dict[int, PlayerTurn]:
        """Count a step, and return the turns that it completes, by player.

        Args:
            timestep: the step.
            obs: its observations as the policies see them, one per player.
        """
        turns = self._open.get(timestep.env_id, {})
        for player, turn in turns.items():
            turn["reward"] += timestep.reward[player]
        over = [p for p in sorted(turns) if timestep.done or p in timestep.to_move]
        return {player: _closed(turns.pop(player), player, timestep, obs) for player in over}

    def drop(self, env_id: int) -> int:
        """Forget the open turns of a game, and return how many there were."""
        return len(self._open.pop(env_id, {}))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the open turns, as plain data."""
        return [
            {"env_id": env_id, "player": player, **to_dict(turn)}
            for env_id, turns in self._open.items()
            for player, turn in turns.items()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._open = {}
        for turn in state:
            self._open.setdefault(int(turn["env_id"]), {})[int(turn["player"])] = {
                "obs": _value(turn["obs"]),
                "output": {key: _value(one) for key, one in turn["output"].items()},
                "reward": float(turn["reward"]),
            }


@dataclass(frozen=True, slots=True)
class BattleStep:
    """One step of one game.

    Attributes:
        timestep: what the manager returned.
        turns: the turns that it completed, by player.
        episode_id: the episode that it belongs to.
    """

    timestep: BattleTimestep
    turns: Mapping[int, PlayerTurn]
    episode_id: int


class BattleStepper:
    """Lets one policy per player act in games, and counts steps and episodes.

    Every episode has an id that no other episode has, as in a collector.

    Args:
        modes: the players' collect or eval modes.
        manager: the games; launched at the first step if they are closed.
        user: the caller's name, for messages.
        convert: applied to every observation before a policy sees it.

    Raises:
        ConfigError: if there is not one mode per player, or a policy needs more than observations.
    """

    def __init__(
        self,
        modes: Sequence[CollectMode | EvalMode],
        manager: BattleEnvManager,
        *,
        user: str,
        convert: Callable[[Value], Value] | None = None,
    ) -> None:
        if len(modes) != manager.n_player:
            raise ConfigError(
                f"{user} has {len(modes)} policies for games of {manager.n_player} players; pass "
                "one per player"
            )
        check_sees_games(modes, user=user)
        self._modes = modes
        self._manager = manager
        self._convert = convert
        self._tracker = TurnTracker()
        self._ids = itertools.count(first_episode_id())
        self._episode_id: list[int] = []
        self._revision = -1
        self.env_step = 0
        self.env_episode = 0

    def begin(self) -> bool:
        """Launch the games if they are closed, and start anything that something else has used.

        Call it before the first step, and after a pause in which others may have used the games.

        Returns:
            Whether episodes were abandoned: something else has launched, reset or stepped the games
            since the last step.

        Raises:
            SpaceError: if a policy's model does not fit the games' spaces.
        """
        manager = self._manager
        if not manager.closed and manager.revision == self._revision:
            return False
        is_first = self._revision < 0
        if manager.closed:
            manager.launch()
        elif any(manager.episode_lengths):
            manager.reset()
        if is_first:
            self._check_spaces()
        for mode in self._modes:
            mode.reset()
        self._tracker = TurnTracker()
        self._episode_id = [next(self._ids) for _ in range(manager.env_num)]
        self._revision = manager.revision
        return not is_first

    def step(
        self, policy_kwargs: Sequence[Mapping[str, Any]], *, only: Collection[int] | None = None
    ) -> list[BattleStep]:
        """Let the players that are to move act once.

        Args:
            policy_kwargs: passed to the forward of each player's policy.
            only: step only these games; None: all.

        Raises:
            PolicyOutputError: if a policy returns no action for a game.
        """
        manager = self._manager
        ready, to_move = manager.ready_obs, manager.to_move
        ids = range(manager.env_num) if only is None else sorted(only)
        actions: dict[int, list[Any]] = {env_id: [None] * manager.n_player for env_id in ids}
        for player, mode in enumerate(self._modes):
            seen = {
                env_id: self._seen(ready[env_id][player])
                for env_id in ids
                if player in to_move[env_id]
            }
            if not seen:
                continue
            outputs: dict[Any, Any] = mode.forward(seen, **policy_kwargs[player])
            for env_id, obs in seen.items():
                if env_id not in outputs:
                    raise PolicyOutputError(
                        f"the policy of player {player} was given observations of the games "
                        f"{list(seen)}, but returned no output for {env_id}"
                    )
                actions[env_id][player] = _action(outputs[env_id]["action"])
                self._tracker.begin(env_id, player, obs, outputs[env_id])
        timesteps = manager.step(actions)
        self._revision = manager.revision
        return [self._account(timestep) for timestep in timesteps.values()]

    def _account(self, timestep: BattleTimestep) -> BattleStep:
        env_id = timestep.env_id
        episode_id = self._episode_id[env_id]
        if timestep.abnormal:
            self._tracker.drop(env_id)
            turns: Mapping[int, PlayerTurn] = {}
        else:
            turns = self._tracker.advance(timestep, [self._seen(obs) for obs in timestep.obs])
            self.env_step += 1
            self.env_episode += timestep.done
        if timestep.done or timestep.abnormal:
            self._episode_id[env_id] = next(self._ids)
            for mode in self._modes:
                mode.reset([env_id])
        return BattleStep(timestep, turns, episode_id)

    def _seen(self, obs: Any) -> Value:
        value = from_numpy(obs)
        return value if self._convert is None else self._convert(value)

    def _check_spaces(self) -> None:
        manager = self._manager
        observation_space, action_space = manager.observation_space, manager.action_space
        if observation_space is None or action_space is None:
            return
        try:
            for mode in self._modes:
                mode.spec.check_spaces(observation_space, action_space)
        except BaseException:
            manager.close()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return counters, episode ids, open turns, and the state of the games if launched."""
        return {
            "env_step": self.env_step,
            "env_episode": self.env_episode,
            "episode_id": list(self._episode_id),
            "turns": self._tracker.state_dict(),
            "envs": None if self._manager.closed else self._manager.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore what :meth:`state_dict` returned.

        Returns:
            Whether the games continue their episodes; otherwise they start new ones.

        Raises:
            SpaceError: if a policy's model does not fit the games' spaces.
        """
        self.env_step, self.env_episode = state["env_step"], state["env_episode"]
        if state["envs"] is None:
            return False
        self.begin()
        continues = self._manager.load_state_dict(state["envs"])
        self._revision = self._manager.revision
        if continues and state["episode_id"]:
            self._episode_id = list(state["episode_id"])
            self._tracker.load_state_dict(state["turns"])
        return continues


def _closed(
    turn: Mapping[str, Any], player: int, timestep: BattleTimestep, obs: Sequence[Value]
) -> PlayerTurn:
    return PlayerTurn(
        turn["obs"],
        turn["output"],
        EnvTimestep(
            env_id=timestep.env_id,
            next_obs=obs[player],
            reward=turn["reward"],
            done=timestep.done,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            info=timestep.info[player],
        ),
    )


def _action(value: Any) -> Any:
    """Return an action as games take it: a number or an array."""
    action = to_numpy(value) if isinstance(value, Batch) or hasattr(value, "detach") else value
    return action[()] if getattr(action, "ndim", None) == 0 else action


def _value(plain: Any) -> Any:
    return as_tree(plain) if isinstance(plain, Mapping) else plain
