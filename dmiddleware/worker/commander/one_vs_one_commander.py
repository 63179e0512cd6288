"""The commander of a training by self-play, in games of two players."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from dmiddleware.errors import ConfigError
from dmiddleware.worker.commander.base import COMMANDER_REGISTRY, Task
from dmiddleware.worker.commander.solo_commander import SoloCommander
from dmiddleware.worker.league import OneVsOneLeague

__all__ = ["OneVsOneCommander"]

_EVAL_WIN_RATE: Final = 0.7


@COMMANDER_REGISTRY.register("one_vs_one")
class OneVsOneCommander(SoloCommander):
    """Trains a player against itself and its snapshots, as a league chooses.

    Two policies play in a collector task; one plays against the opponent that the env has in an
    evaluation, for collectors of the type ``marine``. More than 70% wins in an evaluation make that
    opponent harder. The training ends when an evaluation against the hardest one reaches
    ``stop_value`` of the env.

    A policy's file must be below the league's ``path_policy``, where the learner publishes it, so
    this needs workers that share files (``flask_fs``). ``env.collector_id`` and ``evaluator_id``
    are the game and the env with an opponent, where these differ.

    Args:
        cfg: the main config; see :class:`BaseParallelCommander`. The league's options are in
            ``policy.other.commander.league``.
        clock: returns the time in seconds.

    Raises:
        ConfigError: for an unusable config, also of the policy or the league.
    """

    config: ClassVar[dict[str, Any]] = {
        "collector_task_space": 2,
        "league": OneVsOneLeague.config,
    }
    config_open: ClassVar[tuple[str, ...]] = ("league",)

    def __init__(
        self, cfg: Mapping[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(cfg, clock=clock)
        self._league = OneVsOneLeague(self._cfg.league)
        if len(self._league.active_players) > 1:
            raise ConfigError(
                "one_vs_one trains one player, but the league has "
                f"{len(self._league.active_players)} active ones; set player_category to one name "
                "and active_players.naive_sp_player=1"
            )
        self._player_id = self._league.active_players[0].player_id
        self._jobs: dict[str, dict[str, Any]] = {}
        self._is_hardest = False

    @property
    def league(self) -> OneVsOneLeague:
        """The league."""
        return self._league

    def get_collector_task(self) -> Task | None:
        """Return a task that plays the league's next job."""
        task = super().get_collector_task()
        if task is None:
            return None
        collector_cfg = task["collector_cfg"]
        eval_flag = collector_cfg["eval_flag"]
        job = self._league.get_job_info(self._player_id, eval_flag)
        self._jobs[task["task_id"]] = job
        n_players = len(job["player_id"])
        collector_cfg["policy"] = [collector_cfg["policy"]] * n_players
        collector_cfg["collect_setting"] = [collector_cfg["collect_setting"]] * n_players
        collector_cfg["policy_update_path"] = job["checkpoint_path"]
        collector_cfg["policy_update_flag"] = job["player_active_flag"]
        if job.get("eval_opponent") is not None:
            env = collector_cfg["env"]
            env["kwargs"] = {**env.get("kwargs", {}), "eval_opponent": job["eval_opponent"]}
        return task

    def get_learner_task(self) -> Task | None:
        """Return a task for the player's policy, which starts from the league's checkpoint."""
        task = super().get_learner_task()
        if task is None:
            return None
        self._league.set_checkpoint(self._player_id, task["policy_id"])
        task["league_save_checkpoint_path"] = task["policy_id"]
        pretrained = self._league.pretrain_checkpoint(self._player_id)
        if pretrained is not None:
            hook = task["learner_cfg"].setdefault("hook", {})
            hook["load_ckpt_before_run"] = pretrained
        return task

    def finish_collector_task(self, task_id: str, result: Mapping[str, Any]) -> bool:
        """Report the games to the league; return True to end the training."""
        job = self._jobs.pop(task_id, None)
        if job is None:
            self._logger.warning("%s is not a job of the league; its games do not count", task_id)
            self._is_hardest = False
            return super().finish_collector_task(task_id, result)
        self._is_hardest = self._league.is_hardest(self._player_id)
        games = result.get("game_result", [])
        if result.get("eval_flag"):
            results = [game for env in games for game in env]
            eval_win = bool(results) and results.count("wins") / len(results) > _EVAL_WIN_RATE
            self._league.update_active_player({"player_id": self._player_id, "eval_win": eval_win})
        else:
            self._league.finish_job({"player_id": job["player_id"], "result": games})
        return super().finish_collector_task(task_id, result)

    def _has_converged(self, eval_value: float) -> bool:
        return self._is_hardest and super()._has_converged(eval_value)

    def notify_fail_collector_task(self, task: Mapping[str, Any]) -> None:
        """Forget the job of a task that has failed or expired for good."""
        super().notify_fail_collector_task(task)
        self._jobs.pop(task.get("task_id", ""), None)

    def update_learner_info(self, task_id: str, info: Mapping[str, Any]) -> None:
        """Take the player's progress, and keep a snapshot if it is time for one."""
        super().update_learner_info(task_id, info)
        if "learner_step" in info:
            progress = {"player_id": self._player_id, "train_iteration": info["learner_step"]}
            self._league.update_active_player(progress)
            self._league.judge_snapshot(self._player_id)

    def finish_learner_task(self, task_id: str, result: Mapping[str, Any]) -> str | None:
        """Keep a last snapshot of the player; return the buffer, to be closed."""
        self._league.judge_snapshot(self._player_id, force=True)
        return super().finish_learner_task(task_id, result)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a commander in another process needs to continue, as plain values."""
        jobs = {task_id: dict(job) for task_id, job in self._jobs.items()}
        return {**super().state_dict(), "league": self._league.state_dict(), "jobs": jobs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._league.load_state_dict(state["league"])
        self._jobs = {task_id: dict(job) for task_id, job in state["jobs"].items()}
