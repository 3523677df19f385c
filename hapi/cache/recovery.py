"""Recovery of segments whose writer was killed, or whose footer is damaged, and the check of whole ones.

The records of a segment tell their own length. What was written before a kill is read from the beginning up to the
first record that fails its checksum, and sealed as if its writer had done so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from hapi.cache.segments import (
    FOOT_BYTES,
    HEAD_WORDS,
    TRAILER_BYTES,
    WORD,
    Contents,
    content_of,
    drop_records,
    finish,
    read_contents,
    seed_of,
)
from hapi.errors import DataError
from hapi.process.file_locks import lock_at_once

_HEAD_BYTES = HEAD_WORDS * WORD


def recover(descriptor: int, seed: int) -> int:
    """Seal what a file holds of a segment, from its beginning to the first record that is not whole.

    Args:
        descriptor: the file, which the caller has locked.
        seed: of the segment's checksums.

    Returns:
        The number of records; with none, the file is left as it is.
    """
    size = os.fstat(descriptor).st_size
    ids: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    end = 0
    while (record := _record_at(descriptor, end, size, seed)) is not None:
        stop = record.stop
        if stop + (len(ids) + 1) * FOOT_BYTES + TRAILER_BYTES > size:  # a file never grows by this
            break
        ids.append(record.id)
        starts.append(end)
        lengths.append(record.length)
        end = stop
    if ids:
        found = Contents(
            np.array(ids, dtype=np.int64),
            np.array(starts, dtype=np.uint32),
            np.array(lengths, dtype=np.uint32),
        )
        finish(descriptor, seed, end, found)
    return len(ids)


class _Record(NamedTuple):
    id: int
    length: int
    stop: int
    """Offset behind the record."""


def _record_at(descriptor: int, start: int, size: int, seed: int) -> _Record | None:
    """The record at ``start`` of a file of ``size`` bytes; None when it is not whole."""
    head = os.pread(descriptor, _HEAD_BYTES, start)
    if len(head) < _HEAD_BYTES:
        return None
    checksum, sample, coded = np.frombuffer(head, dtype=np.uint64).tolist()
    words, length = content_of(coded)
    stop = start + _HEAD_BYTES + words * WORD + length
    if stop > size or sample >> 63:
        return None
    others = os.pread(descriptor, stop - start - _HEAD_BYTES, start + _HEAD_BYTES)
    state = xxhash.xxh3_64(head[WORD:], seed)
    state.update(others)
    whole = len(others) == stop - start - _HEAD_BYTES and state.intdigest() == checksum
    return _Record(sample, length, stop) if whole else None


def mend(path: Path, seed: int) -> bool:
    """Seal a segment with a damaged footer anew, or remove it when none of its records is whole.

    Returns:
        True when it is in order now; False when it is gone, or another process is at it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not lock_at_once(descriptor):
            return False
        try:
            read_contents(descriptor, seed)  # another process may have mended it
        except DataError:
            if not recover(descriptor, seed):
                path.unlink(missing_ok=True)
                return False
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


class Checked(NamedTuple):
    """Records of a version, all of them read."""

    records: int
    damaged: int
    """Records that failed, which are dropped now, or the segments whose footer did."""


def verify_version(folder: Path, segments: list[Path]) -> Checked:
    """Read every record of a version's sealed segments, and drop the damaged ones.

    Args:
        folder: of the version.
        segments: its files.
    """
    seed, records, damaged = seed_of(folder.name), 0, 0
    for path in segments:
        found = _verify_segment(path, seed)
        records, damaged = records + found.records, damaged + found.damaged
    return Checked(records, damaged)


def _verify_segment(path: Path, seed: int) -> Checked:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # another process found it damaged just now
        return Checked(0, 0)
    try:
        try:
            contents, lost = read_contents(descriptor, seed), 0
        except DataError:
            if not mend(path, seed):
                return Checked(0, 1)
            contents, lost = read_contents(descriptor, seed), 1
        size = os.fstat(descriptor).st_size
        bad = [
            start
            for start, sample, length in zip(
                contents.starts.tolist(), contents.ids.tolist(), contents.lengths.tolist(), strict=True
            )
            if (record := _record_at(descriptor, start, size, seed)) is None
            or (record.id, record.length) != (sample, length)
        ]
        if bad and not drop_records(descriptor, seed, bad):
            path.unlink(missing_ok=True)
        return Checked(len(contents.ids) - len(bad), len(bad) + lost)
    finally:
        os.close(descriptor)
