"""RunFolder: the folder with all files of one run."""

from __future__ import annotations

import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from dmiddleware.distributed import gather_from_ranks, next_shared_name, rank_and_world_size
from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.files.atomic_file import write_atomically
from dmiddleware.pipeline import Task, current_node
from dmiddleware.process.closing import Closing
from dmiddleware.runs.metrics_file import METRICS_FILE, MetricsFile
from dmiddleware.runs.resuming import given_folder
from dmiddleware.settings import checked, plain_values, takes_options
from dmiddleware.tensorboard import TensorboardWriter
from dmiddleware.yaml_text import yaml_text
from middleware.record.folder_lock import (
    FolderLock,
    NoLock,
    RunLock,
    check_writable,
    find_holder,
    in_use,
    unwritable,
)
from middleware.roles import Role
from middleware.support.checks import check_instance

__all__ = ["RunFolder", "check_run_folder"]

TOKEN_FILE: Final = ".run"
_RESERVED: Final = 0o777 | stat.S_ISVTX


class RunFolder(Closing):
    """The folder of one run: checkpoints, tensorboard events, the learning curve, the config.

    Make one with :meth:`create`, which returns a folder that exists only to resume its run::

        runs/cartpole/
        ├── ckpt/           checkpoints (CkptSaver)
        ├── tb/             tensorboard events (MetricsLogger)
        ├── config.yaml     the settings that the run used (save_config)
        ├── curve.png       the learning curve (LearningCurve)
        ├── metrics.jsonl   what the run measured (MetricsLogger)
        ├── result.json     returns and counters at the end (Experiment)
        └── videos/         of evaluations, if the evaluator makes any (MetricsLogger)

    All processes of a run that ``ditask`` starts on one host share one folder. Only the learner
    writes the files in it; tensorboard events of the others go to ``tb/node-<id>/``, and their
    files have names of their own, such as ``metrics.node-<id>.jsonl``.

    One task at a time trains in a folder: it holds a lock on it until it is closed.

    Args:
        path: an existing folder.
    """

    @takes_options
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._node = node = current_node()
        self._rank = rank = rank_and_world_size()[0]
        self._process = f"rank-{rank}" if node is None else f"node-{node.node_id}"
        self._made_at = time.perf_counter()
        self._tb_logger: TensorboardWriter | None = None
        self._metrics: MetricsFile | None = None

    @classmethod
    def create(cls, exp_name: str, *, root: str | Path = "runs", resume: bool = False) -> Self:
        """Make a new folder for a run, or find the folder of a run to resume.

        A new run never writes into the folder of an earlier one: if ``exp_name`` is taken, the run
        gets the first free one of ``exp_name-2``, ``exp_name-3``, … All processes of one run get
        the same folder; the first one makes it. A run that ``ditask resume`` continues, or that
        belongs to a sweep, gets its folder, whatever the name is.

        Args:
            exp_name: the folder's name, or a path below ``root``.
            root: the folder of all runs; made if it is missing.
            resume: use the folder ``exp_name`` if it exists.

        Raises:
            ConfigError: if ``exp_name`` does not name a folder below ``root``.
            RunFolderError: if the folder to resume in is in use by another process, or a folder
                cannot be made or written to.
        """
        name = Path(checked("exp_name", exp_name, str))
        if not exp_name.strip() or name.is_absolute() or ".." in name.parts or not name.name:
            raise ConfigError(
                f"exp_name must be a folder name, or a path below {root}, got {exp_name!r}; for a "
                "run in another folder, set root to that folder"
            )
        given_path = given_folder()
        target = Path(root) / name if given_path is None else given_path
        resume = resume or given_path is not None
        node = current_node()
        if node is not None:
            run = cls(_find_or_make(target, node.next_shared_name(), resume=resume))
        elif rank_and_world_size()[0] == 0:
            run = cls(_find_or_make(target, next_shared_name(), resume=resume))
            gather_from_ranks(str(run.path))
        else:
            run = cls(gather_from_ranks(None)[0])
            check_writable(run.path)  # makes it, on a host that does not share rank 0's files
        if resume:
            run._refuse_others()
        return run

    @property
    def name(self) -> str:
        """The name of the folder, without its parents."""
        return self.path.name

    @property
    def is_lead(self) -> bool:
        """Whether this process writes the files that a run has only once: rank 0 of the learner."""
        has_role = self._node is None or self._node.has_role(Role.LEARNER)
        return has_role and self._rank == 0

    @property
    def age_s(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._made_at

    @property
    def ckpt_dir(self) -> Path:
        """The folder of the checkpoints; made on first access."""
        path = self.path / "ckpt"
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        return path

    def ckpt_dir_of(self, part: str | None) -> Path:
        """Return the folder of the checkpoints of a named part of the chain, which is made.

        Args:
            part: its name; None: the whole chain.
        """
        if part is None:
            return self.ckpt_dir
        path = self.ckpt_dir / part
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        return path

    @property
    def best_ckpt(self) -> Path:
        """The path where CkptSaver saves the policy of the best evaluation."""
        return self.ckpt_dir / "best.safetensors"

    @property
    def curve_path(self) -> Path:
        """The path of the picture of this process's learning curve."""
        return self._of_process("curve.png")

    @property
    def result_path(self) -> Path:
        """The path of the file in which Experiment writes the outcome of what is learned here."""
        return self._of_process("result.json")

    @property
    def final_ctx_path(self) -> Path:
        """The path of the file in which FinalCtxSaver writes this process's last context."""
        return self._of_process("final_ctx.json")

    @property
    def tb_logger(self) -> TensorboardWriter:
        """This process's tensorboard writer; opened on first access.

        Events that cannot be written are dropped, with a warning.
        """
        if self._tb_logger is None:
            # One folder per process: tensorboard reads only one file of a folder at a time.
            folder = self.path / "tb"
            path = folder if self.is_lead else folder / self._process
            self._refuse_others()
            self._tb_logger = TensorboardWriter(path)
        return self._tb_logger

    @property
    def metrics(self) -> MetricsFile:
        """This process's metrics file; made on first access."""
        if self._metrics is None:
            self._refuse_others()
            self._metrics = MetricsFile(self.metrics_path)
        return self._metrics

    @property
    def metrics_path(self) -> Path:
        """The path of this process's metrics file."""
        return self._of_process(METRICS_FILE)

    def video_path(self, at: int, prefix: str = "eval") -> Path:
        """Return the path of the video of the evaluation at a counter.

        Args:
            at: the counter.
            prefix: what the metrics of the evaluator begin with.
        """
        return self.path / "videos" / (f"{at}.gif" if prefix == "eval" else f"{prefix}-{at}.gif")

    @property
    def log_path(self) -> Path:
        """The path of this process's text log."""
        return self._of_process("log.txt")

    def _of_process(self, name: str) -> Path:
        """Return the path of a file that each process has for itself."""
        path = self.path / name
        return path if self.is_lead else path.with_suffix(f".{self._process}{path.suffix}")

    def save_config(self, cfg: Mapping[str, Any]) -> Path:
        """Write ``config.yaml``, for people and for any YAML loader; only the learner does so.

        Args:
            cfg: nested dictionaries and lists of plain values. Classes and functions are written
                by their names, other objects as strings.

        Returns:
            The path of the file.
        """
        path = self.path / "config.yaml"
        if not self.is_lead:
            return path
        self._refuse_others()
        text = yaml_text(plain_values(cfg))
        write_atomically(path, lambda file: file.writelines([text.encode()]), durable=False)
        return path

    def lock(self, task: Task[Any]) -> RunLock:
        """Keep other tasks from training in the folder until this one is closed.

        Middleware that write what a folder has only once call it in their ``setup``. Processes that
        are not the learner, and ranks other than 0, need no lock.

        Returns:
            The lock. Its method ``check`` raises an error if the folder is lost.

        Raises:
            RunFolderError: if another task holds the lock, or the folder cannot be written to.
        """
        if self.is_lead and task.rank == 0 and task.has_role(Role.LEARNER):
            return FolderLock(self.path, task)
        return NoLock()

    def _refuse_others(self) -> None:
        holder = find_holder(self.path) if self.is_lead else None
        if holder is not None:
            raise RunFolderError(in_use(self.path, holder))

    def close(self) -> None:
        """Flush and close the tensorboard writer; the folder stays."""
        if self._tb_logger is not None:
            writer, self._tb_logger = self._tb_logger, None
            writer.close()

    def __fspath__(self) -> str:
        return str(self.path)


def check_run_folder(run: object, *, user: str) -> RunFolder:
    """Return ``run`` if it is a run folder.

    Raises:
        ConfigError: if it is not.
    """
    hint = "make a new folder with RunFolder.create('name') and pass it"
    if isinstance(getattr(run, "run", None), RunFolder):
        hint = "pass its folder, which is its attribute run"
    return check_instance(run, RunFolder, user=user, hint=hint)


def _find_or_make(wanted: Path, run_token: str, *, resume: bool) -> Path:
    """Return the folder of a run; `_take_first` describes the arguments."""
    if resume and wanted.is_dir():
        check_writable(wanted)
        return wanted
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        return _take_first(wanted, run_token, resume=resume)
    except OSError as error:
        raise unwritable(wanted.parent, error) from error


def _take_first(wanted: Path, run_token: str, *, resume: bool) -> Path:
    """Return the first folder of the name that is free for this run, or belongs to it already.

    Args:
        wanted: the first folder to try.
        run_token: identifies a run of several processes; empty: a run of one process.
        resume: whether the first folder will do even if another process has just made it.
    """
    path, number = wanted, 1
    while not _take(path, run_token):
        if resume:
            return path
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def _take(path: Path, run_token: str) -> bool:
    """Return whether a folder is free for this run, or belongs to it already.

    Making the folder reserves its name: of two runs only one can succeed. The folder of a run with
    a token is replaced at once by a folder with the token inside, by which the other processes of
    the run recognize it. Until then its mode shows that any process of such a run may do so.
    """
    try:
        path.mkdir(_RESERVED if run_token else 0o777)
    except FileExistsError:
        if not run_token:
            return False
    else:
        if not run_token:
            return True
    with suppress(OSError):
        if path.stat().st_mode & stat.S_ISVTX:
            _put(path, run_token)
    try:
        return (path / TOKEN_FILE).read_text(encoding="utf-8") == run_token
    except OSError:
        return False


def _put(path: Path, run_token: str) -> None:
    """Replace an empty folder by one with the token, unless another process is faster."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    draft.mkdir()
    (draft / TOKEN_FILE).write_text(run_token, encoding="utf-8")
    try:
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft)
