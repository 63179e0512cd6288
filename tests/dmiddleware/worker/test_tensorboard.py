"""Tensorboard writers."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

from dmiddleware.worker import EventLog

DEADLINE_S = 60.0


def test_a_full_disk_is_an_error_of_who_logs_and_never_a_hang(tmp_path: Path) -> None:
    raised: list[OSError] = []

    def log() -> None:
        writer = EventLog(tmp_path)
        try:
            for step in range(1000):
                writer.add_scalar("loss", 1.0, step)
        except OSError as error:
            raised.append(error)
        try:
            writer.close()
        except OSError as error:
            raised.append(error)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        thread = threading.Thread(target=log, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not thread.is_alive()
    assert len(raised) == 2


def test_files_of_one_second_are_not_written_over(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        writer = EventLog(tmp_path)
        writer.add_scalar("loss", value, 0)
        writer.close()
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 50
