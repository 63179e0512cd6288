"""Games of teams: one env manager steps the games, and each team sees envs of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, Protocol, Self

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env import (
    BaseEnvManager,
    BatchedTimestep,
    EnvSettings,
    check_env_manager,
    make_env_manager,
)
from dmiddleware.env.batching import NestedArrays, map_arrays, replace_rows
from dmiddleware.env.env_access import Access
from dmiddleware.env.env_state import decode_infos, encode_infos
from dmiddleware.env.game_env import FLAGS, PRESENT, GameEnv, is_game_space
from dmiddleware.env.pictures import Frame
from dmiddleware.env.team import (
    ACTION_MASK,
    AGENT_MASK,
    AGENTS,
    STATE,
    AgentSpaces,
    team_spaces,
)
from dmiddleware.env.timestep import BoolArray
from dmiddleware.errors import ConfigError, EnvStateError, SpaceError, StructureError
from dmiddleware.process.closing import Closing
from dmiddleware.registry import nearest
from dmiddleware.settings import Convert, takes_options

__all__ = ["Game", "GameSettings", "Seat", "TeamEnvs", "make_game"]


class Seat(Protocol):
    """Acts for a team: steps its envs once for each step of the games."""

    def move(self) -> None:
        """Choose actions, and step the team's envs with them."""
        ...

    def restart(self) -> None:
        """Forget the present games; new ones start in all envs."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the present games."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Restore what :meth:`state_dict` returned."""
        ...


def _as_teams(teams: Any) -> Any:
    if not isinstance(teams, Mapping) or not teams:
        raise ConfigError(
            f'teams must be a dictionary such as {{"red": ["red_*"]}}, got {teams!r:.100}'
        )
    return {
        name: (agents,) if isinstance(agents, str) else agents for name, agents in teams.items()
    }


class GameSettings(EnvSettings):
    """The options of :func:`make_game`: those of ``make_env_manager``, and the teams."""

    teams: Annotated[Mapping[str, Sequence[str]], Convert(_as_teams)]
    """The agents of each team: names, or patterns such as "blue_*"."""
    flatten: bool = False
    """Turn arrays of observations into vectors, as the boards of small games should be."""


@takes_options(GameSettings)
def make_game(settings: GameSettings) -> Game:
    """Make a game of teams.

    It takes the fields of :class:`GameSettings`, or an object of it and the fields that differ. The
    env is a PettingZoo env, or one like it, see :class:`~dmiddleware.env.GameEnv`.

    Example:
        >>> import pettingzoo
        >>> teams = {"home": ["player_0"], "away": ["player_1"]}
        >>> def make():
        ...     return pettingzoo.make("aec", "classic/rps-v2")
        >>> make_game(make, teams=teams, env_num=4)["home"].action_space
        Discrete(3)

    Raises:
        ConfigError: as of :func:`~dmiddleware.env.make_env_manager`, and of
            :class:`~dmiddleware.env.GameEnv` for teams that do not fit the env.
    """
    wrapper = partial(GameEnv, teams=settings.teams, flatten=settings.flatten)
    options = {field.name: getattr(settings, field.name) for field in fields(EnvSettings)}
    options["wrappers"] = (*settings.wrappers, wrapper)
    return Game(make_env_manager(EnvSettings(**options)))


