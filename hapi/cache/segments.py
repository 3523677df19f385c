"""Files of a cache: records one after the other, and a footer with the location of each.

    record   checksum u64, id i64, size u64 (bytes of the content as it is stored, 2^32 times the words of the label,
             and 2^56 times the number of the content's codec), label (words of 8 bytes), then the content; the
             checksum covers all after itself
    footer   ids i64 [n], starts u32 [n], lengths u32 [n], dropped u8 [n]: not 0 for a record that was found damaged
    trailer  "HAPISEG3", n u64, xxh3 of the footer without its last part, and of n, u64

All checksums are seeded with the name of the version, so that a misplaced file is no segment. Readers rely on the
checksums alone: a file that a power cut emptied counts as damaged. A record says how long it is, so a file without a
footer is read from its beginning (:mod:`hapi.cache.recovery`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import Bytes, IntArray, LabelArray
from hapi.errors import DataError
from hapi.wire.labels import SINGLE, LabelForm

WORD = 8
HEAD_WORDS = 3
"""Words before the label: checksum, id and size."""
SIZE_BITS, CODEC_BITS = 32, 56
"""Lowest bits of a record's label words and codec in its size."""
FOOT_BYTES = 17
"""Bytes of each record in the footer."""
TRAILER_BYTES = 24
_MAGIC = b"HAPISEG3"
_MOST_BUFFERS = 1024
"""Buffers of one write: the bound of Linux and of macOS."""
_DROPPED = b"\xff"
Heads = npt.NDArray[np.uint64]
"""[n, 3 + words]: checksum, id, size and label of n records."""
Small = npt.NDArray[np.uint32]


def seed_of(name: str) -> int:
    """Return the seed of all checksums of one version, by its name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def head_bytes(form: LabelForm) -> int:
    """Bytes before each record's content, with a label of this form."""
    return WORD * (HEAD_WORDS + form.words)


def record_bytes(form: LabelForm) -> int:
    """Bytes that a segment needs for a record beside its content."""
    return head_bytes(form) + FOOT_BYTES


def segment_bytes(length: int, form: LabelForm) -> int:
    """The size of a segment with one record of ``length`` bytes of content and nothing else."""
    return length + record_bytes(form) + TRAILER_BYTES


def sizes(lengths: IntArray, form: LabelForm, codecs: Bytes) -> npt.NDArray[np.uint64]:
    """Return the sizes in the heads of n records.

    Args:
        lengths: bytes of the contents, [n].
        form: of the labels.
        codecs: numbers of the contents' codecs, uint8 [n].
    """
    numbers = codecs.astype(np.uint64) << np.uint64(CODEC_BITS)
    return lengths.astype(np.uint64) | np.uint64(form.words << SIZE_BITS) | numbers


def codecs_in(heads: Heads) -> Bytes:
    """Return the numbers of the codecs that the heads of n records name, uint8 [n]."""
    return (heads[:, 2] >> np.uint64(CODEC_BITS)).astype(np.uint8)


def content_of(size: int) -> tuple[int, int]:
    """Return (words of the label, bytes of the content) by the size in a record's head."""
    return (size & ((1 << CODEC_BITS) - 1)) >> SIZE_BITS, size & ((1 << SIZE_BITS) - 1)


def checksums(
    heads: Heads, data: memoryview, bounds: Sequence[tuple[int, int]], seed: int
) -> npt.NDArray[np.uint64]:
    """Return the checksum of each record, uint64 [n].

    Args:
        heads: heads of the records, [n, 3 + words].
        data: bytes of all contents.
        bounds: start and stop of each content in ``data``.
        seed: from :func:`seed_of`.
    """
    flat, size = byte_rows(heads), heads.shape[1] * WORD
    found = np.empty(len(heads), dtype=np.uint64)
    for row, (start, stop) in enumerate(bounds):
        state = xxhash.xxh3_64(flat[row * size + WORD : (row + 1) * size], seed)
        state.update(data[start:stop])
        found[row] = state.intdigest()
    return found


def byte_rows(heads: Heads) -> memoryview:
    """Return the heads' bytes, one after the other."""
    return heads.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Contents:
    """Contents of a segment: n records."""

    ids: IntArray
    starts: Small
    """Offsets of the records in the file."""
    lengths: Small
    """Bytes of the contents."""

    def rows(self, which: npt.NDArray[np.bool_]) -> Contents:
        """Return those that ``which`` says, bool [n]."""
        return Contents(self.ids[which], self.starts[which], self.lengths[which])


def read_contents(descriptor: int, seed: int) -> Contents:
    """Return the footer of a sealed segment, without the records that were found damaged.

    Raises:
        DataError: some part of the footer does not fit.
    """
    contents, dropped, _ = _read_footer(descriptor, seed)
    return contents.rows(dropped == 0)


