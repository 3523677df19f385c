"""Who holds a lock: written into it, so that the other side can say so and recognise a dead owner."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

FORCE = "pass --force-lock"
"""What takes a lock whose owner nobody here can see to be dead, in a command that has this flag."""


def takeover_guard(key: str) -> str:
    """The object that whoever takes the lock ``key`` over from a dead owner holds meanwhile."""
    return f"{key}.takeover"


def lock_keys(key: str) -> tuple[str, str]:
    """The objects of the lock ``key``, each of which only its writer removes."""
    return key, takeover_guard(key)


@dataclass(frozen=True)
class LockOwner:
    """A process: host, process id, the process's start (clock ticks since boot), and a random token."""

    host: str
    pid: int
    started: int
    token: str

    @classmethod
    def this_process(cls) -> Self:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()), secrets.token_hex(8))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What a lock says; an unreadable one has an unknown owner, never known to be dead."""
        try:
            document = json.loads(data)
            return cls(
                str(document["host"]), int(document["pid"]), int(document["started"]), str(document["token"])
            )
        except (ValueError, KeyError, TypeError):
            return cls("an unknown host", 0, 0, "")

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_dead(self) -> bool:
        """True when the owner was a process of this host that is no more (its id may be another's now)."""
        return self.host == socket.gethostname() and self.pid > 0 and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_of(pid: int) -> int:
    """Start time of a process in clock ticks since boot (proc(5), stat field 22); -1 when there is none.

    Where there is no ``/proc``, 0 for every process that lives.
    """
    if Path("/proc/self/stat").exists():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return -1
        fields = stat.rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        return 0
    return 0