class Game(Closing):
    """Games of teams, ``E`` at once, that one env manager steps.

    ``game["red"]`` has the envs of a team. Its spaces are those of one agent, and each agent of
    each game is an env of its own; ``game["red"].joint`` has the team in each game as an env of
    several agents, for policies such as MAPPO. A policy is built for either:
    ``PPOPolicy.for_env(game["red"])``, ``MAPPOPolicy.for_env(game["red"])``.

    All teams act in lockstep: stepping the envs of one team lets the seats of the others move, and
    then the games take one step. :meth:`seat` chooses them.

    Attributes:
        env_manager: steps the games, each a :class:`~dmiddleware.env.GameEnv`.
        env_num: the number of games, ``E``.
        results: of the games that ended in the last step, by number: each team's return, the mean
            of its agents'.
        begun: the games that have started again in the last step: those that ended, and those whose
            env failed.

    Args:
        env_manager: the games; :func:`make_game` makes them.

    Raises:
        ConfigError: if it is not an env manager of games.
    """

    @takes_options
    def __init__(self, env_manager: BaseEnvManager) -> None:
        check_env_manager(env_manager, user="Game")
        space = env_manager.observation_space
        if not is_game_space(space):
            raise ConfigError(
                f"Game takes an env manager of GameEnvs, but its envs observe {space}; make the "
                'game with make_game(make_env, teams={"red": ["red_*"], …}, env_num=8)'
            )
        self.env_manager = env_manager
        self.env_num = env_manager.env_num
        self._views: dict[tuple[str, bool], TeamEnvs] = {}
        self._seats: dict[str, Seat] = {}
        self._moves: dict[str, tuple[TeamEnvs, Any]] = {}
        self._leader = ""
        self._continues = False
        self._sizes = {team: flags.shape[0] for team, flags in _flag_spaces(space).items()}
        self._scores = np.zeros((self.env_num, len(self.teams)))
        self.results: dict[int, dict[str, float]] = {}
        self.begun: list[int] = []

    @property
    def teams(self) -> tuple[str, ...]:
        """The names of the teams, in the order of the columns of rewards."""
        return tuple(self._sizes)

    def __getitem__(self, team: str) -> TeamEnvs:
        """Return the envs of a team, one for each of its agents in each game."""
        return self.view(team, joint=False)

    def view(self, team: str, *, joint: bool) -> TeamEnvs:
        """Return the envs of a team: its agents, or, if ``joint``, the team in each game."""
        if team not in self.teams:
            near = nearest(str(team), self.teams)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"the game has no team {team!r}, but {', '.join(map(repr, self.teams))}{hint}"
            )
        key = team, joint
        if key not in self._views:
            self._views[key] = view = TeamEnvs(self, team, joint=joint)
            if not self.closed:
                view.begin()
        return self._views[key]

    def agents_before(self, team: str) -> tuple[int, int]:
        """Return the number of agents before a team's in the columns of rewards, and of its own."""
        before = list(self._sizes.values())[: self.teams.index(team)]
        return sum(before), self._sizes[team]

    def seat(self, leader: str, seats: Mapping[str, Seat]) -> None:
        """Choose what acts for the other teams when the envs of one team are stepped.

        Args:
            leader: the team whose envs are stepped; snapshots of these have the games.
            seats: what acts for each other team.

        Raises:
            ConfigError: if a team lacks a seat, or the game does not have it.
        """
        self[leader]
        for team in seats:
            self[team]
        if missing := [team for team in self.teams if team != leader and team not in seats]:
            raise ConfigError(
                f"nobody acts for the team {missing[0]!r}; name a policy, a function, a pool, or "
                '"random" for it'
            )
        if leader in seats:
            raise ConfigError(f"the team {leader!r} acts itself; leave it out of the others")
        self._leader, self._seats = leader, dict(seats)

    # Life

    @property
    def closed(self) -> bool:
        """Whether the games are closed."""
        return self.env_manager.closed

    def __enter__(self) -> Self:
        self.launch()
        return self

    def launch(self) -> None:
        """Make the games and reset them, unless they are launched already."""
        if self.closed:
            self.env_manager.launch()
            self._begin()

    def close(self) -> None:
        """Close the games; a second call does nothing."""
        self.env_manager.close()
        self._show()

    def reset(self) -> None:
        """Start new games in all envs."""
        self.env_manager.reset()
        self._begin()
        for seat in self._seats.values():
            seat.restart()

    def _begin(self) -> None:
        self._moves.clear()
        self._scores[:] = 0.0
        for view in self._views.values():
            view.begin()

    def _show(self) -> None:
        for view in self._views.values():
            view.show()

    def play(self, envs: TeamEnvs, actions: tuple[NestedArrays, ...]) -> None:
        """Let a team act; once all teams have, the games take a step.

        Args:
            envs: those of the team that it acts in.
            actions: of each agent, nested arrays ``[E, …]``.
        """
        try:
            self._moves[envs.team] = envs, actions
            waiting = next((name for name in self.teams if name not in self._moves), None)
            if waiting is not None:
                self._seat_of(waiting).move()
                if self._moves:
                    raise EnvStateError(f"the seat of team {waiting!r} has not stepped its envs")
                return
            timestep = self.env_manager.step({name: self._moves[name][1] for name in self.teams})
            acted = [view for view, _ in self._moves.values()]
            self._moves.clear()
            self._count(timestep)
            for view in self._views.values():
                view.take(timestep) if view in acted else view.miss()
        except BaseException:
            self._moves.clear()
            self._show()
            raise

    def _count(self, step: BatchedTimestep) -> None:
        for column, team in enumerate(self.teams):
            first, n_agent = self.agents_before(team)
            earned = step.reward[:, first : first + n_agent].mean(axis=1, dtype=np.float64)
            self._scores[step.env_id, column] += earned
        self.results = {
            game: dict(zip(self.teams, self._scores[game].tolist(), strict=True))
            for game in step.env_id[step.done].tolist()
        }
        self.begun = step.env_id[step.done | step.abnormal].tolist()
        self._scores[self.begun] = 0.0

    def _seat_of(self, team: str) -> Seat:
        if team not in self._seats:
            raise EnvStateError(
                f"nobody acts for the team {team!r}: step the envs of one team of the game in a "
                'TeamCollector, or take them from against(game, "red", {"blue": …})'
            )
        return self._seats[team]

    # State

    def state_of(self, team: str) -> dict[str, Any] | None:
        """Return the state of the games and seats for the leading team; None for another."""
        if team != (self._leader or self.teams[0]):
            return None
        return {
            "games": self.env_manager.state_dict(),
            "scores": self._scores.copy(),
            "seats": {name: seat.state_dict() for name, seat in self._seats.items()},
        }

    def load_state_of(self, team: str, state: Mapping[str, Any] | None) -> bool:
        """Restore what :meth:`state_of` returned; return whether the games continue."""
        if state is None:
            return self._continues
        self._continues = self.env_manager.load_state_dict(state["games"])
        self._begin()
        if self._continues:
            self._scores = np.array(state["scores"], np.float64)
        for name, seat in self._seats.items():
            if self._continues and name in state["seats"]:
                seat.load_state_dict(state["seats"][name])
            elif not self._continues:
                seat.restart()
        return self._continues