def _read_footer(descriptor: int, seed: int) -> tuple[Contents, npt.NDArray[np.uint8], int]:
    """All of a footer: its records, which of them are dropped, and the offset of the latter in the file."""
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, TRAILER_BYTES, max(0, size - TRAILER_BYTES))
    if len(trailer) != TRAILER_BYTES or trailer[:8] != _MAGIC:
        raise DataError("it has no trailer")
    held, checksum = np.frombuffer(trailer[8:], dtype=np.uint64).tolist()
    begin = size - TRAILER_BYTES - held * FOOT_BYTES
    if begin < 0:
        raise DataError("its footer does not fit")
    footer = os.pread(descriptor, held * FOOT_BYTES, begin)
    fixed = held * (FOOT_BYTES - 1)
    if (
        len(footer) != held * FOOT_BYTES
        or xxhash.xxh3_64_intdigest(footer[:fixed] + trailer[8:16], seed) != checksum
    ):
        raise DataError("its footer is damaged, or of another dataset")
    ids = np.frombuffer(footer, np.int64, held)
    starts = np.frombuffer(footer, np.uint32, held, 8 * held)
    lengths = np.frombuffer(footer, np.uint32, held, 12 * held)
    if held and (ids.min() < 0 or (starts.astype(np.int64) + lengths).max() > begin):
        raise DataError("its footer names records that cannot be")
    dropped = np.frombuffer(footer, np.uint8, held, fixed)
    return Contents(ids, starts, lengths), dropped, begin + fixed


def drop_records(descriptor: int, seed: int, starts: Iterable[int]) -> int:
    """Mark the records at ``starts`` of a sealed segment as damaged, for all who open it from now on.

    Returns:
        The number of records that are left.

    Raises:
        DataError: the footer is damaged too.
        OSError: the file cannot be written.
    """
    contents, dropped, offset = _read_footer(descriptor, seed)
    bad = np.isin(contents.starts, np.fromiter(starts, dtype=np.uint32))
    for row in np.flatnonzero(bad).tolist():
        os.pwrite(descriptor, _DROPPED, offset + row)
    return int(np.count_nonzero((dropped == 0) & ~bad))


def finish(descriptor: int, seed: int, end: int, contents: Contents, dropped: Iterable[int] = ()) -> None:
    """Write footer and trailer behind the records of a segment and cut the file to its size; OSError on failure.

    Args:
        descriptor: the file.
        seed: from :func:`seed_of`.
        end: offset behind the last record.
        contents: its records.
        dropped: starts of those that were found damaged.
    """
    fixed = b"".join(part.tobytes() for part in (contents.ids, contents.starts, contents.lengths))
    bad = np.isin(contents.starts, np.fromiter(dropped, dtype=np.uint32)).astype(np.uint8) * 255
    count = np.array([len(contents.ids)], dtype=np.uint64).tobytes()
    checksum = np.array([xxhash.xxh3_64_intdigest(fixed + count, seed)], dtype=np.uint64).tobytes()
    footer = fixed + bad.tobytes() + _MAGIC + count + checksum
    _write(descriptor, footer, end)
    os.ftruncate(descriptor, end + len(footer))


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
    records: int = 0

    def fitting(self, lengths: IntArray) -> int:
        """Return how many records with contents of these lengths fit, counted from the first."""
        room = self.capacity - TRAILER_BYTES - self.records * FOOT_BYTES - self.end
        return int(np.searchsorted(np.cumsum(lengths + record_bytes(self.form)), room, side="right"))

    def append(
        self,
        ids: IntArray,
        labels: LabelArray,
        data: Bytes,
        starts: IntArray,
        lengths: IntArray,
        codecs: Bytes,
    ) -> Contents:
        """Write records at the end of the segment, and return their locations.

        Args:
            ids: int64 [n].
            labels: of the segment's form, n of them.
            data: bytes that hold the contents.
            starts: begin of each content in ``data``, [n].
            lengths: bytes of each content, [n].
            codecs: number of each content's codec, uint8 [n].

        Raises:
            OSError: the file cannot be written.
        """
        size = head_bytes(self.form)
        heads = np.empty((len(ids), size // WORD), dtype=np.uint64)
        heads[:, 1], heads[:, 2] = ids.view(np.uint64), sizes(lengths, self.form, codecs)
        heads[:, HEAD_WORDS:] = self.form.to_words(labels)
        bounds = list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
        heads[:, 0] = checksums(heads, data.data, bounds, self.seed)
        flat = byte_rows(heads)
        buffers = [
            buffer
            for row, (start, stop) in enumerate(bounds)
            for buffer in (flat[row * size : (row + 1) * size], data.data[start:stop])
        ]
        written = _write_all(self.descriptor, buffers, self.end)
        begins = self.end + np.cumsum(lengths + size) - lengths - size
        found = Contents(ids, begins.astype(np.uint32), lengths.astype(np.uint32))
        self._held.append(found)
        self.end += written
        self.records += len(ids)
        return found

    def finish(self, dropped: Iterable[int] = ()) -> None:
        """Write the footer, with the records at ``dropped`` as damaged ones, and cut the file to its size.

        OSError when that fails.
        """
        names = ("ids", "starts", "lengths")
        parts = {name: np.concatenate([getattr(part, name) for part in self._held]) for name in names}
        finish(self.descriptor, self.seed, self.end, Contents(**parts), dropped)


def _write_all(descriptor: int, buffers: Sequence[memoryview], start: int) -> int:
    """Write ``buffers`` one after the other from where they are, without a copy; return their bytes."""
    at = start
    for first in range(0, len(buffers), _MOST_BUFFERS):
        part = buffers[first : first + _MOST_BUFFERS]
        size, done = sum(map(len, part)), os.pwritev(descriptor, part, at)
        if done < size:  # a signal, or the most bytes that a system takes at once
            _write(descriptor, b"".join(part)[done:], at + done)
        at += size
    return at - start


def _write(descriptor: int, data: bytes, start: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)
