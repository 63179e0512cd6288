"""A battle collector that returns whole episodes of two players."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from dmiddleware.classic.config import Option, switch
from dmiddleware.rollout.collector import even_shares
from dmiddleware.worker.battles import per_player
from dmiddleware.worker.collector.battle_collector import BattleCollector
from dmiddleware.worker.collector.serial_collector import SERIAL_COLLECTOR_REGISTRY, Transition
from dmiddleware.worker.collector.transitions import plain_samples, samples_of

__all__ = ["BattleEpisodeSerialCollector"]


@SERIAL_COLLECTOR_REGISTRY.register("battle_episode")
@SERIAL_COLLECTOR_REGISTRY.register("episode_1v1")
class BattleEpisodeSerialCollector(BattleCollector):
    """Collects whole episodes of two players, without favoring short ones.

    Args:
        cfg: see :class:`ISerialCollector`; with ``get_train_sample=True`` each player's policy
            turns its episodes into training samples.
        env: a :class:`BattleEnvManager`.
        policy: a list of two policies, or their collect modes.
        tb_logger: a tensorboardX ``SummaryWriter``.
        exp_name: folder for the output.
        instance_name: distinguishes collectors in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "get_train_sample": Option(
            False, switch, "whether to return training samples instead of episodes"
        )
    }
    n_policy: ClassVar[int | None] = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Finished episodes, in the order of their ends: game, transitions and infos by player.
        self._ended: list[tuple[int, list[list[Transition]], list[dict[str, Any]]]] = []
        self._n_extra = 0

    def collect(  # type: ignore[override]
        self,
        n_episode: int | None = None,
        train_iter: int = 0,
        policy_kwargs: Mapping[str, Any] | list[Mapping[str, Any]] | None = None,
    ) -> tuple[list[list[Any]], list[list[dict[str, Any]]]]:
        """Collect episodes: a fixed share from every game.

        Args:
            n_episode: number of episodes; None takes the first policy's ``n_episode``.
            train_iter: the policy's iteration, stored in each transition as ``collect_iter``.
            policy_kwargs: passed to the policies' forwards; a list has one for each player.

        Returns:
            Two lists by player: the episodes, each a list of transitions, or with
            ``get_train_sample=True`` the samples of all episodes in one list; and the last info of
            each episode.

        Raises:
            ConfigError: if ``n_episode`` is not set or not positive, or ``policy_kwargs`` does not
                fit the players.
            PolicyOutputError: if a policy returns something other than its interface says.
            EnvCrashed: if a game keeps failing.
        """
        target = self._target(n_episode, "n_episode", self.policy[0])
        kwargs = per_player(policy_kwargs, len(self.policy))
        core = self._begin_call()
        began, steps, episodes = time.perf_counter(), core.env_step, core.env_episode
        shares, self._n_extra = even_shares(target, self.env.env_num, self._n_extra)
        # An earlier call that raised may have left episodes.
        n_ended = Counter(env_id for env_id, _, _ in self._ended)
        while lacking := [env_id for env_id, share in enumerate(shares) if n_ended[env_id] < share]:
            for step in self._advance(kwargs, train_iter, only=lacking):
                if step.timestep.done:
                    env_id = step.timestep.env_id
                    rows = self._gathered.pop(env_id)
                    self._ended.append((env_id, rows, step.timestep.info))
                    n_ended[env_id] += 1
        data, infos = self._take(dict(enumerate(shares.tolist())))
        n_samples = sum(map(len, data[0]))
        if self._cfg.get_train_sample:
            data = [self._samples_of(player, own) for player, own in enumerate(data)]
            n_samples = len(data[0])
        self._count(core.env_step - steps, core.env_episode - episodes, n_samples, began)
        self._log(train_iter, self._battle_stats())
        return data, infos

    def _take(
        self, shares: dict[int, int]
    ) -> tuple[list[list[list[Transition]]], list[list[dict[str, Any]]]]:
        """Take each game's share out of the finished episodes."""
        kept = []
        data: list[list[list[Transition]]] = [[] for _ in self.policy]
        infos: list[list[dict[str, Any]]] = [[] for _ in self.policy]
        for env_id, rows, last in self._ended:
            if shares[env_id] == 0:
                kept.append((env_id, rows, last))
                continue
            shares[env_id] -= 1
            for player, info in enumerate(last):
                data[player].append(self._tensors(rows[player]))
                infos[player].append(info)
        self._ended = kept
        return data, infos

    def _samples_of(self, player: int, episodes: list[list[Transition]]) -> list[Any]:
        samples: list[Any] = []
        for episode in episodes:
            # A game may end before a player's first move.
            if episode:
                samples += self.policy[player].get_train_sample(episode)
        return samples

    def _drop_kept(self) -> None:
        for _, rows, _ in self._ended:
            self._n_dropped += sum(map(len, rows))
        self._ended = []

    def state_dict(self) -> dict[str, Any]:
        """Return totals, data kept between calls, and the state of the games."""
        ended = [
            [env_id, [plain_samples(own) for own in rows], infos]
            for env_id, rows, infos in self._ended
        ]
        return {**super().state_dict(), "ended": ended, "n_extra": self._n_extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; statistics are cleared."""
        super().load_state_dict(state)
        self._n_extra = state["n_extra"]
        self._ended = [
            (env_id, [samples_of(own) for own in rows], list(infos))
            for env_id, rows, infos in state["ended"]
        ]
