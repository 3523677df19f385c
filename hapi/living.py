"""Identity of a process, written into locks and names of temporary files so that others can tell whether it lives.

A process id alone says little: two containers may share a host name and each have a process 7. So the identity has
the boot and the process-id namespace too, and a process is judged only by those who share both with it.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

_TEXT = re.compile(r"([0-9a-f]{0,32})-(\d{1,20})-(\d{1,10})-(\d{1,20})")


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, different from that of every other one on any machine."""

    host: str
    """Name of its machine or container, for messages."""
    boot: str
    """Random id of the machine's boot, 32 hex digits; empty where the system tells none."""
    namespace: int
    """Number of its process-id namespace in that boot; 0 where it cannot be known."""
    pid: int
    """Process id in that namespace."""
    started: int
    """Start of the process in clock ticks since boot; 0 where it cannot be known."""

    @classmethod
    def current(cls) -> Self:
        """The identity of this process."""
        boot, namespace = _boot_and_namespace(os.getpid())
        return cls(socket.gethostname(), boot, namespace, os.getpid(), _own_start() if boot else 0)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse the output of :meth:`to_json`; ValueError, KeyError or TypeError for anything else."""
        host, boot = document["host"], document["boot"]
        numbers = [document[key] for key in ("namespace", "pid", "started")]
        if not isinstance(host, str) or not isinstance(boot, str):
            raise TypeError("host and boot are no text")
        if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**63 for n in numbers):
            raise ValueError("namespace, pid and started are no counts")
        return cls(host, boot, *numbers)

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Parse the output of :meth:`to_text`, which has no host; None for anything else."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls("", match[1], *(int(part) for part in match.groups()[1:]))

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)

    def to_text(self) -> str:
        """One word, fit for a file's name; without the host."""
        return f"{self.boot}-{self.namespace}-{self.pid}-{self.started}"

    def shares_kernel(self) -> bool:
        """Return whether it ran, or runs, on the machine of this process and since the same boot."""
        return bool(self.boot) and self.boot == _boot_and_namespace(os.getpid())[0]

    def lives(self) -> bool | None:
        """Return whether the process lives; None when that cannot be seen from here."""
        boot, namespace = _boot_and_namespace(os.getpid())
        if not boot or not namespace or not self.pid or not self.started:
            return None
        if self.boot != boot or self.namespace != namespace:
            return None
        return _start_of(self.pid) == self.started if _is_seen(self.pid) else None

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" on {self.host}" if self.host else "")


@lru_cache(maxsize=2)
def _boot_and_namespace(pid: int) -> tuple[str, int]:
    """Boot id and process-id namespace of this process, ``pid`` (a fork may be in another one).

    Where ``/proc`` is that of another namespace, its process ids are not ours: nothing is known then.
    """
    try:
        if int(Path("/proc/self").readlink().name) != pid:
            return "", 0
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
        return (
            (boot, Path("/proc/self/ns/pid").stat().st_ino) if re.fullmatch("[0-9a-f]{32}", boot) else ("", 0)
        )
    except (OSError, ValueError):
        return "", 0


def _is_seen(pid: int) -> bool:
    """Return whether ``/proc`` would show process ``pid``; it may hide those of other users."""
    if Path(f"/proc/{pid}").exists():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True  # truly none
    except (OSError, OverflowError):
        return False
    return Path(f"/proc/{pid}").exists()


def _start_of(pid: int) -> int:
    """Start of a process in clock ticks since boot (proc(5), stat field 22); -1 when there is none that runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = stat.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


@lru_cache(maxsize=1)
def _own_start() -> int:
    """Start of this process, as :func:`_start_of`; 0 where it cannot be known."""
    return max(0, _start_of(os.getpid()))


os.register_at_fork(after_in_child=_own_start.cache_clear)
