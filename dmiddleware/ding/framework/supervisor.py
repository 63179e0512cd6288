"""The face of ``ding.framework.supervisor``: where an EnvSupervisor steps its envs."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["ChildType"]

REFUSED: Final = {
    name: "it steps envs in threads and processes; use EnvSupervisor of ding.envs"
    for name in ("Supervisor", "SendPayload", "RecvPayload", "Child", "SharedObject")
}


class ChildType(Enum):
    """Whether envs are stepped in processes of their own."""

    PROCESS = "process"
    THREAD = "thread"
