"""An evaluator that plays episodes with the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dmiddleware.classic import EvalMode, as_eval_mode
from dmiddleware.classic.config import Option, at_least, count, one_of, optional, text
from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.policy import HasModes
from dmiddleware.rollout.evaluation import VectorEvalMonitor, evaluate_episodes
from dmiddleware.tensorboard import add_gif, encode_video
from dmiddleware.worker.evaluator.serial_evaluator import (
    SERIAL_EVALUATOR_REGISTRY,
    EpisodeEvaluator,
    SaveCkpt,
)

__all__ = ["InteractionSerialEvaluator"]


@SERIAL_EVALUATOR_REGISTRY.register("interaction")
class InteractionSerialEvaluator(EpisodeEvaluator[EvalMode, BaseEnvManager]):
    """Plays whole episodes greedily, a fixed share in each env, and measures their returns.

    With several ranks, rank 0 plays and broadcasts the results.

    Args:
        cfg: what differs from ``default_config()``:

            - ``eval_freq``: training iterations between evaluations;
            - ``n_episode``: episodes per evaluation, at least one per env;
            - ``stop_value``: mean return at which to stop; None: never;
            - ``render.render_freq``: training iterations (or env steps, with
              ``render.mode="envstep"``) between videos; -1: no videos. ``render.max_frames`` and
              ``render.fps`` are their length and speed;
            - ``replay_path``: folder for a video of each evaluation, ``iteration_<n>.gif``;
            - ``figure_path``: file for a plot of the returns, updated by each evaluation.
        env: an env manager; for videos its envs need ``render_mode="rgb_array"``.
        policy: a policy, or its eval mode.
        tb_logger: a tensorboardX ``SummaryWriter``; None creates one on first use.
        exp_name: folder for the output.
        instance_name: distinguishes evaluators in logs.
    """

    config: ClassVar[dict[str, Any]] = {
        "render": {
            "render_freq": Option(
                -1,
                at_least(-1),
                "iterations or env steps between recorded evaluations; -1 records none",
            ),
            "mode": Option(
                "train_iter", one_of("train_iter", "envstep"), "the unit of render_freq"
            ),
            "max_frames": Option(500, count, "longest video, in frames"),
            "fps": Option(20, count, "frames per second of the video"),
        },
        "replay_path": Option(
            None, optional(text), "folder for a video of each evaluation; None records none"
        ),
        "figure_path": Option(
            None, optional(text), "file for a plot of the returns; None draws none"
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_render = 0
        self._history: list[tuple[int, list[float]]] = []

    def reset(
        self, _policy: HasModes | EvalMode | None = None, _env: BaseEnvManager | None = None
    ) -> None:
        """Forget earlier evaluations; continue with another policy or in other envs if given."""
        super().reset(_policy, _env)
        self._last_render = 0
        self._history.clear()

    def reset_policy(self, _policy: HasModes | EvalMode | None = None) -> None:
        """Clear the policy's state of the eval mode, or evaluate another policy from now on."""
        if _policy is not None:
            self._policy = self._as_mode(_policy)
        self.policy.reset()

    def _as_mode(self, policy: HasModes | EvalMode) -> EvalMode:
        return as_eval_mode(policy, user=type(self).__name__)

    def _checked_env(self, env: BaseEnvManager) -> BaseEnvManager:
        check_env_manager(env, user=type(self).__name__)
        return env

    def eval(
        self,
        save_ckpt_fn: SaveCkpt | None = None,
        train_iter: int = -1,
        envstep: int = -1,
        n_episode: int | None = None,
        force_render: bool = False,
        policy_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[bool, dict[str, Any]]:
        """Evaluate.

        Args:
            save_ckpt_fn: called with a file name when the mean return is the best so far.
            train_iter: training iterations so far; negative: unknown.
            envstep: env steps so far; negative: unknown.
            n_episode: number of episodes; None takes ``cfg.n_episode``.
            force_render: record a video of this evaluation.
            policy_kwargs: passed to the policy's forward.

        Returns:
            Whether to stop (the mean return has reached ``stop_value``, and ``train_iter`` is
            positive), and the results: for each key of the episodes' last infos the list of its
            values, and the mean of numbers as ``<name>_mean``; ``return_mean``,
            ``return_std``, ``return_max``, ``return_min``, and the list ``episode_return``.

        Raises:
            ConfigError: if the number of episodes is not set, or below the number of envs.
            EnvCrashed: if an env keeps failing.
            DMiddlewareError: on the other ranks, if rank 0 failed.
        """
        self._check_save_fn(save_ckpt_fn)
        stop, info = self._on_first_rank(
            lambda: self._eval(
                save_ckpt_fn, train_iter, envstep, n_episode, force_render, policy_kwargs
            )
        )
        self._last_eval = info["return_mean"]
        return stop, info

    def _eval(
        self,
        save_ckpt_fn: SaveCkpt | None,
        train_iter: int,
        envstep: int,
        n_episode: int | None,
        force_render: bool,
        policy_kwargs: Mapping[str, Any] | None,
    ) -> tuple[bool, dict[str, Any]]:
        began = time.perf_counter()
        is_shown = self._should_render(train_iter, envstep) or force_render
        has_video = is_shown or self._cfg.replay_path is not None
        monitor = evaluate_episodes(
            self.policy,
            self.env,
            self._n_episode(n_episode),
            policy_kwargs=policy_kwargs,
            max_frames=self._cfg.render.max_frames if has_video else 0,
        )
        returns = monitor.get_episode_return()
        info = {**(monitor.get_episode_info() or {}), **_summary(returns)}
        seconds = time.perf_counter() - began
        steps = int(sum(info.get("eval_episode_length", ())))
        values = {key: value for key, value in info.items() if not isinstance(value, list)}
        self._log_returns(returns, steps, seconds, values, train_iter=train_iter, envstep=envstep)
        if is_shown and monitor.has_video:
            self._write_video(monitor, train_iter, envstep)
        if self._cfg.replay_path is not None and monitor.has_video:
            name = "evaluation" if train_iter < 0 else f"iteration_{train_iter}"
            file = Path(self._cfg.replay_path) / f"{name}.gif"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode_video(monitor.get_video(), fps=self._cfg.render.fps))
        self._draw(train_iter, returns)
        return self._judge(info["return_mean"], train_iter, save_ckpt_fn), info

    def _should_render(self, train_iter: int, envstep: int) -> bool:
        render = self._cfg.render
        now = train_iter if render.mode == "train_iter" else envstep
        if render.render_freq < 0 or now - self._last_render < render.render_freq:
            return False
        self._last_render = now
        return True

    def _write_video(self, monitor: VectorEvalMonitor, train_iter: int, envstep: int) -> None:
        axis, at = (
            ("iter", train_iter) if self._cfg.render.mode == "train_iter" else ("step", envstep)
        )
        tag = f"{self._instance_name}_{axis}/video"
        gif = encode_video(monitor.get_video(), fps=self._cfg.render.fps)
        add_gif(self.tb_logger, tag, gif, max(at, 0))

    def _draw(self, train_iter: int, returns: list[float]) -> None:
        if self._cfg.figure_path is None:
            return
        self._history.append((train_iter, returns))
        iterations, all_returns = zip(*self._history, strict=True)
        _draw_returns(self._cfg.figure_path, iterations, all_returns)

    def state_dict(self) -> dict[str, Any]:
        """Return the best return, and when the last evaluation and video were."""
        return {
            **super().state_dict(),
            "last_render": self._last_render,
            "history": [[at, returns] for at, returns in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._last_render = state["last_render"]
        self._history = [(at, list(returns)) for at, returns in state["history"]]


def _summary(returns: list[float]) -> dict[str, Any]:
    return {
        "episode_count": len(returns),
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "return_max": max(returns),
        "return_min": min(returns),
        "episode_return": returns,
    }


def _draw_returns(
    path: str | Path, iterations: Sequence[int], returns: Sequence[Sequence[float]]
) -> None:
    """Plot mean and range of the returns of all evaluations so far.

    Args:
        path: the file; its suffix selects the format, and its folder is created if missing.
        iterations: training iterations of the evaluations.
        returns: the returns of each evaluation's episodes.
    """
    # Importing it takes half a second, and few programs plot.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(iterations, list(map(min, returns)), list(map(max, returns)), alpha=0.2)
    axes.plot(iterations, list(map(np.mean, returns)), marker=".")
    axes.set_xlabel("training iterations")
    axes.set_ylabel("return (mean, range)")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
