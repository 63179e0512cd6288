"""TensorBoard: a writer that cannot hang, and videos."""

from __future__ import annotations

import errno
import io
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tensorboardX import FileWriter, SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import hparams, scalar

from dmiddleware.best_effort import BestEffort
from dmiddleware.tree import to_float

__all__ = ["TensorboardWriter", "add_gif", "encode_video"]

_BUFFER = 8192
_FLUSH_S = 10.0  # older events are visible in TensorBoard, and survive a crash


class TensorboardWriter(SummaryWriter):  # type: ignore[misc]
    """A ``SummaryWriter`` that writes in the thread that logs.

    tensorboardX writes in a background thread. If the disk is full, that thread ends, and the
    program hangs: in the next call that logs, because the queue stays full, or when it exits. Here,
    events that cannot be written are dropped, with one warning, and later ones are written again
    when that is possible.

    Args:
        folder: the folder for event files; created if missing.
    """

    file_writer: Any
    all_writers: dict[str, Any] | None

    def __init__(self, folder: Path) -> None:
        self._best_effort = BestEffort(f"write TensorBoard events to {folder}")
        super().__init__(logdir=str(folder))

    def add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        """Write a number, or an array or tensor with one element."""
        summary = scalar(tag, to_float(scalar_value))
        self._get_file_writer().add_summary(summary, global_step, walltime)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        """Write numbers that share one plot; each gets a folder ``<main_tag>/<tag>``."""
        self._get_file_writer()
        assert self.all_writers is not None
        for tag, value in tag_scalar_dict.items():
            folder = Path(self.logdir, main_tag, tag)
            writer = self.all_writers.get(str(folder))
            if writer is None:
                writer = self.all_writers[str(folder)] = _EventFileWriter(folder, self._best_effort)
            writer.add_summary(scalar(main_tag, to_float(value)), global_step, walltime)

    def add_settings(self, settings: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Write the settings of a run for TensorBoard's HParams.

        They are in the run's own file. ``SummaryWriter.add_hparams`` makes another folder for them,
        which TensorBoard takes for another run.

        Args:
            settings: the values by name; those that are not numbers, strings or booleans are
                written as strings, and None is left out.
            metrics: the names of the metrics to show with them.
        """
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
            if value is not None
        }
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._get_file_writer().add_summary(summary)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            folder = Path(self.logdir)
            self.file_writer = _EventFileWriter(folder, self._best_effort)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _EventFileWriter(FileWriter):  # type: ignore[misc]
    """A ``FileWriter`` without a thread."""

    def __init__(self, folder: Path, best_effort: BestEffort) -> None:
        self.event_writer = _EventFile(folder, best_effort)
        self._default_metadata: dict[str, Any] = {}


class _EventFile:
    """The file behind a ``FileWriter``."""

    def __init__(self, folder: Path, best_effort: BestEffort) -> None:
        self._folder = folder
        self._best_effort = best_effort
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._header = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records: list[bytes] = []
        self._n_waiting = 0
        self._closed = False
        self._flushed_at = time.monotonic()
        with self._lock:
            self._write()

    def get_logdir(self) -> str:
        return str(self._folder)

    def add_event(self, event: Any) -> None:
        with self._lock:
            if not self._closed:
                record = _record(event.SerializeToString())
                self._records.append(record)
                self._n_waiting += len(record)
                is_late = time.monotonic() - self._flushed_at >= _FLUSH_S
                if is_late or self._n_waiting > _BUFFER:
                    self._write(flush=is_late)

    def flush(self) -> None:
        with self._lock:
            if not self._closed:
                self._write(flush=True)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._write()
            if self._file is not None:
                self._file.close()

    def _write(self, *, flush: bool = False) -> None:
        with self._best_effort:
            self._write_records(flush=flush)
        self._records, self._n_waiting = [], 0

    def _write_records(self, *, flush: bool) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Microseconds, since two writers of one folder may start in the same second.
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
            self._file = (self._folder / name).open("xb", buffering=0)
        begin = self._file.tell()
        header = [] if begin else [_record(self._header.SerializeToString())]
        data = b"".join([*header, *self._records])
        if self._file.write(data) != len(data):
            # Readers stop at an incomplete record.
            self._file.truncate(begin)
            self._file.seek(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._records, self._n_waiting = [], 0
        if flush:
            self._flushed_at = time.monotonic()
            os.fsync(self._file.fileno())


def _record(data: bytes) -> bytes:
    """Return an event as a record of an event file (TensorFlow's TFRecord format)."""
    size = struct.pack("<Q", len(data))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (size, data))
    return size + next(sums) + data + next(sums)


def add_gif(writer: Any, tag: str, gif: bytes, step: int) -> None:
    """Write an animated image, such as that of :func:`encode_video`, to TensorBoard.

    ``SummaryWriter.add_video`` does the same for frames but needs moviepy.

    Args:
        writer: a tensorboardX ``SummaryWriter``.
        tag: the name in TensorBoard.
        gif: the file's content.
        step: the position on the horizontal axis.
    """
    width, height = Image.open(io.BytesIO(gif)).size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def encode_video(video: npt.NDArray[np.uint8], *, fps: int) -> bytes:
    """Return videos side by side as one animated GIF.

    Args:
        video: ``[N, T, C, H, W] uint8``.
        fps: frames per second.
    """
    n_videos, n_frames, n_channels, height, width = video.shape
    tiled = video.transpose(1, 3, 0, 4, 2).reshape(n_frames, height, n_videos * width, n_channels)
    if n_channels == 1:
        tiled = tiled.repeat(3, axis=-1)
    frames = [Image.fromarray(frame) for frame in tiled]
    encoded = io.BytesIO()
    frames[0].save(
        encoded,
        format="GIF",
        save_all=True,
        append_images=frames[1:],
        duration=round(1000 / fps),
        loop=0,
    )
    return encoded.getvalue()
