"""What an evaluation shows: films for tensorboard, and a picture of the returns so far."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tensorboardX.proto.summary_pb2 import Summary

__all__ = ["add_video", "draw_returns"]


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


def draw_returns(
    path: str | Path, iterations: Sequence[int], returns: Sequence[Sequence[float]]
) -> None:
    """Draw mean and range of the returns of all evaluations so far.

    Args:
        path: the picture's file; its suffix decides on the format, its folder is made if need be.
        iterations: training iterations of the evaluations.
        returns: the returns of each evaluation's episodes.
    """
    # Loading it takes half a second, and few evaluations draw.
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
