"""Records on their way to a segment: written from where they are, however little a system takes at once.

And what is believed of a segment that is found: no more than its records say themselves.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from support.cache_tools import cache_at, found, samples_of
from support.feature_tools import KEY, SAMPLE_BYTES

from hapi.cache.catalog import Catalogue
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.cache.recovery import Checked, recover, verify_version
from hapi.cache.segments import (
    FOOT_BYTES,
    TRAILER_BYTES,
    Contents,
    SegmentWriter,
    finish,
    read_contents,
    seed_of,
)
from hapi.errors import DataError
from hapi.wire.labels import SINGLE


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_a_system_that_takes_a_part_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    write = os.pwritev

    def part(descriptor: int, buffers: Sequence[memoryview], start: int) -> int:
        """Write no more than ``most`` bytes."""
        return write(descriptor, [b"".join(buffers)[:most]], start)

    monkeypatch.setattr(os, "pwritev", part)
    with cache_at(tmp_path) as cache:
        cache.put(samples_of(range(40)))
    monkeypatch.undo()
    with cache_at(tmp_path) as cache:
        assert found(cache, range(60)) == set(range(40))


def test_more_records_than_a_system_takes_at_once(tmp_path: Path) -> None:
    count = 3000
    ids = np.arange(count)
    content = np.random.default_rng(0).integers(0, 256, (count, SAMPLE_BYTES), dtype=np.uint8)
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 24), KEY, count, SINGLE) as cache:
        cache.put(ids, content, ids)
        rows, labels = np.empty_like(content), np.empty(count, np.int64)
        assert cache.read(ids, rows, labels).all()
        assert (rows == content).all() and (labels == ids).all()


def test_a_put_takes_no_memory_for_the_content(tmp_path: Path) -> None:
    """Sixteen features of 1 MB, once the cache was used: heads and locations are all that is made."""
    count, nbytes = 32, 1 << 20
    key = replace(KEY, shape=(nbytes // 4,))
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 30), key, count, SINGLE, codec="none") as cache:
        for first in (0, 16):
            ids = np.arange(first, first + 16)
            content = np.zeros((16, nbytes), np.uint8)
            tracemalloc.start()
            cache.put(ids, content, ids)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert cache.held(ids).all() and peak < nbytes / 4


@pytest.mark.parametrize(
    ("sample", "start", "length", "is_possible"),
    [
        (5, 10, 90, True),
        (5, 10, 91, False),
        (5, 101, 0, False),
        (5, 2**32 - 1, 2, False),
        (-1, 10, 90, False),
    ],
)
def test_a_footer_that_names_records_that_cannot_be_is_damaged(
    sample: int, start: int, length: int, is_possible: bool, tmp_path: Path
) -> None:
    """Whatever its checksum says: what a reader takes from it are places in the file."""
    contents = Contents(
        np.array([3, sample]), np.array([0, start], dtype=np.uint32), np.array([9, length], dtype=np.uint32)
    )
    with (tmp_path / "segment").open("w+b") as file:
        finish(file.fileno(), 7, 100, contents)
        if is_possible:
            assert read_contents(file.fileno(), 7).ids.tolist() == [3, sample]
            return
        with pytest.raises(DataError, match="records that cannot be"):
            read_contents(file.fileno(), 7)


def written(file: IO[bytes], seed: int) -> tuple[SegmentWriter, Contents]:
    """A segment with three records, without its footer, and what the footer is to say."""
    writer = SegmentWriter(file.fileno(), 1 << 20, seed)
    content, lengths = np.arange(30, dtype=np.uint8), np.full(3, 10)
    codecs = np.zeros(3, np.uint8)
    starts = np.array([0, 10, 20])
    return writer, writer.append(np.arange(3), np.zeros(3, np.int64), content, starts, lengths, codecs)


def test_a_record_of_another_sample_than_the_footer_names_is_dropped(tmp_path: Path) -> None:
    """A reader would take its content for that of the other one."""
    path, seed = tmp_path / "segment-1", seed_of(tmp_path.name)
    with path.open("w+b") as file:
        writer, contents = written(file, seed)
        finish(file.fileno(), seed, writer.end, replace(contents, ids=np.array([0, 5, 2])))
        assert verify_version(tmp_path, [path]) == Checked(2, 1)
        assert read_contents(file.fileno(), seed).ids.tolist() == [0, 2]


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_recovered_segment_has_not_grown(lacking: int, tmp_path: Path) -> None:
    """Records for whose places in the footer a byte is missing are left out."""
    with (tmp_path / "segment").open("w+b") as file:
        writer, _ = written(file, 7)
        size = writer.end + 3 * FOOT_BYTES + TRAILER_BYTES - lacking
        os.ftruncate(file.fileno(), size)
        assert recover(file.fileno(), 7) == 3 - lacking
        assert os.fstat(file.fileno()).st_size <= size
        assert read_contents(file.fileno(), 7).ids.tolist() == list(range(3 - lacking))


def test_a_record_that_took_a_damaged_ones_place_stays(tmp_path: Path) -> None:
    catalog, ids = Catalogue(tmp_path, 7, 10), np.array([4])

    def added(name: str) -> int:
        number = catalog.begin(tmp_path / name, os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
        assert catalog.add(number, Contents(ids, np.zeros(1, np.uint32), np.ones(1, np.uint32)))
        return number

    first = added("open-1")
    damaged = catalog.find(ids)
    catalog.forget(first)
    added("open-2")
    catalog.drop(ids, damaged)
    assert catalog.held(ids).all()
    catalog.drop(ids, catalog.find(ids))
    assert not catalog.held(ids).any()
    catalog.close()
