"""Step data and policies in files that all workers can reach."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dmiddleware.data import pack_checkpoint, unpack_checkpoint
from dmiddleware.errors import CheckpointDamaged, ConfigError
from dmiddleware.files.atomic_file import remove_leftovers, write_atomically
from dmiddleware.worker.comm.compression import (
    COMPRESSORS,
    compress,
    decompress,
    usable_compressor,
)
from dmiddleware.worker.errors import StepDataLost

__all__ = ["FileStore"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_SUFFIX: Final = ".safetensors"
_ENDINGS: Final = {name: _SUFFIX + ("" if name == "none" else f".{name}") for name in COMPRESSORS}


class FileStore:
    """A :class:`~dmiddleware.worker.comm.store.Store` in two folders of a shared file system.

    Step data is in ``<path_data>/<run_id>/<name>.safetensors``, with ``.lz4`` or ``.zlib`` at the
    end if it is compressed; a reference is such a path below ``path_data``. Policies are in
    ``<path_policy>/<name>.safetensors``. All files are packed like checkpoints, so reading one
    never executes code. They are written atomically, so a reader never sees half of one.

    Args:
        path_data: the folder for step data; created when needed.
        path_policy: the folder for policies; created when needed.
        run_id: the run's name: runs that share a ``path_data`` must have different ones.
        compressor: ``none``, ``zlib`` or ``lz4``; without lz4 installed, ``lz4`` means ``zlib``.

    Raises:
        ConfigError: for an unknown compressor, or a name with other characters than letters,
            digits, ``_``, ``.`` and ``-``.
    """

    def __init__(
        self,
        path_data: str | os.PathLike[str],
        path_policy: str | os.PathLike[str],
        run_id: str,
        *,
        compressor: str = "lz4",
    ) -> None:
        self._data = Path(path_data)
        self._policies = Path(path_policy)
        self._run = _checked_name(run_id)
        self._compressor = usable_compressor(compressor)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[tuple[int, int, int], int]] = {}
        if (self._data / self._run).is_dir():
            remove_leftovers(_below(self._data, self._run))

    def put(self, name: str, value: Any) -> str:
        """Write step data: nested containers of tensors, arrays, numbers and strings.

        Returns:
            The reference: the file's path below ``path_data``.

        Raises:
            ConfigError: for a name that cannot be a file's.
            TypeError: if a file cannot hold the value.
            OSError: if the file cannot be written.
        """
        ref = f"{self._run}/{_checked_name(name)}{_ENDINGS[self._compressor]}"
        content = compress(self._compressor, pack_checkpoint(value))
        write_atomically(
            _below(self._data, ref), lambda file: file.writelines([content]), durable=False
        )
        return ref

    def get(self, ref: str) -> Any:
        """Read step data.

        Raises:
            StepDataLost: if the file is missing or damaged.
            ConfigError: if the reference is not one of this store's run, or the file's compressor
                is not installed.
        """
        path, data_id, compressor = self._resolved(ref)
        try:
            return unpack_checkpoint(decompress(compressor, path.read_bytes()))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise StepDataLost(
                f"the step data {data_id} cannot be read from {path}: {error}; ask for another "
                "sample instead",
                data_id=data_id,
            ) from error

    def delete(self, refs: Iterable[str]) -> None:
        """Delete the files of step data; those that are already gone are ignored.

        Raises:
            ConfigError: if a reference is not one of this store's run; no file is deleted then.
        """
        for path, _, _ in [self._resolved(ref) for ref in refs]:
            path.unlink(missing_ok=True)

    def missing(self, refs: Iterable[str]) -> set[str]:
        """Return which of the references have no file.

        Raises:
            ConfigError: if a reference is not one of this store's run.
        """
        return {ref for ref in refs if not self._resolved(ref)[0].is_file()}

    def publish(self, name: str, version: int, state: Mapping[str, Any]) -> None:
        """Replace a policy's file; readers see the old state or the new one, whole.

        Raises:
            ConfigError: for a name that cannot be a file's.
            TypeError: if a file cannot hold the state.
            OSError: if the file cannot be written.
        """
        content = pack_checkpoint({"version": int(version), "state": state})
        write_atomically(
            self._policy_path(name), lambda file: file.writelines([content]), durable=False
        )

    def newest(self, name: str, have: int) -> tuple[int, Mapping[str, Any]] | None:
        """Return version and state of a policy, or None if none is newer than version ``have``.

        A file that has not changed since the last call is not read again.

        Raises:
            ConfigError: for a name that cannot be a file's.
            CheckpointDamaged: if the file is not a published policy.
        """
        path = self._policy_path(name)
        try:
            status = path.stat()
            signature = status.st_ino, status.st_mtime_ns, status.st_size
            with self._lock:
                seen = self._seen.get(name)
            if seen is not None and seen[0] == signature and seen[1] <= have:
                return None
            # At once: a reader that opens the file twice may find another one the second time.
            packed = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = unpack_checkpoint(packed)
            version, state = int(content["version"]), content["state"]
        except (KeyError, TypeError, CheckpointDamaged) as error:
            raise CheckpointDamaged(f"{path} does not hold a published policy: {error}") from error
        with self._lock:
            self._seen[name] = signature, version
        return (version, state) if version > have else None

    def clear(self) -> None:
        """Delete all step data of this run, and its folder; call it when the run has ended."""
        folder = _below(self._data, self._run)
        if folder.is_dir():
            shutil.rmtree(folder, onerror=_raise_if_there)

    def _policy_path(self, name: str) -> Path:
        return _below(self._policies, _checked_name(name) + _SUFFIX)

    def _resolved(self, ref: str) -> tuple[Path, str, str]:
        """Return the path, the data id and the compressor of a reference."""
        run, _, file = ref.partition("/")
        for compressor in reversed(COMPRESSORS):
            data_id = file.removesuffix(_ENDINGS[compressor])
            if data_id != file and run == self._run:
                _checked_name(data_id)
                return _below(self._data, ref), data_id, compressor
        raise ConfigError(
            f"{ref!r} is not a reference of this store; references look like "
            f"{self._run}/<data_id>{_ENDINGS[self._compressor]}"
        )


def _raise_if_there(function: object, path: str, info: tuple[Any, BaseException, Any]) -> None:
    """Raise the error of a deletion, unless a worker has deleted the file in the meantime."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(
            f"{name!r} cannot be the name of a file in the store; use letters, digits, '_', '.' "
            "and '-' only"
        )
    return name


def _below(folder: Path, name: str) -> Path:
    """Return a path below a folder, which no symbolic link leads out of."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{path} leads out of {folder} through a symbolic link; remove the link")
    return path
