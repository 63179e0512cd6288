"""Trackio: keep what runs measure on this machine, or in a Hugging Face Space."""

from __future__ import annotations

from typing import Any

from dmiddleware.settings import Settings, plain_values, takes_settings
from middleware.run_folder import RunFolder
from middleware.tracker import Tracker

__all__ = ["TrackioLogger", "TrackioLoggerSettings"]


class TrackioLoggerSettings(Settings):
    """The options of :class:`TrackioLogger`."""

    project: str = "dmiddleware"
    """The project."""
    group: str | None = None
    """A name that runs have in common, such as the seeds of one setting."""
    space_id: str | None = None
    """The Hugging Face Space to send to, such as `"me/runs"`; None: what the environment variable
    `TRACKIO_SPACE_ID` says, and without it, none."""


class TrackioLogger(Tracker):
    """Send metrics, settings, videos and checkpoints to Trackio.

    One line does it: ``task.use(TrackioLogger(experiment.run, project="cartpole"))``. Trackio needs
    no account and no network: it writes to ``~/.cache/huggingface/trackio``, or to the folder in
    the environment variable ``TRACKIO_DIR``. The command ``trackio show`` opens its dashboard.

    It sends what :class:`~middleware.WandbLogger` sends, in the same cases. The name of the run is
    that of its folder, with an id, under which it continues when it is resumed.

    Args:
        run: the folder of the run.
        settings: the options; or their fields by keyword, see :class:`TrackioLoggerSettings`.

    Raises:
        ConfigError: if trackio is not installed, or ``run`` is not a RunFolder.
    """

    client_name = "trackio"
    title = "Trackio"

    settings: TrackioLoggerSettings

    @takes_settings(TrackioLoggerSettings)
    def __init__(self, run: RunFolder, settings: TrackioLoggerSettings) -> None:
        super().__init__(run)
        self.settings = settings

    def begin(self, run_id: str, axis: str) -> Any:
        """Begin the run, or continue the one of this name."""
        name = f"{self.folder.name}-{run_id}"
        return self.client.init(**plain_values(self.settings), name=name, resume="allow")

    def send_settings(self, run: Any, settings: dict[str, Any]) -> None:
        """Send what is in ``config.yaml``, with the next line of metrics."""
        run.config.update(settings)

    def send_row(self, run: Any, row: dict[str, Any], at: int) -> None:
        """Send a line of metrics; its step is the axis."""
        run.log(row, step=at)

    def end(self, run: Any) -> None:
        """End the run, which the client otherwise ends once more when the program exits."""
        self.client.finish()
