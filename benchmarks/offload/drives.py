"""Drives of the benchmark: throttled ones, and the rate of what is there under an offloaded step's mix of bytes."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hapi.arrays import Bytes
from hapi.offload.states import disk
from hapi.offload.states.drive import Drive
from hapi.process.direct_io import aligned, transfer_buffer
from hapi.profiler.offload_costs import PIECE_ELEMENTS

READ_BYTES, WRITTEN_BYTES = 8 * PIECE_ELEMENTS, 12 * PIECE_ELEMENTS
"""Bytes of a piece with AdamW in fp32, whose masters are in memory."""


def slow_drive(rate: float) -> type[Drive]:
    """Return a kind of drive that moves at most ``rate`` bytes a second, one transfer after the other."""

    class SlowDrive(Drive):
        """A drive with a rate."""

        def __init__(self, path: Path, nbytes: int) -> None:
            """Open it; transfers of all threads have one rate together."""
            super().__init__(path, nbytes)
            self._one = threading.Lock()

        def read(self, at: int, values: Bytes) -> None:
            """Read, and wait for what the rate leaves."""
            with self._one, _at_rate(rate, len(values)):
                super().read(at, values)

        def write(self, at: int, values: Bytes) -> None:
            """Write, and wait for what the rate leaves."""
            with self._one, _at_rate(rate, len(values)):
                super().write(at, values)

    return SlowDrive


def use_slow_drives(rate: float) -> None:
    """Make each drive of this process's states one of ``rate``, from now on."""
    vars(disk)["Drive"] = slow_drive(rate)


@contextlib.contextmanager
def _at_rate(rate: float, nbytes: int) -> Iterator[None]:
    began = time.monotonic()
    yield
    time.sleep(max(0.0, began + nbytes / rate - time.monotonic()))


def mixed_rate(folders: Sequence[Path], nbytes: int, rate: float = 0.0) -> float:
    """Measure the bytes a second of all drives together, under the mix of reads and writes of a step with AdamW.

    One thread reads and writes by turns, or one reads while one writes: the faster of both counts.

    Args:
        folders: one on each drive.
        nbytes: that each drive moves, about.
        rate: of each drive, as of :func:`slow_drive`; 0 for the disk as it is.
    """
    pieces = max(2, nbytes // (READ_BYTES + WRITTEN_BYTES))
    size = pieces * WRITTEN_BYTES
    kind = slow_drive(rate) if rate else Drive
    with contextlib.ExitStack() as stack:
        drives = []
        for folder in folders:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="hapi-rate-", dir=folder))
            drive = kind(Path(own) / "probe", size)
            stack.callback(drive.close)
            drives.append(drive)
        for drive in drives:
            _write(drive, pieces)  # what was never written is read too fast
        by_turns = _seconds([lambda drive=drive: _both(drive, pieces) for drive in drives])  # type: ignore[misc]
        together = _seconds(
            [
                lambda drive=drive, move=move: move(drive, pieces)  # type: ignore[misc]
                for drive in drives
                for move in (_read, _write)
            ]
        )
    return len(drives) * pieces * (READ_BYTES + WRITTEN_BYTES) / min(by_turns, together)


def _seconds(jobs: Sequence[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=job, name="hapi-rate") for job in jobs]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def _buffer() -> Bytes:
    buffer = transfer_buffer(aligned(WRITTEN_BYTES))
    buffer[:] = np.random.default_rng(0).integers(0, 256, len(buffer), np.uint8)
    return buffer


def _both(drive: Drive, pieces: int) -> None:
    buffer = _buffer()
    for number in range(pieces):
        drive.read((number + 1) % pieces * WRITTEN_BYTES, buffer[:READ_BYTES])
        drive.write(number * WRITTEN_BYTES, buffer[:WRITTEN_BYTES])
    drive.sync()


def _read(drive: Drive, pieces: int) -> None:
    buffer = _buffer()
    for number in range(pieces):
        drive.read(number * WRITTEN_BYTES, buffer[:READ_BYTES])


def _write(drive: Drive, pieces: int) -> None:
    buffer = _buffer()
    for number in range(pieces):
        drive.write(number * WRITTEN_BYTES, buffer[:WRITTEN_BYTES])
    drive.sync()
