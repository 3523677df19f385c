"""Files of a sample cache: samples one after the other, and a footer with the location of each.

    record   checksum u64, id i64, label (words of 8 bytes), then the sample's bytes; the checksum covers all
             after itself
    footer   ids i64 [n], starts u32 [n], lengths u32 [n]
    trailer  "HAPISEG1", n u64, xxh3 of footer and n u64

All checksums are seeded with the dataset's name and version, so that a misplaced file is no segment. Readers
rely on the checksums alone: nothing is synced to the disk, and a file that a power cut emptied counts as
damaged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import Bytes, IntArray, LabelArray
from hapi.errors import DataError
from hapi.wire.labels import SINGLE, LabelForm
from hapi.wire.references import DatasetReference

_WORD = 8
_FOOT_BYTES = 16
"""Bytes of each sample in the footer."""
_TRAILER_BYTES = 24
_MAGIC = b"HAPISEG1"
Heads = npt.NDArray[np.uint64]
"""[n, 2 + words]: checksum, id and label of n records."""
Small = npt.NDArray[np.uint32]


def seed_of(reference: DatasetReference) -> int:
    """Return the seed of all checksums of one dataset version."""
    return xxhash.xxh3_64_intdigest(f"{reference.name}@{reference.version}".encode())


def head_bytes(form: LabelForm) -> int:
    """Bytes before each sample, with a label of this form."""
    return _WORD * (2 + form.words)


def record_bytes(form: LabelForm) -> int:
    """Bytes that a segment needs for a sample beside the sample's own."""
    return head_bytes(form) + _FOOT_BYTES


def segment_bytes(length: int, form: LabelForm) -> int:
    """The size of a segment with one sample of ``length`` bytes and nothing else."""
    return length + record_bytes(form) + _TRAILER_BYTES


def checksums(
    heads: Heads, data: memoryview, bounds: Sequence[tuple[int, int]], seed: int
) -> npt.NDArray[np.uint64]:
    """Return the checksum of each record, uint64 [n].

    Args:
        heads: ids and labels of the records, [n, 2 + words].
        data: bytes of all samples.
        bounds: start and stop of each sample in ``data``.
        seed: from :func:`seed_of`.
    """
    flat, size = byte_rows(heads), heads.shape[1] * _WORD
    found = np.empty(len(heads), dtype=np.uint64)
    for row, (start, stop) in enumerate(bounds):
        state = xxhash.xxh3_64(flat[row * size + _WORD : (row + 1) * size], seed)
        state.update(data[start:stop])
        found[row] = state.intdigest()
    return found


def byte_rows(heads: Heads) -> memoryview:
    """Return the heads' bytes, one after the other."""
    return heads.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Contents:
    """Contents of a segment: n samples."""

    ids: IntArray
    starts: Small
    """Offsets of the records in the file."""
    lengths: Small
    """Bytes of the samples."""


def read_contents(descriptor: int, seed: int, count: int, form: LabelForm) -> Contents:
    """Return the footer of a sealed segment.

    Args:
        descriptor: the open file.
        seed: from :func:`seed_of`.
        count: samples of the dataset, the bound of all ids.
        form: of the dataset's labels.

    Raises:
        DataError: some part of the footer does not fit.
    """
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, _TRAILER_BYTES, max(0, size - _TRAILER_BYTES))
    if len(trailer) != _TRAILER_BYTES or trailer[:8] != _MAGIC:
        raise DataError("it has no trailer")
    held, checksum = np.frombuffer(trailer[8:], dtype=np.uint64).tolist()
    begin = size - _TRAILER_BYTES - held * _FOOT_BYTES
    if begin < 0:
        raise DataError("its footer does not fit")
    footer = os.pread(descriptor, held * _FOOT_BYTES, begin)
    if xxhash.xxh3_64_intdigest(footer + trailer[8:16], seed) != checksum:
        raise DataError("its footer is damaged, or of another dataset")
    ids = np.frombuffer(footer, np.int64, held)
    starts = np.frombuffer(footer, np.uint32, held, 8 * held)
    lengths = np.frombuffer(footer, np.uint32, held, 12 * held)
    ends = starts.astype(np.int64) + lengths + head_bytes(form)
    if held and (ids.min() < 0 or ids.max() >= count or ends.max() > begin):
        raise DataError("its footer names samples that cannot be")
    return Contents(ids, starts, lengths)


@dataclass(eq=False)
class SegmentWriter:
    """A growing segment in an open file that its owner has locked. Not thread-safe."""

    descriptor: int
    capacity: int
    """Most bytes that the file may have."""
    seed: int
    form: LabelForm = SINGLE
    """Form of the labels."""
    end: int = 0
    """Offset of the next record."""
    _held: list[Contents] = field(default_factory=list)
    samples: int = 0

    def fitting(self, lengths: IntArray) -> int:
        """Return how many samples of these lengths fit, counted from the first."""
        room = self.capacity - _TRAILER_BYTES - self.samples * _FOOT_BYTES - self.end
        return int(np.searchsorted(np.cumsum(lengths + record_bytes(self.form)), room, side="right"))

    def append(
        self, ids: IntArray, labels: LabelArray, data: Bytes, starts: IntArray, lengths: IntArray
    ) -> Contents:
        """Write samples at the end of the segment, and return their locations.

        Args:
            ids: int64 [n].
            labels: of the segment's form, n of them.
            data: bytes that hold the samples.
            starts: begin of each sample in ``data``, [n].
            lengths: bytes of each sample, [n].

        Raises:
            OSError: the file cannot be written.
        """
        size = head_bytes(self.form)
        heads = np.empty((len(ids), size // _WORD), dtype=np.uint64)
        heads[:, 1], heads[:, 2:] = ids.view(np.uint64), self.form.to_words(labels)
        bounds = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
        heads[:, 0] = checksums(heads, data.data, bounds, self.seed)
        flat = byte_rows(heads)
        buffers = [
            buffer
            for row, (start, stop) in enumerate(bounds)
            for buffer in (flat[row * size : (row + 1) * size], data.data[start:stop])
        ]
        records = b"".join(buffers)
        _write(self.descriptor, records, self.end)
        begins = self.end + np.cumsum(lengths + size) - lengths - size
        found = Contents(ids, begins.astype(np.uint32), lengths.astype(np.uint32))
        self._held.append(found)
        self.end += len(records)
        self.samples += len(ids)
        return found

    def finish(self) -> None:
        """Write the footer and cut the file to its size; OSError when that fails."""
        names = ("ids", "starts", "lengths")
        footer = b"".join(getattr(part, name).tobytes() for name in names for part in self._held)
        count = np.array([self.samples], dtype=np.uint64).tobytes()
        checksum = np.array([xxhash.xxh3_64_intdigest(footer + count, self.seed)], dtype=np.uint64)
        _write(self.descriptor, footer + _MAGIC + count + checksum.tobytes(), self.end)
        os.ftruncate(self.descriptor, self.end + len(footer) + _TRAILER_BYTES)


def _write(descriptor: int, data: bytes, start: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)
