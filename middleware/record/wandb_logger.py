"""Weights & Biases: send what a run measures to its service, or record it for later."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from dmiddleware.settings import AS_TUPLE, Settings, TakesSettings, plain_values, takes_options
from middleware.record.run_folder import RunFolder
from middleware.record.tracker import Tracker, shown_name

__all__ = ["WandbLogger", "WandbLoggerSettings"]

_FORBIDDEN: Final = re.compile(r"[/\\#?%:]+")
_LONGEST_TAG: Final = 64


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


class WandbLogger(Tracker, TakesSettings[WandbLoggerSettings]):
    """Send metrics, settings, videos and checkpoints to Weights & Biases.

    One line does it: ``task.use(WandbLogger(experiment.run, project="cartpole"))``.

    It sends what the chain's :class:`~middleware.Experiment` or :class:`~middleware.MetricsLogger`
    writes: each line of ``metrics.jsonl``, ``config.yaml``, the videos of evaluations, and at the
    end the checkpoints as an artifact. The position in the chain does not matter. A run that is
    resumed continues under the same id, which is kept in the run's folder. If the service cannot be
    reached, a warning says so and the run continues. Characters that the service does not take in
    the name of a project, a run or an artifact become ``-``, as a warning says at the start.

    In a run of several processes, the learner sends; the metrics of the others are in its folder.

    Args:
        run: the folder of the run.
        settings: the options, each by keyword; see :class:`WandbLoggerSettings`.

    Raises:
        ConfigError: if wandb is not installed, or ``run`` is not a RunFolder.
    """

    client_name = "wandb"
    title = "Weights & Biases"

    settings: WandbLoggerSettings

    @takes_options(WandbLoggerSettings)
    def __init__(self, run: RunFolder, settings: WandbLoggerSettings) -> None:
        super().__init__(run)
        self.settings = settings

    def begin(self, run_id: str, axis: str) -> Any:
        """Begin the run, or continue it, and name the axis of its metrics."""
        settings, name = self.settings, self.folder.name
        project = _FORBIDDEN.sub("-", shown_name(settings.project))
        options = {
            **plain_values(settings),
            "project": self.accepted("project", settings.project, project),
            "tags": [
                self.accepted("tag", tag, shown_name(tag, _LONGEST_TAG)) for tag in settings.tags
            ],
        }
        if settings.group is not None:
            options["group"] = self.accepted("group", settings.group, shown_name(settings.group))
        run = self.client.init(
            **options,
            id=run_id,
            name=self.accepted("run name", name, shown_name(name)),
            dir=str(self.folder.path),
            resume="allow",
            settings={"console": "off"},
        )
        for counter in ("env_step", "train_iter"):
            run.define_metric(counter, hidden=True)
        run.define_metric("*", step_metric=axis)
        return run

    def send_settings(self, run: Any, settings: dict[str, Any]) -> None:
        """Send what is in ``config.yaml``; a resumed run may have changed it."""
        run.config.update(settings, allow_val_change=True)

    def send_row(self, run: Any, row: dict[str, Any], at: int) -> None:
        """Send a line of metrics, which has the axis among them."""
        run.log(row)
