"""The requests of the server's own hostile-input tests, for servers in processes of their own."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Bytes of a process that lie in memory now (RSS)."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most that lay in memory at any time, or since :func:`reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int) -> int:
    """Begin the peak anew; the bytes that lie in memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def virtual_bytes(pid: int) -> int:
    """Bytes of address space that a process has taken, which ``RLIMIT_AS`` bounds."""
    return _status(pid, "VmSize")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} of process {pid}")
