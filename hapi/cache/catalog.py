"""Locations of cached records by dense id, in three arrays that are filled from the segments of all
processes.

They take 12 bytes for each sample of the dataset (120 MB for 10 million), however many are cached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hapi.arrays import Flags, IntArray
from hapi.cache.folder import SEGMENT
from hapi.cache.recovery import mend
from hapi.cache.segments import Contents, Small, drop_records, read_contents
from hapi.errors import SHORT_OF, DataError

log = logging.getLogger("hapi.cache")

LOOK_SECONDS = 1.0
"""Seconds between two looks for segments of other processes."""
_MOST_OPEN = 4096
"""Files of segments that stay open in this process, or a quarter of what the system allows if that is less."""
_FRESH_SECONDS = 0.1
"""A folder's time tells of changes only after this long: it has the resolution of the kernel's tick."""
_NEVER = -1


class RecordLocations(NamedTuple):
    """Locations of n samples in the cache; arrays [n]."""

    segment: Small
    """Number of the segment; 0 for a sample that is not cached."""
    start: Small
    length: Small
    """Bytes of the content as it is stored, without its head."""

    def of(self, rows: IntArray) -> RecordLocations:
        """Return the locations of ``rows``."""
        return RecordLocations(*(array[rows] for array in self))

    @property
    def held(self) -> Flags:
        """bool [n]"""
        return self.segment > 0


class _Segment:
    """A file; its descriptor while that is kept open."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self.dropped: set[int] = set()
        """Starts of records that were found damaged before the file was sealed."""

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class _OpenFiles:
    """Number of segments' files that all catalogs of this process keep open. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def admits(self) -> bool:
        """Count one more, if the process may have it."""
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = _MOST_OPEN if allowed == resource.RLIM_INFINITY else min(_MOST_OPEN, allowed // 4)
        with self._lock:
            if self._count >= limit:
                return False
            self._count += 1
            return True

    def leave(self, count: int) -> None:
        """Count ``count`` less."""
        with self._lock:
            self._count -= count


_OPEN = _OpenFiles()


class Catalogue:
    """Contents of the segments in one folder. Thread-safe."""

    def __init__(self, folder: Path, seed: int, count: int) -> None:
        """Begin an empty catalog.

        Args:
            folder: the folder of one version.
            seed: seed of its checksums (:func:`hapi.cache.segments.seed_of`).
            count: samples of the dataset; ids are 0 to ``count - 1``.
        """
        self._folder, self._seed, self._count = folder, seed, count
        self._locations = RecordLocations(*(np.zeros(count, dtype=np.uint32) for _ in range(3)))
        self._segments: dict[int, _Segment] = {}
        self._numbers = 0
        self._known: set[str] = set()
        """Names that were taken in, or are this process's own."""
        self._written: _Segment | None = None
        """The growing segment: its writer alone owns the file, readers have copies of its descriptor."""
        self._retired: list[_Segment] = []
        """Forgotten segments whose file some thread may still have open."""
        self._lock = threading.Lock()
        self._open = _OPEN
        """Files that are kept open; the others are opened for each read."""
        self._own_open = 0
        self._looked = self._seen_at = 0.0
        self._seen = _NEVER
        self._settled = False
        self._warned = False
        self._rescan()

    @property
    def samples(self) -> int:
        """Number of cached samples."""
        return int(np.count_nonzero(self._locations.segment))

    @property
    def stored_bytes(self) -> int:
        """Bytes of their contents, as they are stored."""
        return int(self._locations.length[self._locations.segment > 0].sum(dtype=np.int64))

    def find(self, ids: IntArray) -> RecordLocations:
        """Return the locations of samples ``ids``; other processes' segments show after about a second."""
        with self._lock:
            self._rescan_when_due()
            return self._locations.of(ids)

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        with self._lock:
            self._rescan_when_due()
            held: Flags = self._locations.segment[ids] > 0
            return held

    def descriptor(self, number: int, opened: contextlib.ExitStack) -> int | None:
        """Return an open file of segment ``number``; None when it is gone. ``opened`` closes it unless it is
        kept.
        """
        with self._lock:
            segment = self._segments.get(number)
            if segment is None:
                return None
            kept = segment.descriptor
            if kept is not None and segment is not self._written:
                return kept
            try:
                descriptor = (
                    os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC) if kept is None else os.dup(kept)
                )
            except OSError as error:  # removed by another process; or too many open files
                self._forget(number)
                self._look_again(segment.path, error)
                return None
            if kept is None and self._open.admits():
                segment.descriptor = descriptor
                self._own_open += 1
            else:
                opened.callback(os.close, descriptor)
            return descriptor

    def drop(self, ids: IntArray, locations: RecordLocations) -> None:
        """Forget the records of ``ids`` that were at ``locations`` and are damaged, for all processes from now on."""
        with self._lock:
            known = self._locations.of(ids)
            same = (known.segment == locations.segment) & (known.start == locations.start) & locations.held
            self._locations.segment[ids[same]] = 0
            for number in np.unique(locations.segment[same]).tolist():
                segment = self._segments.get(number)
                if segment is not None:
                    starts = locations.start[same & (locations.segment == number)].tolist()
                    self._warn(segment.path, "a record is not there or fails its checksum")
                    if segment is self._written:
                        segment.dropped.update(starts)
                    else:
                        self._drop_in(number, segment, starts)

    def dropped(self, number: int) -> set[int]:
        """Return the starts of damaged records in the written segment ``number``."""
        with self._lock:
            segment = self._segments.get(number)
            return set() if segment is None else set(segment.dropped)

    def begin(self, path: Path, descriptor: int) -> int:
        """Register the segment that this process writes next; return its number. The catalog closes its file."""
        with self._lock:
            self._written = _Segment(path, descriptor)
            return self._number(self._written)

    def add(self, number: int, contents: Contents) -> bool:
        """Add ``contents`` of segment ``number``; return False when the segment is gone."""
        with self._lock:
            if number in self._segments:
                self._note(number, contents)
            return number in self._segments

    def sealed(self, number: int, path: Path) -> None:
        """Turn the written segment ``number`` into a whole one at ``path``, like all others."""
        with self._lock:
            self._known.add(path.name)
            segment, self._written = self._written, None
            if segment is not None:
                segment.path = path
                if number in self._segments and self._open.admits():
                    self._own_open += 1
                else:
                    segment.close()

    def forget(self, number: int) -> None:
        """Forget the written segment ``number`` without a warning."""
        with self._lock:
            self._forget(number)
            if self._written is not None:
                self._written.close()
                self._written = None

    def refresh(self) -> None:
        """Take in what other processes have written until now, whenever the last look was."""
        with self._lock:
            self._rescan()

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for segment in [*self._segments.values(), *self._retired]:
                segment.close()
            self._segments.clear()
            self._retired.clear()
            self._open.leave(self._own_open)
            self._own_open = 0

    # -- all below under the lock ------------------------------------------------------------------------

    def _rescan_when_due(self) -> None:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._rescan()

    def _rescan(self) -> None:
        """Take in segments that have come since the last look."""
        self._looked = now = time.monotonic()
        try:
            changed = self._folder.stat().st_mtime_ns
            if changed != self._seen:
                self._seen, self._seen_at, self._settled = changed, now, False
            elif self._settled:
                return
            else:
                self._settled = now - self._seen_at > _FRESH_SECONDS
            for path in self._folder.glob(f"{SEGMENT}*"):
                if path.name not in self._known:
                    self._known.add(path.name)
                    try:
                        self._load(path)
                    except OSError as error:
                        self._look_again(path, error)
        except OSError:  # a folder that somebody removed has none
            self._seen = _NEVER

    def _look_again(self, path: Path, error: OSError | None = None) -> None:
        """Take a segment for a new one at the next look; after an ``error`` only if that passes by itself."""
        if error is None or error.errno in SHORT_OF:
            self._known.discard(path.name)
            self._seen = _NEVER

    def _load(self, path: Path) -> None:
        try:
            contents = self._contents(path)
        except FileNotFoundError:  # found damaged by another process just now
            return
        except DataError as error:
            self._warn(path, str(error))
            if not mend(path, self._seed):
                if path.exists():  # another process is at it
                    self._known.discard(path.name)
                return
            contents = self._contents(path)
        self._note(self._number(_Segment(path)), contents)

    def _contents(self, path: Path) -> Contents:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            contents = read_contents(descriptor, self._seed)
        finally:
            os.close(descriptor)
        return contents.rows(contents.ids < self._count)

    def _drop_in(self, number: int, segment: _Segment, starts: list[int]) -> None:
        """Mark records of a sealed segment as damaged; without others it goes."""
        try:
            descriptor = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # removed by another process
            self._forget(number)
            return
        try:
            left = drop_records(descriptor, self._seed, starts)
        except DataError:  # it is looked at again, and mended
            self._forget(number)
            self._look_again(segment.path)
        except OSError:
            self._forget(number)
        else:
            if not left:
                self._forget(number)
                with contextlib.suppress(OSError):
                    segment.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _number(self, segment: _Segment) -> int:
        self._numbers += 1
        self._segments[self._numbers] = segment
        return self._numbers

    def _note(self, number: int, contents: Contents) -> None:
        """A sample that was here already stays where it was."""
        new = self._locations.segment[contents.ids] == 0
        ids = contents.ids[new]
        self._locations.segment[ids] = number
        self._locations.start[ids] = contents.starts[new]
        self._locations.length[ids] = contents.lengths[new]

    def _forget(self, number: int) -> _Segment | None:
        segment = self._segments.pop(number, None)
        if segment is not None:
            self._locations.segment[self._locations.segment == number] = 0
            self._retired.append(segment)
        return segment

    def _warn(self, path: Path, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s is damaged (%s); what it lacks is fetched and kept again", path, why)
