"""A battle collector that returns a number of training samples for every player."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dmiddleware.classic import CollectMode
from dmiddleware.classic.modes import collects_data
from dmiddleware.errors import ConfigError
from dmiddleware.worker.battles import per_player
from dmiddleware.worker.collector.battle_collector import BattleCollector
from dmiddleware.worker.collector.serial_collector import SERIAL_COLLECTOR_REGISTRY, Transition
from dmiddleware.worker.collector.transitions import (
    check_fruitful,
    plain_samples,
    samples_of,
    trajectory_length,
)

__all__ = ["BattleSampleSerialCollector"]


@SERIAL_COLLECTOR_REGISTRY.register("battle_sample")
@SERIAL_COLLECTOR_REGISTRY.register("sample_1v1")
class BattleSampleSerialCollector(BattleCollector):
    """Collects training samples of two or more players.

    Trajectories are cut as by :class:`SampleSerialCollector`. A policy whose attribute
    ``collect_data`` is False (``mode.set_attribute("collect_data", False)``) plays, but its
    transitions are not stored.

    Args:
        cfg: see :class:`ISerialCollector`.
        env: a :class:`BattleEnvManager`.
        policy: a list of policies, or their collect modes, one per player.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._extra: dict[int, list[Transition]] = {}

    @property
    def n_extra(self) -> list[int]:
        """Samples of each player that the last call cut off; the next call returns them first."""
        return [len(self._extra.get(player, ())) for player in range(len(self.policy))]

    def collect(  # type: ignore[override]
        self,
        n_sample: int | None = None,
        train_iter: int = 0,
        drop_extra: bool = True,
        policy_kwargs: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    ) -> tuple[list[list[Transition]], list[list[dict[str, Any]]]]:
        """Collect until every player that collects has enough training samples.

        Args:
            n_sample: number of samples per player; None takes the ``n_sample`` of the first policy
                that collects.
            train_iter: the policy's iteration, stored in each transition as ``collect_iter``.
            drop_extra: return exactly ``n_sample`` for each player, and keep the rest for the next
                call. False returns the rest too.
            policy_kwargs: passed to the policies' forwards; a list has one for each player.

        Returns:
            Two lists by player: samples (none of players that do not collect), and the last infos
            of the episodes that ended.

        Raises:
            ConfigError: if ``n_sample`` is not set or not positive, no player collects, or
                ``policy_kwargs`` does not fit the players.
            PolicyOutputError: if a policy returns something other than its interface says, or a
                player had no samples for 10,000 trajectories in a row.
            EnvCrashed: if a game keeps failing.
        """
        players = [player for player, mode in enumerate(self.policy) if self._collects(mode)]
        if not players:
            raise ConfigError(
                f"no player of {self} collects, since collect_data is False for all policies; call "
                'mode.set_attribute("collect_data", True) for one of them'
            )
        target = self._target(n_sample, "n_sample", self.policy[players[0]])
        kwargs = per_player(policy_kwargs, len(self.policy))
        core = self._begin_call()
        began, steps, episodes = time.perf_counter(), core.env_step, core.env_episode
        length = {
            player: trajectory_length(self.policy[player], target, self.env.env_num)
            for player in players
        }
        samples = {player: self._extra.setdefault(player, []) for player in players}
        n_kept = sum(map(len, samples.values()))
        n_fruitless = dict.fromkeys(players, 0)
        while any(len(own) < target for own in samples.values()):
            for step in self._advance(kwargs, train_iter):
                for player in players:
                    found = self._take(step.timestep.env_id, player, length[player],
                                       is_end=step.timestep.done)  # fmt: skip
                    if found is None:
                        continue
                    samples[player] += found
                    n_fruitless[player] = 0 if found else n_fruitless[player] + 1
                    if len(samples[player]) < target:
                        check_fruitful(n_fruitless[player])
        n_made = sum(map(len, samples.values())) - n_kept
        data: list[list[Transition]] = [[] for _ in self.policy]
        for player, own in samples.items():
            n_taken = target if drop_extra else len(own)
            data[player], self._extra[player] = own[:n_taken], own[n_taken:]
        self._count(core.env_step - steps, core.env_episode - episodes, n_made, began)
        self._log(train_iter, {**self._battle_stats(), "extra_sample_count": sum(self.n_extra)})
        return data, self._infos

    def _collects(self, mode: CollectMode) -> bool:
        return collects_data(mode)

    def _take(
        self, env_id: int, player: int, length: float, *, is_end: bool
    ) -> list[Transition] | None:
        """Return the samples of a player's trajectory in a game; None: it continues."""
        trajectories = self._gathered.get(env_id)
        if trajectories is None or not (is_end or len(trajectories[player]) >= length):
            return None
        rows, trajectories[player] = trajectories[player], []
        if not rows:
            return []
        samples: list[Transition] = self.policy[player].get_train_sample(self._tensors(rows))
        return samples

    def _drop_kept(self) -> None:
        self._extra = {}

    def state_dict(self) -> dict[str, Any]:
        """Return totals, extra samples, gathered transitions, and the state of the games."""
        extra = {str(player): plain_samples(own) for player, own in self._extra.items()}
        return {**super().state_dict(), "extra": extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; statistics are cleared."""
        super().load_state_dict(state)
        self._extra = {int(player): samples_of(own) for player, own in state["extra"].items()}
