"""A redis server for tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest
import redis

from dmiddleware.closing import Closing


class RedisServer(Closing):
    """A real redis-server on a free port, without persistence."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def __enter__(self) -> Self:
        self.start()
        return self

    def close(self) -> None:
        """Kill the server."""
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._password or None)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--dir", str(self._folder),
             *(["--requirepass", self._password] if self._password else [])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server did not start"
                time.sleep(0.01)
        pytest.fail("redis-server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


def _binary() -> str:
    found = shutil.which("redis-server")
    if found is None and "CI" not in os.environ:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    assert found is not None, "redis-server must be installed where CI runs"
    return found
