"""Addresses of nodes that meet in a redis server: ``redis://host:port/db/name``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from dmiddleware.errors import TopologyError

__all__ = ["RedisAddress"]

_FORM = re.compile(
    r"redis://(?P<host>\[[^\]/]+\]|[^:/@\[]+):(?P<port>\d+)/(?P<db>\d+)/(?P<name>\S+)"
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a node can be reached through a redis server.

    Attributes:
        host: of the redis server.
        port: of the redis server.
        db: the number of its database.
        name: of the node in this database.
    """

    host: str
    port: int
    db: int
    name: str

    @classmethod
    def parse(cls, address: str) -> Self:
        """Read an address.

        Raises:
            TopologyError: if it is none; it shows what one looks like.
        """
        matched = _FORM.fullmatch(address)
        if matched is None or not 0 < int(matched["port"]) < 65536:
            raise TopologyError(
                f"{address!r} is no address of a node in redis; write redis://host:port/db/name, "
                "as in redis://127.0.0.1:6379/0/run/0 (a password goes into DITASK_REDIS_PASSWORD)"
            )
        return cls(
            matched["host"].strip("[]"), int(matched["port"]), int(matched["db"]), matched["name"]
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis://{host}:{self.port}/{self.db}/{self.name}"
