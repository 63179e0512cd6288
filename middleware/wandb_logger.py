"""Weights & Biases: send what a run measures to its service, or record it for later."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from dmiddleware.best_effort import BestEffort
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.runs.record import EVALUATION, settings_of
from dmiddleware.settings import AS_TUPLE, Settings, plain_values, takes_settings
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.experiment import Experiment
from middleware.log import MetricsLogger
from middleware.roles import Role
from middleware.run_folder import RunFolder, check_run_folder
from middleware.support.interval import axis_of

__all__ = ["WandbLogger", "WandbLoggerSettings"]


class WandbLoggerSettings(Settings):
    """The options of :class:`WandbLogger`."""

    project: str = "dmiddleware"
    """The project."""
    entity: str | None = None
    """The user or team; None: the default one of the account."""
    group: str | None = None
    """A name that runs have in common, such as the seeds of one setting."""
    tags: Annotated[tuple[str, ...], AS_TUPLE] = ()
    """Words to find the run by."""
    mode: Literal["online", "offline"] | None = None
    """Whether to send at once, or to record into the run's folder, for `wandb sync`; None: what the
    environment variable `WANDB_MODE` says."""


class WandbLogger(BaseMiddleware[RLContext]):
    """Send metrics, settings, videos and checkpoints to Weights & Biases.

    One line does it: ``task.use(WandbLogger(experiment.run, project="cartpole"))``.

    It sends what the chain's :class:`~middleware.Experiment` or :class:`~middleware.MetricsLogger`
    writes: each line of ``metrics.jsonl``, ``config.yaml``, the videos of evaluations, and at the
    end the checkpoints as an artifact. The position in the chain does not matter. A run that is
    resumed continues under the same id, which is kept in the run's folder. If the service cannot be
    reached, a warning says so and the run continues.

    In a run of several processes, the learner sends; the metrics of the others are in its folder.

    Args:
        run: the folder of the run.

    Raises:
        ConfigError: if wandb is not installed, or ``run`` is not a RunFolder.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    last_step = True

    settings: WandbLoggerSettings

    @takes_settings(WandbLoggerSettings)
    def __init__(self, run: RunFolder, settings: WandbLoggerSettings) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "WandbLogger needs wandb; run: python -m pip install 'dmiddleware[wandb]'"
            ) from error
        self._wandb = wandb
        self._folder = check_run_folder(run, user="WandbLogger")
        self.settings = settings
        self._run: Any = None
        self._axis = ""
        self._has_settings = False
        self._best_effort = BestEffort("send metrics to Weights & Biases", Exception)

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a chain without a logger, which would have nothing to send."""
        if not any(isinstance(one, Experiment | MetricsLogger) for one in chain.middleware):
            yield "WandbLogger sends what a logger writes; add an Experiment or a MetricsLogger"

    def setup(self, task: Task[Any]) -> None:
        """Begin the run, or continue it.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._folder.lock(task)
        with self._best_effort:
            self._run = self._wandb.init(
                **plain_values(self.settings),
                id=self._id(),
                name=self._folder.name,
                dir=str(self._folder.path),
                resume="allow",
                settings={"console": "off"},
            )
            for counter in ("env_step", "train_iter"):
                self._run.define_metric(counter, hidden=True)
            self._axis = axis_of(task.ctx)
            self._run.define_metric("*", step_metric=self._axis)
            self._folder.metrics.on_row = self._send
        # When all middleware have been closed, the last metrics and checkpoints are there.
        task.at_close(self._finish)

    def __call__(self, ctx: RLContext) -> None:
        """Do nothing: lines are sent when they are written."""

    def _id(self) -> str:
        file = self._folder.path / "wandb_id"
        with contextlib.suppress(FileNotFoundError):
            return file.read_text(encoding="utf-8").strip()
        new = secrets.token_hex(4)
        file.write_text(new, encoding="utf-8")
        return new

    def _send(self, row: Mapping[str, float | None]) -> None:
        with self._best_effort:
            if not self._has_settings:
                self._has_settings = True
                self._run.config.update(settings_of(self._folder.path), allow_val_change=True)
            sent: dict[str, Any] = dict(row)
            video = self._folder.video_path(int(row[self._axis] or 0))
            if EVALUATION in row and video.exists():
                sent["eval/video"] = self._wandb.Video(str(video))
            self._run.log(sent)

    def _finish(self) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        self._folder.metrics.on_row = None
        with self._best_effort:
            artifact = self._wandb.Artifact(f"{self._folder.name}-{run.id}", type="model")
            files = sorted(self._folder.ckpt_dir.glob("*.safetensors"))
            for file in files:
                artifact.add_file(str(file))
            if files:
                run.log_artifact(artifact)
        with self._best_effort:
            run.finish()
