"""An evaluator that plays games between policies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dmiddleware.classic import BattleEnvManager, EvalMode, as_eval_mode, game_result
from dmiddleware.classic.battle_stepper import BattleStepper
from dmiddleware.classic.config import Option, count
from dmiddleware.policy import HasModes
from dmiddleware.rollout.episode_watch import EpisodeWatch
from dmiddleware.rollout.evaluation import VectorEvalMonitor
from dmiddleware.worker.battles import checked_battle_env, checked_policies
from dmiddleware.worker.evaluator.serial_evaluator import (
    SERIAL_EVALUATOR_REGISTRY,
    EpisodeEvaluator,
    SaveCkpt,
)

__all__ = ["BattleInteractionSerialEvaluator"]


@SERIAL_EVALUATOR_REGISTRY.register("battle_interaction")
class BattleInteractionSerialEvaluator(EpisodeEvaluator[tuple[EvalMode, ...], BattleEnvManager]):
    """Plays whole games greedily, a fixed share in each env, and judges player 0.

    With several ranks, rank 0 plays and broadcasts the results.

    Args:
        cfg: what differs from ``default_config()``:

            - ``eval_freq``: training iterations between evaluations;
            - ``n_episode``: episodes per evaluation, at least one per env;
            - ``stop_value``: mean return of player 0 at which to stop; None: never.
        env: a :class:`BattleEnvManager`.
        policy: a list of policies, or their eval modes, one per player.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one on first use.
        exp_name: folder for the output.
        instance_name: distinguishes evaluators in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "eval_freq": Option(50, count, "training iterations between evaluations")
    }

    def reset_policy(self, _policy: Sequence[HasModes | EvalMode] | None = None) -> None:
        """Clear the policies' states of the eval mode, or evaluate others from now on."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        for mode in self.policy:
            mode.reset()

    def eval(
        self,
        save_ckpt_fn: SaveCkpt | None = None,
        train_iter: int = -1,
        envstep: int = -1,
        n_episode: int | None = None,
    ) -> tuple[bool, list[list[dict[str, Any]]]]:
        """Evaluate.

        Args:
            save_ckpt_fn: called with a file name when player 0's mean return is the best so far.
            train_iter: training iterations so far; negative: unknown.
            envstep: env steps so far; negative: unknown.
            n_episode: number of episodes; None takes ``cfg.n_episode``.

        Returns:
            Whether to stop (player 0's mean return has reached ``stop_value``, and ``train_iter``
            is positive), and for each player the last infos of all episodes.

        Raises:
            ConfigError: if the number of episodes is not set, or below the number of games.
            EnvCrashed: if a game keeps failing.
            DMiddlewareError: on the other ranks, if rank 0 failed.
        """
        self._check_save_fn(save_ckpt_fn)
        stop, infos = self._on_first_rank(
            lambda: self._eval(save_ckpt_fn, train_iter, envstep, self._n_episode(n_episode))
        )
        self._last_eval = float(np.mean([info["eval_episode_return"] for info in infos[0]]))
        return stop, infos

    def _eval(
        self, save_ckpt_fn: SaveCkpt | None, train_iter: int, envstep: int, n_episode: int
    ) -> tuple[bool, list[list[dict[str, Any]]]]:
        began = time.perf_counter()
        monitor = VectorEvalMonitor(self.env.env_num, n_episode)
        stepper = BattleStepper(self.policy, self.env, user=type(self).__name__)
        stepper.begin()
        infos: list[list[dict[str, Any]]] = [[] for _ in self.policy]
        watch = EpisodeWatch(self.env, user=type(self).__name__)
        while playing := monitor.unfinished:
            for step in stepper.step([{}] * len(self.policy), only=playing):
                if step.timestep.done:
                    last = step.timestep.info
                    for own, info in zip(infos, last, strict=True):
                        own.append(info)
                    monitor.update_info(step.timestep.env_id, last[0])
                    monitor.update_reward(step.timestep.env_id, last[0]["eval_episode_return"])
            watch.check(playing)
        seconds = time.perf_counter() - began
        returns = monitor.get_episode_return()
        results = Counter(game_result(info) for info in infos[0])
        rates: Mapping[str, float] = {
            "episode_count": len(returns),
            "win_rate": results["wins"] / len(returns),
            "draw_rate": results["draws"] / len(returns),
            "loss_rate": results["losses"] / len(returns),
        }
        self._log_returns(
            returns, stepper.env_step, seconds, rates, train_iter=train_iter, envstep=envstep
        )
        return self._judge(float(np.mean(returns)), train_iter, save_ckpt_fn), infos

    def _as_mode(self, policy: Sequence[HasModes | EvalMode]) -> tuple[EvalMode, ...]:
        user = type(self).__name__
        policies = checked_policies(policy, user=user, n_policy=None)
        return tuple(as_eval_mode(one, user=user) for one in policies)

    def _checked_env(self, env: BattleEnvManager) -> BattleEnvManager:
        return checked_battle_env(env, user=type(self).__name__)
