"""The secret key of a run: where it lies, and what may be one.

Only processes with the run's key can join it. It lies in a file that no other user can read, or in
the environment variable ``DITASK_KEY``; never on a command line, which other users can see.
"""

from __future__ import annotations

import secrets
import stat
from pathlib import Path
from typing import Final

from dmiddleware.errors import ConfigError

__all__ = ["KEY_VARIABLE", "MIN_KEY_LENGTH", "check_key", "make_key", "read_key", "write_key"]

KEY_VARIABLE: Final = "DITASK_KEY"
"""The environment variable with the run's key."""

MIN_KEY_LENGTH: Final = 32
"""The shortest key, in characters."""

MIN_DIFFERENT: Final = 8
"""How many different characters a key has at least; a random one of 32 hexadecimal digits has fewer
in one of ten million cases."""


def make_key() -> bytes:
    """Return a new key of 64 hexadecimal digits."""
    return secrets.token_hex(32).encode()


def check_key(key: bytes, *, source: str) -> bytes:
    """Return the key.

    Args:
        key: the key.
        source: where it comes from, for the message.

    Raises:
        ConfigError: if it is too short, or has too few different characters.
    """
    for n, least, unit in (
        (len(key), MIN_KEY_LENGTH, "characters"),
        (len(set(key)), MIN_DIFFERENT, "different characters"),
    ):
        if n < least:
            raise ConfigError(
                f"the key in {source} has {n} {unit}, but needs at least {least}; "
                "make one with: openssl rand -hex 32"
            )
    return key


def read_key(file: Path | str, *, option: str = "--key-file") -> bytes:
    """Return the key in a file.

    Args:
        file: the file.
        option: the option that names it, for messages.

    Raises:
        ConfigError: if the file is missing or readable by other users, or the key is too short or
            has too few different characters.
    """
    try:
        mode = stat.S_IMODE(Path(file).stat().st_mode)
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{option} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(
            f"other users can read {option} {file} (mode {mode:04o}), and could join the run; "
            f"run: chmod 600 {file}"
        )
    return check_key(key, source=f"{option} {file}")


def write_key(file: Path, key: bytes) -> None:
    """Write the key to a file that only this user can read."""
    file.touch(mode=0o600)
    file.write_bytes(key + b"\n")
