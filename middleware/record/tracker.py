"""What the loggers that send a run to Weights & Biases and to Trackio have in common."""

from __future__ import annotations

import importlib
import logging
import re
import secrets
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from dmiddleware.best_effort import BestEffort
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.runs.record import settings_of
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.record.experiment import Experiment
from middleware.record.log import MetricsLogger
from middleware.record.run_folder import RunFolder, check_run_folder
from middleware.roles import Role
from middleware.support.interval import axis_of

__all__ = ["Tracker", "file_name", "shown_name"]

_LONGEST: Final = 128
_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9._-]+")

_log = logging.getLogger(__name__)


def shown_name(name: str, longest: int = _LONGEST) -> str:
    """Return a name that both services take for a run, a group or a tag.

    Characters that are not printable, such as bytes of a folder's name that are not UTF-8, become
    ``-``, and a long name is cut.

    Args:
        name: the name.
        longest: the most bytes that it may have in UTF-8.
    """
    printable = "".join(letter if letter.isprintable() else "-" for letter in name)
    return printable.encode()[:longest].decode(errors="ignore").strip() or "run"


def file_name(name: str, longest: int = _LONGEST) -> str:
    """Return a name that both services take for an artifact: letters, digits, ``.``, ``_``, ``-``.

    Args:
        name: the name.
        longest: the most characters that it may have.
    """
    letters = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return _FORBIDDEN.sub("-", plain)[:longest]


_RETURN: Final = "return_mean"


class Tracker(BaseMiddleware[RLContext]):
    """Send metrics, settings, videos and checkpoints through a client.

    Names that a service does not take are replaced by similar ones when the run begins.

    The clients of both services have ``init``, ``Video`` and ``Artifact``, and runs with
    ``log_artifact`` and ``finish``.

    Args:
        run: the folder of the run.

    Raises:
        ConfigError: if the client is not installed, or ``run`` is not a RunFolder.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    last_step = True

    client_name: ClassVar[str]
    """The package of the client, and the extra that installs it."""
    title: ClassVar[str]
    """The name of the service in messages."""

    def __init__(self, run: RunFolder) -> None:
        user = type(self).__name__
        try:
            self.client: Any = importlib.import_module(self.client_name)
        except ImportError as error:
            raise ConfigError(
                f"{user} needs {self.client_name}; "
                f"run: python -m pip install 'dmiddleware[{self.client_name}]'"
            ) from error
        self.folder = check_run_folder(run, user=user)
        self._run: Any = None
        self._run_id = ""
        self._axis = ""
        self._has_settings = False
        self._best_effort = BestEffort(f"send metrics to {self.title}", Exception)

    @abstractmethod
    def begin(self, run_id: str, axis: str) -> Any:
        """Begin a run of the client, or continue it.

        Args:
            run_id: an id that the run keeps when it is resumed.
            axis: the counter over which metrics are drawn.

        Returns:
            The client's run.
        """

    @abstractmethod
    def send_settings(self, run: Any, settings: dict[str, Any]) -> None:
        """Send what is in ``config.yaml``."""

    @abstractmethod
    def send_row(self, run: Any, row: dict[str, Any], at: int) -> None:
        """Send a line of metrics, at a value of the axis."""

    def end(self, run: Any) -> None:
        """Send what is left, and end the client's run."""
        run.finish()

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a chain without a logger, which would have nothing to send."""
        if not any(isinstance(part, Experiment | MetricsLogger) for part in chain.middleware):
            yield (
                f"{type(self).__name__} sends what a logger writes; "
                "add an Experiment or a MetricsLogger"
            )

    def setup(self, task: Task[Any]) -> None:
        """Begin the run, or continue it.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self.folder.lock(task)
        self._axis = axis_of(task.ctx)
        with self._best_effort:
            self._run_id = self._known_id()
            self._run = self.begin(self._run_id, self._axis)
            self.folder.metrics.on_row.append(self._send)
        # When all middleware have been closed, the last metrics and checkpoints are there.
        task.at_close(self._finish)

    def __call__(self, ctx: RLContext) -> None:
        """Do nothing: lines are sent when they are written."""

    def accepted(self, kind: str, name: str, accepted: str) -> str:
        """Return a name that the service takes, with a warning if it is not the one asked for."""
        if accepted != name:
            _log.warning(
                "%s does not take the %s %r; it is called %r there",
                self.title,
                kind,
                name,
                accepted,
            )
        return accepted

    def _known_id(self) -> str:
        file = self.folder.path / f"{self.client_name}_id"
        if file.exists():
            # What a full disk has left may be empty or damaged.
            text = file_name(file.read_text(encoding="utf-8", errors="replace")).strip("-")
            if text:
                return text
        new = secrets.token_hex(4)
        file.write_text(new, encoding="utf-8")
        return new

    def _send(self, row: Mapping[str, float | None]) -> None:
        with self._best_effort:
            if not self._has_settings:
                self._has_settings = True
                self.send_settings(self._run, settings_of(self.folder.path))
            sent: dict[str, Any] = dict(row)
            at = int(row[self._axis] or 0)
            for name in row:
                prefix, _, metric = name.rpartition("/")
                video = self.folder.video_path(at, prefix)
                if metric == _RETURN and video.exists():
                    sent[f"{prefix}/video"] = self.client.Video(str(video))
            self.send_row(self._run, sent, at)

    def _finish(self) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        self.folder.metrics.on_row.remove(self._send)
        with self._best_effort:
            name = f"{file_name(self.folder.name, _LONGEST // 2)}-{self._run_id}"
            artifact = self.client.Artifact(name, type="model")
            folder = self.folder.ckpt_dir
            files = sorted(folder.rglob("*.safetensors"))
            for file in files:
                inside = {} if file.parent == folder else {"name": str(file.relative_to(folder))}
                artifact.add_file(str(file), **inside)
            if files:
                run.log_artifact(artifact)
        with self._best_effort:
            self.end(run)
