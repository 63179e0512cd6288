"""TensorBoard: a writer that cannot hang, and videos."""

from __future__ import annotations

import io
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tensorboardX import FileWriter, SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

__all__ = ["TensorboardWriter", "add_video"]

_FLUSH_S = 10.0  # what is older than this can be seen in tensorboard, and outlasts a crash


class TensorboardWriter(SummaryWriter):  # type: ignore[misc]
    """A ``SummaryWriter`` that writes in the thread that logs, and raises there what goes wrong.

    tensorboardX writes on a thread of its own. On a full disk that thread ends, and whoever logs
    on waits for ever for room in its queue, and so does the end of the process.

    Args:
        folder: where the file of events goes; made if it is missing.

    Raises:
        OSError: from each method, if the file cannot be written.
    """

    file_writer: Any

    def __init__(self, folder: Path) -> None:
        super().__init__(logdir=str(folder))

    def close(self) -> None:
        """Write the rest and close the file, also if that fails; twice is fine."""
        try:
            super().close()
        except OSError:
            with suppress(OSError):
                self.file_writer.close()
            raise

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            self.file_writer = _EventFileWriter(Path(self.logdir))
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _EventFileWriter(FileWriter):  # type: ignore[misc]
    """A ``FileWriter`` without a thread."""

    def __init__(self, folder: Path) -> None:
        self.event_writer = _EventFile(folder)
        self._default_metadata: dict[str, Any] = {}


class _EventFile:
    """The file behind a ``FileWriter``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        # Microseconds: a file that was begun in the same second is not written over.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = (folder / name).open("xb")
        self._closed = False
        self._flushed_at = time.monotonic()
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def get_logdir(self) -> str:
        return str(self._folder)

    def add_event(self, event: Any) -> None:
        with self._lock:
            if not self._closed:
                # All at once: an interrupt must not leave half a record, behind which none is read.
                self._file.write(_record(event.SerializeToString()))
                if time.monotonic() - self._flushed_at >= _FLUSH_S:
                    self._flush()

    def flush(self) -> None:
        with self._lock:
            if not self._closed:
                self._flush()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        self._file.flush()
        os.fsync(self._file.fileno())


def _record(data: bytes) -> bytes:
    """Frame an event as the files of tensorboard have it (TFRecord, TensorFlow)."""
    size = struct.pack("<Q", len(data))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (size, data))
    return size + next(sums) + data + next(sums)


def add_video(writer: Any, tag: str, video: npt.NDArray[np.uint8], step: int, *, fps: int) -> None:
    """Write films side by side into tensorboard, as an animated picture.

    ``SummaryWriter.add_video`` does the same through moviepy, which is no dependency here.

    Args:
        writer: a tensorboardX ``SummaryWriter``.
        tag: name in tensorboard.
        video: ``[N, T, C, H, W] uint8``.
        step: place on the axis.
        fps: pictures a second.
    """
    n_films, n_frames, n_channels, height, width = video.shape
    tiled = video.transpose(1, 3, 0, 4, 2).reshape(n_frames, height, n_films * width, n_channels)
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
    image = Summary.Image(
        height=height,
        width=n_films * width,
        colorspace=3,
        encoded_image_string=encoded.getvalue(),
    )
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
