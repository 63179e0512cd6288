"""Trackio: keep what runs measure on this machine, or in a Hugging Face Space."""

from __future__ import annotations

import re
from typing import Any, Final

from dmiddleware.settings import Settings, TakesSettings, plain_values, takes_options
from middleware.record.run_folder import RunFolder
from middleware.record.tracker import Tracker, shown_name

__all__ = ["TrackioLogger", "TrackioLoggerSettings"]

_RESERVED_END: Final = re.compile(
    "_(system|configs|traces|artifacts|artifact_versions|artifact_aliases|run_artifact_links|"
    "external_run_artifact_links)$"
)
"""Ends of the names of projects that would be files of another project."""
_RESERVED_BEGINNING: Final = "registry-"
_LONGEST_NAME: Final = 100


class TrackioLoggerSettings(Settings):
    """The options of :class:`TrackioLogger`."""

    project: str = "dmiddleware"
    """The project."""
    group: str | None = None
    """A name that runs have in common, such as the seeds of one setting."""
    space_id: str | None = None
    """The Hugging Face Space to send to, such as `"me/runs"`; None: what the environment variable
    `TRACKIO_SPACE_ID` says, and without it, none."""


class TrackioLogger(Tracker, TakesSettings[TrackioLoggerSettings]):
    """Send metrics, settings, videos and checkpoints to Trackio.

    One line does it: ``task.use(TrackioLogger(experiment.run, project="cartpole"))``. Trackio needs
    no account and no network: it writes to ``~/.cache/huggingface/trackio``, or to the folder in
    the environment variable ``TRACKIO_DIR``. The command ``trackio show`` opens its dashboard.

    It sends what :class:`~middleware.WandbLogger` sends, in the same cases. The run has the name of
    its folder, with an id, under which it continues when it is resumed.

    Args:
        run: the folder of the run.
        settings: the options, each by keyword; see :class:`TrackioLoggerSettings`.

    Raises:
        ConfigError: if trackio is not installed, or ``run`` is not a RunFolder.
    """

    client_name = "trackio"
    title = "Trackio"

    settings: TrackioLoggerSettings

    @takes_options(TrackioLoggerSettings)
    def __init__(self, run: RunFolder, settings: TrackioLoggerSettings) -> None:
        super().__init__(run)
        self.settings = settings

    def begin(self, run_id: str, axis: str) -> Any:
        """Begin the run, or continue the run of this name."""
        settings, name = self.settings, self.folder.name
        options = {
            **plain_values(settings),
            "project": self.accepted("project", settings.project, _project_name(settings.project)),
        }
        if settings.group is not None:
            options["group"] = self.accepted("group", settings.group, shown_name(settings.group))
        name = self.accepted("run name", name, shown_name(name, _LONGEST_NAME))
        return self.client.init(**options, name=f"{name}-{run_id}", resume="allow")

    def send_settings(self, run: Any, settings: dict[str, Any]) -> None:
        """Send what is in ``config.yaml``, with the next line of metrics."""
        run.config.update(settings)

    def send_row(self, run: Any, row: dict[str, Any], at: int) -> None:
        """Send a line of metrics; its step is the axis."""
        run.log(row, step=at)

    def end(self, run: Any) -> None:
        """End the run, which the client otherwise ends once more when the program exits."""
        self.client.finish()


def _project_name(name: str) -> str:
    """Return a name for a project that is not reserved.

    The service looks at its letters, digits, ``-`` and ``_`` only, of which it makes file names.
    """
    name = shown_name(name, _LONGEST_NAME)
    letters = "".join(letter for letter in name if letter.isalnum() or letter in "-_")
    if _RESERVED_END.search(letters):
        name = name.replace("_", "-")
    return f"project-{name}" if letters.startswith(_RESERVED_BEGINNING) else name
