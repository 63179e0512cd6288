"""Images of envs: what ``env.render()`` returns, in whatever form, as ``[H, W, 3] uint8``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.env.batching import is_tensor, kind_of
from dmiddleware.errors import EnvStateError

__all__ = ["Frame", "Picture", "as_frame", "as_picture", "picture_of", "pictures_of"]

Frame: TypeAlias = npt.NDArray[np.uint8]
"""An image ``[H, W, 3]``."""

Picture: TypeAlias = Frame | EnvStateError
"""An image, or why there is none."""

_CHANNELS: Final = (1, 3, 4)
_ROUNDING: Final = 1e-3


def picture_of(env: Any) -> Picture:
    """Return the image of an env, or why there is none."""
    try:
        frame = env.render()
    except Exception as error:  # noqa: BLE001 - an env may raise anything
        return _raised(error)
    return as_picture(frame, getattr(env, "render_mode", None))


def pictures_of(vector_env: Any, env_ids: Iterable[int]) -> list[Picture]:
    """Return images of some envs of a vector env, or why there are none."""
    mode = getattr(vector_env, "render_mode", None)
    try:
        frames = vector_env.render()
    except Exception as error:  # noqa: BLE001 - an env may raise anything
        return [_raised(error) for _ in env_ids]
    if hasattr(frames, "__len__") and len(frames) == vector_env.num_envs:
        return [as_picture(frames[env_id], mode) for env_id in env_ids]
    missing = EnvStateError(
        f"render() of the vector env returned a {kind_of(frames)} with render_mode={mode!r}, not "
        f"an image of each of its {vector_env.num_envs} envs; make it with "
        'env_kwargs={"render_mode": "rgb_array"}'
    )
    return [missing for _ in env_ids]


def _raised(error: Exception) -> EnvStateError:
    return EnvStateError(f"render() raised {type(error).__name__}: {error}")


def as_picture(frame: Any, render_mode: str | None) -> Picture:
    """Return a result of ``env.render()`` as an image, or why it is none."""
    try:
        return as_frame(frame, render_mode)
    except EnvStateError as error:
        return error


def as_frame(frame: Any, render_mode: str | None = "rgb_array") -> Frame:
    """Return a result of ``env.render()`` as an image ``[H, W, 3] uint8``.

    It may be an array, a tensor or a list, with channels last, channels first or without channels,
    with an alpha channel, which is left out, and with integers from 0 to 255, numbers from 0 to 1
    or booleans. Of several images, as with ``render_mode="rgb_array_list"``, it is the last one.

    Raises:
        EnvStateError: if it is not an image.
    """
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape[2:] == (3,):
        usual: Frame = frame
        if usual.size:
            return usual
    try:
        image = _last_image(frame, str(render_mode))
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths, for example
        image = np.zeros(0)
    if image.ndim == 2:
        image = image[..., np.newaxis]
    elif image.ndim == 3 and image.shape[0] in _CHANNELS and image.shape[2] not in _CHANNELS:
        image = np.moveaxis(image, 0, 2)
    is_image = image.ndim == 3 and image.shape[2] in _CHANNELS and image.size > 0
    if not is_image or image.dtype.kind not in "buif":
        raise EnvStateError(
            f"render() returned a {kind_of(frame)} with render_mode={render_mode!r}, not an image "
            '[H, W, 3]; make the env with env_kwargs={"render_mode": "rgb_array"}'
        )
    image = np.broadcast_to(image[..., :3], (*image.shape[:2], 3))
    return _as_bytes(image, kind_of(frame))


def _last_image(frame: Any, render_mode: str) -> npt.NDArray[Any]:
    """Return the last image of a result of ``env.render()`` as an array."""
    if isinstance(frame, list | tuple) and frame:
        is_several = render_mode.endswith("_list") or getattr(frame[-1], "ndim", 0) == 3
        frame = frame[-1] if is_several else frame
    if is_tensor(frame):
        frame = frame.detach().cpu()
        frame = (frame.float() if frame.is_floating_point() else frame).numpy()
    image = np.asarray(frame)
    return image[-1] if image.ndim == 4 and len(image) else image


def _as_bytes(image: npt.NDArray[Any], kind: str) -> Frame:
    """Return the values of an image from 0 to 255.

    Raises:
        EnvStateError: if they have another range.
    """
    if image.dtype == np.uint8:
        return image
    low, high = float(image.min()), float(image.max())
    if not (low >= -_ROUNDING and high <= 255 + _ROUNDING):  # NaN is neither
        raise EnvStateError(
            f"render() returned a {kind} of {image.dtype} with values from {low:g} to {high:g}; an "
            "image has integers from 0 to 255, numbers from 0 to 1, or booleans"
        )
    is_fraction = image.dtype.kind == "b" or (image.dtype.kind == "f" and high <= 1 + _ROUNDING)
    scaled = np.rint(image * (255.0 if is_fraction else 1.0))
    return np.clip(scaled, 0, 255).astype(np.uint8)
