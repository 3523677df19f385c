"""Records of one version in the cache: stored samples of a dataset, or features of a key, each with its label.

A record is read straight into its place in the caller's buffer, as it is stored, and checked.
:mod:`hapi.cache.folder` decides which segments are admitted and removed, :mod:`hapi.cache.catalog` knows the location
of each record, :mod:`hapi.cache.segments` reads and writes the files, and :mod:`hapi.cache.recovery` mends them.

A damaged record is a miss, with one warning; it is fetched and kept anew, and the others of its segment stay. When
writing fails (a full disk), nothing more is kept, with one warning. Neither stops the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np

from hapi.arrays import Bytes, Flags, IntArray, LabelArray
from hapi.cache.catalog import Catalogue, RecordLocations
from hapi.cache.disk_rates import DiskRates, RateMeter
from hapi.cache.folder import OPEN, CacheFolder
from hapi.cache.key_file import KEY_FILE, KeyFile, check_key, settle_key
from hapi.cache.segments import (
    HEAD_WORDS,
    SegmentWriter,
    byte_rows,
    checksums,
    codecs_in,
    head_bytes,
    record_bytes,
    seed_of,
    segment_bytes,
    sizes,
)
from hapi.cache.writing.put_rates import PutRates
from hapi.closing import Closing
from hapi.errors import FULL, ConflictError, HapiError
from hapi.process.read_ahead import announced
from hapi.process.write_back import begin_writing
from hapi.wire.labels import LabelForm
from hapi.wire.references import DatasetReference, check_digest, check_name
from hapi.wire.samples import Samples

log = logging.getLogger("hapi.cache")

SEGMENT_BYTES = 64 << 20
"""Size of a segment; less where the budget is below :data:`_SEGMENTS` of them."""
_SEGMENTS = 16
_LONGEST = 1 << 30
"""Bytes of a record: it is one read, and places in a segment have 32 bits."""
_MOST_KEY_BYTES = 16 << 10
"""Bytes of a file that says of which key a version is, where it is written anew."""
_FULL_SECONDS, _FULL_DISK_SECONDS = 10.0, 60.0
"""Seconds between two looks for new room: in the budget, and on a disk without any."""


class RecordCache(Closing):
    """Cached records of one version. Thread-safe; close it after the last read."""

    def __init__(
        self,
        folder: CacheFolder,
        reference: DatasetReference,
        count: int,
        form: LabelForm,
        *,
        key: KeyFile | None = None,
        behind: bool = False,
        lasting: bool = False,
    ) -> None:
        """Use ``folder`` for the records of a version; what a killed process has left of it is recovered.

        Args:
            folder: the cache's folder.
            reference: name and version.
            count: samples of the dataset; ids are 0 to ``count - 1``.
            form: of their labels.
            key: key that the version is the digest of; None for a dataset's own version.
            behind: puts may wait for the disk, so that their rate is the disk's.
            lasting: it is open for so long that a disk may be full and have room again: what could not be written is
                no reason to keep nothing after that.

        Raises:
            HapiError: the folder cannot be used, or has records of another key.
        """
        check_name(reference.name, "dataset")
        check_digest(reference.version, "dataset version")
        self.folder, self.path = folder, folder.version(reference)
        self._seed, self._form = seed_of(self.path.name), form
        self._key, self._behind, self._lasting = key, behind, lasting
        self.segment_bytes = min(SEGMENT_BYTES, folder.budget // _SEGMENTS)
        """Size of a segment of several records."""
        self._longest = min(_LONGEST, folder.budget // 2)
        self._writing = threading.Lock()
        self._writer: tuple[SegmentWriter, int, str] | None = None
        """The writer with the number and the token of its segment."""
        self._full_until = 0.0
        self._stopped = self._closed = self._warned = False
        self.trouble = ""
        """Reason why nothing more is kept, once something could not be written."""
        self._users: int | None = None
        """Marks the version as used; None while there is nothing of it."""
        self._attaching = threading.Lock()
        self._reading, self.puts = RateMeter(), PutRates(behind, folder.writes)
        if self.path.exists():
            self._attach()
        self._catalogue = Catalogue(self.path, self._seed, count)

    def _attach(self) -> None:
        """Mark the version as used, make its folder if it is not there, and recover what killed processes left."""
        with self._attaching:
            if self._users is not None or self._closed:
                return
            users = self.folder.attach(self.path)
            try:
                self._check_key()
                with contextlib.suppress(OSError, ConflictError):
                    self.folder.recover(self.path)
            except BaseException:
                os.close(users)
                raise
            self._users = users

    def _check_key(self) -> None:
        """Check that the version is of the key, and mend a file that does not say so any more."""
        if self._key is None or check_key(self.path, self._key) or not (self.path / KEY_FILE).exists():
            return
        with contextlib.suppress(OSError, ConflictError), self.folder.locked():
            settle_key(self.path, replace(self._key, made_with=()), _MOST_KEY_BYTES)

    def _attach_if_there(self) -> None:
        """Mark as used what another process has begun since the cache was opened."""
        if self._users is None and self.path.exists():
            with contextlib.suppress(HapiError, OSError):
                self._attach()

    @property
    def samples(self) -> int:
        """Number of cached samples."""
        return self._catalogue.samples

    @property
    def stored_bytes(self) -> int:
        """Bytes of their contents, as they are stored."""
        return self._catalogue.stored_bytes

    @property
    def admits(self) -> bool:
        """True while more samples can be cached, as far as is known."""
        return not self._stopped and time.monotonic() >= self._full_until

    def room(self, samples: int, mean_bytes: float) -> float:
        """Share of ``samples`` of ``mean_bytes`` each for which the whole budget has room; above 1 for more."""
        return self.folder.budget / max(1.0, samples * (mean_bytes + record_bytes(self._form)))

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        self._attach_if_there()
        return self._catalogue.held(ids)

    def refresh(self) -> None:
        """Take in what other processes have written until now."""
        self._attach_if_there()
        self._catalogue.refresh()

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` that is cached, from 0 to 1."""
        return float(self.held(ids).mean()) if len(ids) else 0.0

    def rates(self) -> DiskRates:
        """Return the measured rates of the disk, each of its last stretch."""
        return DiskRates(self._reading.rate, self.puts.rate)

    # -- reading -----------------------------------------------------------------------------------------

    def find(self, ids: IntArray) -> RecordLocations:
        """Return the locations of samples ``ids``."""
        self._attach_if_there()
        return self._catalogue.find(ids)

    def fill(
        self,
        ids: IntArray,
        locations: RecordLocations,
        starts: IntArray,
        out: Bytes,
        labels: LabelArray,
        codecs: Bytes | None = None,
    ) -> Flags:
        """Read record i to ``out[starts[i]:]`` as it is stored, and its label, and check it.

        Args:
            ids: int64 [n].
            locations: of :meth:`find`.
            starts: offsets in ``out``, [n].
            out: room for the contents.
            labels: room for n labels.
            codecs: room for the numbers of n codecs; None where an encoded record counts as damaged.

        Returns:
            bool [n]: False for a damaged one, which is dropped.
        """
        heads = np.empty((len(ids), HEAD_WORDS + self._form.words), dtype=np.uint64)
        bounds = list(zip(starts.tolist(), (starts + locations.length).tolist(), strict=True))
        came = 0
        self._reading.begin()
        try:
            read = self._read(locations, byte_rows(heads), out.data, bounds)
            came = int(locations.length[read].sum(dtype=np.int64))
        finally:
            self._reading.end(came)
        sound: Flags = read & (heads[:, 0] == checksums(heads, out.data, bounds, self._seed))
        if codecs is None:
            codecs = np.zeros(len(ids), dtype=np.uint8)
        else:
            codecs[:] = codecs_in(heads)
        sound &= heads[:, 1].view(np.int64) == ids
        sound &= heads[:, 2] == sizes(locations.length.astype(np.int64), self._form, codecs)
        if not sound.all():
            self.drop(ids[~sound], locations.of(np.flatnonzero(~sound)))
        labels[:] = self._form.from_words(heads[:, HEAD_WORDS:])
        return sound

    def drop(self, ids: IntArray, locations: RecordLocations) -> None:
        """Forget damaged records of ``ids``, which were at ``locations``."""
        self._catalogue.drop(ids, locations)

    def _read(
        self, locations: RecordLocations, heads: memoryview, out: memoryview, bounds: list[tuple[int, int]]
    ) -> Flags:
        """Heads and bytes of the records, in the order of the files; True for those that were there."""
        read = np.zeros(len(bounds), dtype=np.bool_)
        order = np.lexsort((locations.start, locations.segment))
        with contextlib.ExitStack() as opened:
            files = {n: self._catalogue.descriptor(n, opened) for n in np.unique(locations.segment).tolist()}
            numbers, starts = locations.segment[order].tolist(), locations.start[order].tolist()
            reads = [
                (file, start, row)
                for number, start, row in zip(numbers, starts, order.tolist(), strict=True)
                if (file := files[number]) is not None
            ]
            size = head_bytes(self._form)
            lengths = [size + stop - first for first, stop in bounds]
            for file, start, row in announced(reads, lambda read: (read[0], read[1], lengths[read[2]])):
                first, stop = bounds[row]
                head = heads[row * size : (row + 1) * size]
                with contextlib.suppress(OSError):  # of a disk that fails: as good as damaged
                    found = os.preadv(file, [head, out[first:stop]], start)
                    read[row] = found == lengths[row]
        return read

    # -- writing -----------------------------------------------------------------------------------------

    def put(self, samples: Samples, codecs: Bytes | None = None) -> None:
        """Cache those of ``samples`` that are new, as far as there is room. Never raises.

        Args:
            samples: their contents, as they are to be stored.
            codecs: numbers of the contents' codecs, uint8 [n]; None for raw ones.
        """
        if not self.admits:
            return
        with self._writing:
            if self._stopped or time.monotonic() < self._full_until:
                return
            try:
                self._append(samples, np.zeros(len(samples), np.uint8) if codecs is None else codecs)
            except ConflictError:
                self._full_until = time.monotonic() + _FULL_SECONDS
            except (OSError, HapiError) as error:
                self._stop(error)

    def flush(self) -> None:
        """Make the samples that were put available to other processes, present and future. Never raises."""
        with self._writing:
            self._flush()
        if self._behind:
            self.folder.remember()

    def _flush(self) -> None:
        try:
            self._seal()
        except ConflictError:
            pass  # what was written since the last time is lost
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Flush, and mark the version as unused by this process; closing twice does nothing."""
        with self._writing:
            if self._closed:
                return
            self._flush()
            self._closed = self._stopped = True
        if self._behind:
            self.folder.remember()
        self._catalogue.close()
        with self._attaching:
            if self._users is not None:
                self.folder.detach(self.path, self._users)
                self._users = None

    def _append(self, samples: Samples, codecs: Bytes) -> None:
        lengths = np.diff(samples.offsets)
        rows = np.flatnonzero(~self.held(samples.ids) & (lengths <= self._longest))
        rows = rows[np.sort(np.unique(samples.ids[rows], return_index=True)[1])]  # each sample once
        while len(rows):
            if self._writer is None:
                with self.puts.writing(0):  # a full journal holds up whoever makes a file, or names it
                    self._writer = self._new_segment(int(lengths[rows[0]]))
                if self._writer is None:
                    self._full_until = time.monotonic() + _FULL_SECONDS
                    return
            writer, number, _ = self._writer
            part = rows[: writer.fitting(lengths[rows])]
            rows = rows[len(part) :]
            if len(part):
                starts, began, end = samples.offsets[:-1][part], time.monotonic(), writer.end
                nbytes = int(lengths[part].sum())
                with self.puts.writing(nbytes):
                    held = writer.append(
                        samples.ids[part],
                        samples.labels[part],
                        samples.data,
                        starts,
                        lengths[part],
                        codecs[part],
                    )
                    if self._behind:
                        begin_writing(writer.descriptor, end, writer.end - end)
                self.puts.put(nbytes, began)
                self._catalogue.add(number, held)
            if len(rows) or number not in self._catalogue:  # which is gone
                if self._behind:
                    self.puts.wait(writer.descriptor, writer.end)
                self._seal()

    def _new_segment(self, length: int) -> tuple[SegmentWriter, int, str] | None:
        """Begin a segment for a record of ``length`` bytes and others; None when there is no room."""
        min_bytes = segment_bytes(length, self._form)
        if min_bytes > self.folder.budget:
            return None
        self._attach()
        self.folder.recover(self.path)
        key = self._key
        settle = None if key is None else partial(settle_key, self.path, key)
        reserved = self.folder.reserve(self.path, max(self.segment_bytes, min_bytes), min_bytes, settle)
        if reserved is None:
            return None
        writer = SegmentWriter(reserved.descriptor, reserved.capacity, self._seed, self._form)
        path = self.path / f"{OPEN}{reserved.token}"
        return writer, self._catalogue.begin(path, reserved.descriptor), reserved.token

    def _seal(self) -> None:
        """Make the open segment one that counts. One that cannot be sealed goes."""
        if self._writer is None:
            return
        self.puts.close()
        (writer, number, token), self._writer = self._writer, None
        whole = False
        try:
            dropped = self._catalogue.dropped(number)
            if writer.records > len(dropped) and number in self._catalogue:
                with self.puts.writing(0):
                    writer.finish(dropped)
                    path = self.folder.seal(self.path, token)
                fcntl.flock(writer.descriptor, fcntl.LOCK_UN)
                whole = True
                self._catalogue.sealed(number, path)
        finally:
            if not whole:
                self._catalogue.forget(number)
                with contextlib.suppress(OSError):
                    (self.path / f"{OPEN}{token}").unlink(missing_ok=True)

    def _stop(self, error: OSError | HapiError) -> None:
        """Keep nothing more, or nothing for a while; what is here stays of use."""
        passing = self._lasting and isinstance(error, OSError) and error.errno in FULL
        if passing:
            self._full_until = time.monotonic() + _FULL_DISK_SECONDS
        self._stopped = self._stopped or not passing
        reason = getattr(error, "strerror", None) or str(error)
        self.trouble = "" if passing else self.trouble or reason
        if not self._warned:
            self._warned = True
            log.warning(
                "cache %s: cannot be written (%s); training goes on, and nothing more is kept%s",
                self.folder.path,
                reason,
                " until there is room" if passing else "",
            )
        with contextlib.suppress(OSError, ConflictError):
            self._seal()
