"""What battle collectors share: games, one policy per player, and the players' transitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from dmiddleware.classic import BattleEnvManager, CollectMode, as_collect_mode, game_result
from dmiddleware.classic.battle_stepper import BattleStep, BattleStepper
from dmiddleware.policy import HasModes
from dmiddleware.worker.battles import checked_battle_env, checked_policies
from dmiddleware.worker.collector.serial_collector import (
    ISerialCollector,
    Transition,
    to_float,
)
from dmiddleware.worker.collector.transitions import (
    plain_samples,
    samples_of,
    to_tensor_transitions,
)
from dmiddleware.worker.serial_worker import spread

__all__ = ["BattleCollector"]


class BattleCollector(ISerialCollector[tuple[CollectMode, ...], BattleEnvManager]):
    """A collector of games, with one policy per player.

    A player's transition runs from its own move to its own next turn: ``reward`` is the sum of the
    rewards in between, ``next_obs`` what it sees then, or at the end of the game. Where a game
    fails, the unfinished trajectories of all its players are dropped, and counted.

    Args:
        cfg: see :class:`ISerialCollector`.
        env: a :class:`BattleEnvManager`.
        policy: a list of policies, or their collect modes, one per player. In self-play it names
            the same policy more than once.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    n_policy: ClassVar[int | None] = None
    """Number of policies; None: two or more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stepper: BattleStepper | None = None
        # By game and player: the transitions of the unfinished trajectory.
        self._gathered: dict[int, list[list[Transition]]] = {}

    def reset_policy(self, _policy: Sequence[HasModes | CollectMode] | None = None) -> None:
        """Clear the policies' states of the collect mode, or use others from now on."""
        if _policy is None:
            for mode in self.policy:
                mode.reset()
            return
        self._policy = self._as_mode(_policy)
        self._start_over()

    def reset(
        self,
        _policy: Sequence[HasModes | CollectMode] | None = None,
        _env: BattleEnvManager | None = None,
    ) -> None:
        """Start fresh games, with other policies or in other envs if given; totals stay."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        if _env is not None:
            self._env = self._checked_env(_env)
        self._clear_stats()
        self._drop_kept()
        self._start_over()
        if self._stepper is None and _env is not None and _env.closed:
            _env.launch()

    def state_dict(self) -> dict[str, Any]:
        """Return totals, data kept between calls, and the state of the games."""
        return {
            **super().state_dict(),
            "stepper": None if self._stepper is None else self._stepper.state_dict(),
            "gathered": {
                str(env_id): [plain_samples(rows) for rows in players]
                for env_id, players in self._gathered.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; statistics are cleared.

        If the games cannot continue, the transitions of unfinished episodes are dropped, and
        counted.
        """
        super().load_state_dict(state)
        self._gathered = {
            int(env_id): [samples_of(rows) for rows in players]
            for env_id, players in state["gathered"].items()
        }
        if state["stepper"] is not None and not self._core().load_state_dict(state["stepper"]):
            self._drop_unfinished()

    def _as_mode(self, policy: Sequence[HasModes | CollectMode]) -> tuple[CollectMode, ...]:
        user = type(self).__name__
        policies = checked_policies(policy, user=user, n_policy=self.n_policy)
        return tuple(as_collect_mode(one, user=user) for one in policies)

    def _checked_env(self, env: BattleEnvManager) -> BattleEnvManager:
        return checked_battle_env(env, user=type(self).__name__)

    def _core(self) -> BattleStepper:
        if self._stepper is None:
            self._stepper = self._make_stepper()
        return self._stepper

    def _make_stepper(self) -> BattleStepper:
        convert = to_float if self._cfg.transform_obs else None
        return BattleStepper(self.policy, self.env, user=type(self).__name__, convert=convert)

    def _begin_call(self) -> BattleStepper:
        core = self._core()
        if core.begin():
            self._drop_unfinished()
        self._infos: list[list[dict[str, Any]]] = [[] for _ in self.policy]
        return core

    def _advance(
        self,
        policy_kwargs: Sequence[Mapping[str, Any]],
        train_iter: int,
        *,
        only: Collection[int] | None = None,
    ) -> list[BattleStep]:
        """Step the games once, and gather the transitions of the players."""
        steps = self._core().step(policy_kwargs, only=only)
        for step in steps:
            env_id = step.timestep.env_id
            if step.timestep.abnormal:
                self._n_dropped += sum(map(len, self._gathered.pop(env_id, ())))
                continue
            players = self._gathered.setdefault(env_id, [[] for _ in self.policy])
            for player, turn in step.turns.items():
                mode = self.policy[player]
                if self._collects(mode):
                    row = mode.process_transition(turn.obs, turn.output, turn.timestep)
                    players[player].append(
                        {**row, "episode_id": step.episode_id, "collect_iter": train_iter}
                    )
            if step.timestep.done:
                self._record_end(step.timestep.info)
        return steps

    def _collects(self, mode: CollectMode) -> bool:
        """Return whether a player's transitions are stored."""
        return True

    def _tensors(self, rows: list[Transition]) -> list[Transition]:
        return self._finished(to_tensor_transitions(rows, not self._cfg.deepcopy_obs))

    def _record_end(self, infos: Sequence[dict[str, Any]]) -> None:
        for player, info in enumerate(infos):
            self._infos[player].append(info)
            self._player_returns[player].append(float(info["eval_episode_return"]))
        self._results[game_result(infos[0])] += 1

    def _start_over(self) -> None:
        self._drop_unfinished()
        if self._stepper is None:
            return
        before, self._stepper = self._stepper, self._make_stepper()
        self._stepper.env_step, self._stepper.env_episode = before.env_step, before.env_episode
        self._stepper.begin()

    def _drop_unfinished(self) -> None:
        for players in self._gathered.values():
            self._n_dropped += sum(map(len, players))
        self._gathered.clear()

    def _drop_kept(self) -> None:
        """Drop finished data that was kept for the next call."""

    def _clear_stats(self) -> None:
        super()._clear_stats()
        self._player_returns: dict[int, list[float]] = defaultdict(list)
        self._results: Counter[str] = Counter()

    def _battle_stats(self) -> dict[str, float]:
        """Return the returns of each player, and how often player 0 won, drew and lost."""
        stats: dict[str, float] = {}
        for player, returns in self._player_returns.items():
            stats |= spread(f"reward{player}", returns)
        counts = {"win": "wins", "draw": "draws", "loss": "losses"}
        return stats | {f"{name}_count": self._results[key] for name, key in counts.items()}
