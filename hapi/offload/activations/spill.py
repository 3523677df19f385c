"""Files of swapped activations: one without a name on each drive, written and read by that drive's own thread."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from hapi.arrays import Bytes
from hapi.cache.disk_rates import RateMeter
from hapi.offload.failures import ActivationError
from hapi.process.direct_io import ALIGNMENT, NO_DIRECT, aligned, read_whole, transfer_buffer, write_whole
from hapi.units import format_bytes

_PIECE = 2 << 20
_STRIPE = 1 << 20
"""Bytes below which a tensor is not cut over the drives."""
Done = Callable[[OSError | None], None]
_Move = Callable[[int, Bytes], None]
_Job = tuple[_Move, RateMeter, int, Bytes, Done]
Part = tuple["SpillDrive", int, int, int]
"""Drive, place in its file, and start and end in the tensor's bytes."""


class SpillDrive:
    """One folder's file, which has lost its name when it is opened: a killed process leaves nothing."""

    def __init__(self, folder: Path) -> None:
        """Open the file and start the thread.

        Raises:
            OSError: no file can be made in the folder.
        """
        self.folder = folder
        self.reading, self.writing = RateMeter(), RateMeter()
        self._descriptor, self._direct = _nameless(folder)
        self._buffer = transfer_buffer(_PIECE)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = self._used = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"activations {folder}", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> int:
        """Reserve a place in the file. Not thread-safe, as is :meth:`give`: the caller has a lock."""
        size = aligned(nbytes)
        self._used += size
        if self._free[size]:
            return self._free[size].pop()
        at, self._end = self._end, self._end + size
        return at

    def give(self, at: int, nbytes: int) -> None:
        """Free a place; an empty file begins at its start again, whatever the sizes were."""
        size = aligned(nbytes)
        self._used -= size
        if self._used:
            self._free[size].append(at)
        else:
            self._free.clear()
            self._end = 0

    def write(self, at: int, data: Bytes, done: Done) -> None:
        """Write in the background, then call ``done`` with the error, or None."""
        self._jobs.put((self._write, self.writing, at, data, done))

    def read(self, at: int, data: Bytes, done: Done) -> None:
        """Read in the background into ``data``, aligned memory of a multiple of the alignment, then call ``done``."""
        self._jobs.put((self._read, self.reading, at, data, done))

    def close(self) -> None:
        """Finish what was begun, end the thread and give the file's bytes back."""
        self._jobs.put(None)
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            move, meter, at, data, done = job
            error = self._timed(move, meter, at, data)
            del job, data  # whoever waits for this memory finds it free
            done(error)
            del done

    def _timed(self, move: _Move, meter: RateMeter, at: int, data: Bytes) -> OSError | None:
        started = time.monotonic()
        try:
            move(at, data)
        except OSError as error:
            return OSError(error.errno, os.strerror(error.errno or errno.EIO), str(self.folder))
        meter.add(len(data), time.monotonic() - started)
        return None

    def _write(self, at: int, data: Bytes) -> None:
        if not self._direct:
            write_whole(self._descriptor, at, data)
            return
        for start in range(0, len(data), _PIECE):  # a tensor's memory is not aligned to the disk's blocks
            piece = data[start : start + _PIECE]
            np.copyto(self._buffer[: len(piece)], piece)
            write_whole(self._descriptor, at + start, self._buffer[: aligned(len(piece))])

    def _read(self, at: int, data: Bytes) -> None:
        read_whole(self._descriptor, at, data, may_lack=ALIGNMENT)  # the padding after the last write


class SpillFiles:
    """Files on several drives, over which each large tensor is striped."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open a file in each folder, which is made if it is missing.

        Raises:
            OSError: a folder cannot be made or written.
        """
        self.drives: list[SpillDrive] = []
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                self.drives.append(SpillDrive(folder))
        except OSError:
            self.close()
            raise
        self._next = 0

    def take(self, nbytes: int) -> list[Part]:
        """Reserve places for a tensor's bytes, one on each drive, or on the next drive for a small one."""
        if nbytes < _STRIPE or len(self.drives) == 1:
            drive = self.drives[self._next % len(self.drives)]
            self._next += 1
            return [(drive, drive.take(nbytes), 0, nbytes)]
        step = aligned(-(-nbytes // len(self.drives)))
        cuts = [*range(0, nbytes, step), nbytes]
        return [
            (drive, drive.take(end - start), start, end)
            for drive, start, end in zip(self.drives, cuts, cuts[1:], strict=False)
        ]

    def give(self, parts: Sequence[Part]) -> None:
        """Free a tensor's places."""
        for drive, at, start, end in parts:
            drive.give(at, end - start)

    def rates(self) -> tuple[float | None, float | None]:
        """Measured bytes a second of all drives together, reading and writing; None before there were any."""
        reading = [drive.reading.rate for drive in self.drives]
        writing = [drive.writing.rate for drive in self.drives]
        return sum(filter(None, reading)) or None, sum(filter(None, writing)) or None

    def check_room(self, nbytes: int) -> None:
        """Raise ActivationError unless the drives have so many bytes for striped tensors."""
        free = self.free_bytes()
        if nbytes > free:
            raise ActivationError(
                f"activations need {format_bytes(nbytes)} on disk, which has {format_bytes(free)}: free some, or take "
                "a smaller batch"
            )

    def free_bytes(self) -> int:
        """Bytes that a striped tensor finds room for: that of the fullest drive, times the drives."""
        stats = [os.statvfs(drive.folder) for drive in self.drives]
        return min((stat.f_bavail * stat.f_frsize for stat in stats), default=0) * len(stats)

    def close(self) -> None:
        """End the threads and give all bytes back."""
        for drive in self.drives:
            drive.close()
        self.drives = []


def _nameless(folder: Path) -> tuple[int, bool]:
    """Open a file without a name, past the page cache where the file system can."""
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (*NO_DIRECT, errno.EISDIR):
                raise
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".activations-")
    Path(name).unlink()
    return descriptor, False
