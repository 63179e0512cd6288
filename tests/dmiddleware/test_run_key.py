"""The key of a run: one home for what may be a key and where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.run_key import MIN_KEY_LENGTH, check_key, make_key, read_key, write_key


def test_a_written_key_is_private_and_can_be_read(tmp_path: Path) -> None:
    key, file = make_key(), tmp_path / "key"
    write_key(file, key)
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_key(file) == key
    assert check_key(make_key(), source="itself") != key


@pytest.mark.parametrize("n", [0, 1, MIN_KEY_LENGTH - 1])
def test_a_short_key_is_refused_with_its_source(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"DITASK_KEY has {n} characters.*openssl"):
        check_key(b"k" * n, source="DITASK_KEY")


@pytest.mark.parametrize("key", [b"a" * 32, b"0123456" * 10, bytes(64)])
def test_a_key_of_few_different_characters_is_refused(key: bytes) -> None:
    with pytest.raises(ConfigError, match=r"DITASK_KEY has \d different characters.*openssl"):
        check_key(key, source="DITASK_KEY")


@pytest.mark.parametrize("key", [bytes(range(32)), b"01234567" * 4])
def test_long_keys_of_different_characters_are_accepted(key: bytes) -> None:
    assert check_key(key, source="DITASK_KEY") == key


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    write_key(file, make_key())
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(file)


def test_the_message_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learner_key cannot be read"):
        read_key(tmp_path / "missing", option="learner_key")