def _flag_spaces(space: gym.spaces.Dict[Any]) -> dict[str, Any]:
    flags: Any = space[FLAGS]
    return dict(flags.spaces)


class TeamEnvs(BaseEnvManager):
    """The envs of one team of a :class:`Game`: an env manager, for any policy and collector.

    Each agent of each game is an env of its own, ``E * A`` of them, game by game; agents that leave
    have a last row there that is terminated or truncated, and no rows while they are away. In
    turn-based games, an env has a row where its agent's turn comes again, or the agent leaves.
    Action masks are in the infos.

    :attr:`joint` is the team in each game as an env of several agents, as in
    :class:`~dmiddleware.env.ParallelEnvAdapter`; its episode ends where no agent is left. In
    turn-based games, a row lasts until the turn of any of them comes, and has the rewards that are
    known by then. Those that wait for their turn see what happens; they have one action more, the
    last, which only they may take.

    Stepping these envs makes the other teams act (:meth:`Game.seat`), and steps the games.
    ``call``, ``get_attr``, ``set_attr`` and reset options are those of the games.

    Attributes:
        acts: ``[E'] bool``: whose turn it is. Actions of the others are ignored.
        is_joint: whether an env is a whole team.

    Args:
        game: the game.
        team: the team.
        joint: whether an env is a whole team.

    Raises:
        SpaceError: for joint envs of a team whose agents' actions are not Discrete or a
            floating-point Box; if several of them take turns, for others than Discrete.
    """

    in_lockstep = True

    def __init__(self, game: Game, team: str, *, joint: bool) -> None:
        self._game, self.team, self.is_joint = game, team, joint
        self._first, self._n_agent = game.agents_before(team)
        super().__init__(game.env_num * (1 if joint else self._n_agent))
        self.failures = game.env_manager.failures
        spaces: Any = game.env_manager.observation_space
        self._joins_turns = joint and PRESENT in spaces.spaces
        self._can_wait = self._joins_turns and self._n_agent > 1
        # Of joint envs whose agents take turns: whether their row has begun, its rewards, and
        # whether an agent was truncated in it.
        self._is_begun = np.zeros(self.env_num, np.bool_)
        self._earned = np.zeros((self.env_num, self._n_agent))
        self._is_cut = np.zeros((self.env_num, self._n_agent), np.bool_)
        self._set_spaces(*self._probe_spaces())
        self.acts: BoolArray = np.ones(self.env_num, np.bool_)
        self._names: Sequence[str] = ()
        self._has_missed = False

    @property
    def joint(self) -> TeamEnvs:
        """The team in each game as an env of several agents."""
        return self._game.view(self.team, joint=True)

    # Life

    def launch(self) -> None:
        """Make the games and reset them, unless another team has."""
        self._game.launch()

    def close(self) -> None:
        """Close the games."""
        self._game.close()

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Start new games in all envs; some cannot be reset alone."""
        if env_ids is not None and set(self._checked_ids(env_ids)) != set(range(self.env_num)):
            raise EnvStateError(
                "the games of several teams are reset together; call reset() without env_ids, and "
                "collect steps rather than whole episodes"
            )
        self._game.reset()

    def begin(self) -> None:
        """See the first observations of new games in all envs; the game calls it."""
        manager = self._game.env_manager
        self._names = [str(agent) for agent in manager.get_attr("teams")[0][self.team]]
        self._clear_episodes()
        self._is_begun[:], self._earned[:], self._is_cut[:] = False, 0.0, False
        self.show()
        self._has_missed = False
        obs: Any = manager.ready_obs
        self._ready_obs, self.acts = self._obs_of(obs), self._acting(obs)
        self._ready_infos = self._infos_of(obs, manager.ready_info.rows())

    def show(self) -> None:
        """Take over whether the games are open, and what is counted of them."""
        manager = self._game.env_manager
        self._open, self.revision = not manager.closed, manager.revision
        self.dropped_steps = manager.dropped_steps

    def seed(self, seed: int | Sequence[int], dynamic_seed: bool = True) -> None:
        """Seed the games; ``E`` integers give each a seed of its own."""
        self._game.env_manager.seed(seed, dynamic_seed)

    def sample_actions(self) -> NestedArrays:
        """Draw one random action for every env, from the seeded action space of the games."""
        drawn: Any = self._game.env_manager.sample_actions()
        return self._rows_of(drawn[self.team])

    # Stepping

    def step(self, actions: NestedArrays | Mapping[int, Any]) -> BatchedTimestep:
        """Let all teams act, and step the games; see :meth:`BaseEnvManager.step`.

        Rows that are not valid are those of agents whose transition is not complete.
        """
        self._require_open("step")
        ids, batch = self._assign(actions)
        if ids is not None:
            raise StructureError("the envs of a team are stepped together; give one row per env")
        if self._has_missed:
            raise EnvStateError(
                f"the games of team {self.team!r} were stepped without these envs; reset them, or "
                "make a game for each collector and evaluator"
            )
        self._game.play(self, self._by_agent(batch))
        return self._timestep

    def miss(self) -> None:
        """Note that the team has acted in other envs of the games; the game calls it."""
        self._has_missed = True
        self.show()

    def take(self, step: BatchedTimestep) -> None:
        """Take the team's rows of a step of the games; the game calls it."""
        order = slice(None) if step.is_full else np.argsort(step.env_id)
        next_all: Any = map_arrays(lambda array: array[order], step.next_obs)
        ready_all: Any = map_arrays(lambda array: array[order], step.ready_obs)
        agents = slice(self._first, self._first + self._n_agent)
        reward = step.reward[order, agents]
        closed, terminated, truncated = (
            next_all[FLAGS][self.team].astype(np.bool_).transpose(2, 0, 1)
        )
        abnormal = step.abnormal[order]
        next_obs = self._obs_of(next_all)
        if self.is_joint:
            present = next_obs[AGENT_MASK]
            valid = closed.any(axis=1)
            if self._joins_turns:
                reward, truncated, valid = self._rows_of_turns(
                    next_all, reward, truncated, abnormal
                )
            done = valid & ~present.any(axis=1)
            is_cut = truncated.any(axis=1)
            # Nothing follows for those that have left, but for those that a limit has cut off.
            present[done] = truncated[done]
            terminated, truncated = done & ~is_cut, done & is_cut
        else:
            abnormal = np.repeat(abnormal, self._n_agent)
            reward, valid = reward.reshape(-1), closed.reshape(-1)
            # One that leaves before it has acted has no row.
            terminated, truncated = (flag.reshape(-1) & valid for flag in (terminated, truncated))
            done = terminated | truncated
        self._totals.add(None if valid.all() else np.flatnonzero(valid).tolist(), reward[valid])
        if abnormal.any():
            self._totals.clear(np.flatnonzero(abnormal).tolist())
        rows = [*step.infos] if isinstance(step.infos, Sequence) else step.infos.rows()
        rows = rows if step.is_full else [rows[row] for row in np.argsort(step.env_id)]
        infos = self._infos_of(next_all, rows)
        returns = []
        for row in np.flatnonzero(done).tolist():
            infos[row] = {**self._totals.end(row), **infos[row]}
            returns.append(infos[row]["eval_episode_return"])
        self._become_ready(ready_all)
        self.show()
        self._timestep = BatchedTimestep(
            self._all_ids,
            self._ready_obs,
            next_obs,
            np.ascontiguousarray(reward),
            done,
            terminated,
            truncated,
            abnormal,
            valid,
            infos,
            bool(valid.all()),
            returns,
        )

    def _rows_of_turns(
        self,
        next_obs: Any,
        reward: npt.NDArray[np.float32],
        truncated: BoolArray,
        abnormal: BoolArray,
    ) -> tuple[npt.NDArray[np.float32], BoolArray, BoolArray]:
        """Return the rewards and truncations ``[E, A]`` of rows, and which rows are complete."""
        begun = self._is_begun = (self._is_begun | self.acts) & ~abnormal
        self._earned = np.where(begun[:, np.newaxis], self._earned + reward, 0.0)
        self._is_cut = (self._is_cut | truncated) & begun[:, np.newaxis]
        goes_on = self._of_agents(next_obs[PRESENT]).any(axis=1)
        valid: BoolArray = begun & (self._acting(next_obs) | ~goes_on)
        ends = valid[:, np.newaxis]
        earned = np.where(ends, self._earned, 0.0).astype(reward.dtype)
        is_cut: BoolArray = self._is_cut & ends
        self._is_begun = begun & ~valid
        self._earned[valid], self._is_cut[valid] = 0.0, False
        return earned, is_cut, valid

    def _become_ready(self, obs: Any) -> None:
        """Show the observations of those that act next; the others keep what they acted on."""
        ready, self.acts = self._obs_of(obs), self._acting(obs)
        infos = self._infos_of(obs, self._game.env_manager.ready_info.rows())
        if self.acts.all():
            self._ready_obs, self._ready_infos = ready, infos
            return
        act = np.flatnonzero(self.acts)
        chosen = map_arrays(lambda array: array[act], ready)
        self._ready_obs = replace_rows(self._ready_obs, act, chosen)
        self._replace_infos(act.tolist(), [infos[row] for row in act])

    def _acting(self, obs: Any) -> BoolArray:
        mask = self._of_agents(obs[AGENT_MASK]) != 0
        acting: BoolArray = mask.any(axis=1) if self.is_joint else mask.reshape(-1)
        return acting

    def _of_agents(self, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the columns of the team's agents of ``[E, N]``."""
        return column[:, self._first : self._first + self._n_agent]

    def _obs_of(self, obs: Any) -> Any:
        agents = self._rows_of(obs[AGENTS][self.team])
        if not self.is_joint:
            return agents
        mask = self._of_agents(obs[PRESENT if self._joins_turns else AGENT_MASK])
        joined = {AGENTS: agents, AGENT_MASK: mask.copy()}
        if STATE in obs:
            joined[STATE] = obs[STATE]
        if self.team in obs.get(ACTION_MASK, ()):
            joined[ACTION_MASK] = obs[ACTION_MASK][self.team]
        if self._can_wait:
            joined[ACTION_MASK] = self._masks_of_turns(obs, joined.get(ACTION_MASK))
        return joined

    def _masks_of_turns(self, obs: Any, masks: npt.NDArray[np.int8] | None) -> npt.NDArray[np.int8]:
        """Return masks ``[E, A, n]`` that allow agents that wait the last action alone."""
        space: Any = self.observation_space
        waits = self._of_agents(obs[PRESENT] > obs[AGENT_MASK])
        joined = np.ones((self.env_num, *space[ACTION_MASK].shape), np.int8)
        if masks is not None:
            joined[..., :-1] = masks
        joined[waits] = 0
        joined[..., -1] = waits
        return joined

    def _infos_of(self, obs: Any, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the infos of the rows: those of the agents, and their action masks."""
        if self.is_joint:
            names = set(self._names)
            return [{name: row[name] for name in row if name in names} for row in rows]
        infos: list[Mapping[str, Any]] = [row.get(name, {}) for row in rows for name in self._names]
        if self.team in obs.get(ACTION_MASK, ()):
            masks = self._as_rows(obs[ACTION_MASK][self.team])
            infos = [{**info, ACTION_MASK: mask} for info, mask in zip(infos, masks, strict=True)]
        return infos

    def _rows_of(self, parts: tuple[NestedArrays, ...]) -> NestedArrays:
        """Return what the agents have, nested arrays ``[E, …]`` each, as rows of these envs."""
        return map_arrays(lambda *arrays: self._as_rows(np.stack(arrays, axis=1)), *parts)

    def _as_rows(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array if self.is_joint else array.reshape(self.env_num, *array.shape[2:])

    def _by_agent(self, rows: NestedArrays) -> tuple[NestedArrays, ...]:
        """Return rows of these envs as each agent's, ``[E, …]``."""
        if self._can_wait:
            # The game does not have the action of waiting.
            spaces: Any = self.action_space
            ready: Any = self._ready_obs
            rows = np.where(ready[ACTION_MASK][..., -1] != 0, spaces.start, rows)
        if self.is_joint:
            return tuple(
                map_arrays(lambda array, at=agent: array[:, at], rows)
                for agent in range(self._n_agent)
            )
        return tuple(
            map_arrays(lambda array, at=agent: array[at :: self._n_agent], rows)
            for agent in range(self._n_agent)
        )

    # What the games have

    @property
    def resumable(self) -> bool:
        """Whether the games can be continued from a state."""
        return self._game.env_manager.resumable

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every game; see :meth:`BaseEnvManager.call`."""
        return self._game.env_manager.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> list[Any]:
        """Return an attribute of every game; see :meth:`BaseEnvManager.get_attr`."""
        return self._game.env_manager.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every game; see :meth:`BaseEnvManager.set_attr`."""
        self._game.env_manager.set_attr(name, values)

    def set_reset_options(
        self, options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    ) -> None:
        """Set the options of the games' resets; see :meth:`BaseEnvManager.set_reset_options`."""
        self._game.env_manager.set_reset_options(options)

    def render(self, env_ids: Iterable[int] | None = None) -> list[Frame]:
        """Return an image of each env's game."""
        per_game = 1 if self.is_joint else self._n_agent
        games = [env_id // per_game for env_id in self._checked_ids(env_ids)]
        images = dict(zip(set(games), self._game.env_manager.render(set(games)), strict=True))
        return [images[game] for game in games]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue the games; of one team, that leads, the games too."""
        self._require_open("state_dict")
        begun = self._is_begun, self._earned, self._is_cut
        return {
            "game": self._game.state_of(self.team),
            "ready_obs": map_arrays(np.copy, self._ready_obs),
            "ready_infos": encode_infos(self._ready_rows()),
            "totals": self._totals.state_dict(),
            "begun": [a.copy() for a in begun] if self._joins_turns else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state; that of the leading team first. See :meth:`BaseEnvManager`."""
        self._require_open("load_state_dict")
        if not self._game.load_state_of(self.team, state["game"]):
            return False
        self._ready_obs = map_arrays(np.array, state["ready_obs"])
        self._ready_infos = decode_infos(state["ready_infos"])
        self._totals.load_state_dict(state["totals"])
        if self._joins_turns:
            self._is_begun, self._earned, self._is_cut = map(np.array, state["begun"])
        self.show()
        return True

    def _probe_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        manager = self._game.env_manager
        spaces: Any = manager.observation_space
        actions: Any = manager.action_space
        pair = spaces[AGENTS][self.team][0], actions[self.team][0]
        if not self.is_joint:
            return pair
        state = spaces.spaces.get(STATE)
        has_masks = self.team in spaces.spaces.get(ACTION_MASK, {})
        observation, action = pair
        if self._can_wait:
            if not isinstance(action, gym.spaces.Discrete):
                raise SpaceError(
                    f"the agents of team {self.team!r} take turns, and their actions are of "
                    f"{action}; to learn joint actions, of which one waits, they need Discrete "
                    "ones. Learn with an algorithm of a single agent, such as PPO or SAC"
                )
            action = gym.spaces.Discrete(int(action.n) + 1, start=int(action.start))
            has_masks = True
        try:
            return team_spaces(
                AgentSpaces(self._n_agent, observation, action, state), has_action_masks=has_masks
            )
        except SpaceError as error:
            raise SpaceError(f"team {self.team!r}: {error}") from error

    def _access(self, accesses: list[Access]) -> list[Any]:
        raise NotImplementedError

    def _env_states(self) -> list[dict[str, Any] | None]:
        raise NotImplementedError

    def _set_env_states(self, states: Sequence[Any]) -> None:
        raise NotImplementedError
