"""The sample cache: what was put comes back whole or not at all, whoever else is there and whatever breaks."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cache_tools import (
    BUDGET,
    COUNT,
    OTHER,
    PHOTOS,
    cache_at,
    content,
    files,
    found,
    samples_of,
    size,
)
from support.waiting import until

from hapi.cache import catalog as cache_catalogue
from hapi.cache import folder as cache_folder
from hapi.cache import records as record_cache
from hapi.cache import samples as sample_cache
from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.errors import BadRequestError, UsageError
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SampleCache]:
    with cache_at(tmp_path / "cache") as opened:
        yield opened


def test_what_was_put_comes_back(cache: SampleCache) -> None:
    cache.put(samples_of(range(100)))
    assert found(cache, [5, 300, 99, 0]) == {5, 99, 0}
    cache.put(samples_of([110, 99, 149]))
    assert found(cache, range(COUNT)) == {*range(100), 110, 149}
    assert cache.samples == 102 and cache.share(np.arange(204)) == 0.5 and cache.share(np.arange(0)) == 0.0


def test_others_see_it_when_it_is_flushed_and_later_jobs_too(cache: SampleCache, tmp_path: Path) -> None:
    with cache_at(tmp_path / "cache") as second:
        cache.put(samples_of(range(30)))
        assert found(second, range(COUNT)) == set()
        cache.flush()
        assert found(second, range(COUNT)) == set(range(30))
        second.put(samples_of(range(40)))
    assert found(cache, range(COUNT)) == set(range(40))
    cache.close()
    with cache_at(tmp_path / "cache") as third:
        assert found(third, range(COUNT)) == set(range(40))
    assert len(files(tmp_path / "cache")) == 2 and not files(tmp_path / "cache", "open-")


def test_a_sample_is_kept_once(cache: SampleCache, tmp_path: Path) -> None:
    cache.put(samples_of([3, 3, 4, 3]))
    cache.flush()
    before = size(tmp_path / "cache")
    cache.put(samples_of([4, 3]))
    cache.flush()
    assert size(tmp_path / "cache") == before and cache.samples == 2


def test_parts_are_bounded(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(samples_of(range(200)))
    monkeypatch.setattr(sample_cache, "_PART_BYTES", 500)
    parts = list(cache.parts(np.arange(200)))
    assert len(parts) > 20
    assert all(len(s.data) <= 500 for _, s in parts)
    monkeypatch.setattr(sample_cache, "_PART_BYTES", 1)
    assert found(cache, range(200)) == set(range(200))


def test_versions_and_data_sets_are_kept_apart(cache: SampleCache, tmp_path: Path) -> None:
    cache.put(samples_of(range(10)))
    cache.flush()
    with cache_at(tmp_path / "cache", OTHER) as other:
        assert found(other, range(COUNT)) == set()
        # Not even when its files come into the wrong folder.
        (stray,) = files(tmp_path / "cache")
        other.path.mkdir()
        (other.path / stray.name).write_bytes(stray.read_bytes())
        assert found(other, range(COUNT)) == set()
        assert files(tmp_path / "cache") == [stray]


# -- budget ------------------------------------------------------------------------------------------------------


def test_the_budget_is_kept_and_used(tmp_path: Path) -> None:
    budget = 20_000
    with (
        cache_at(tmp_path / "cache", budget=budget) as first,
        cache_at(tmp_path / "cache", budget=budget) as second,
    ):
        for start in range(0, COUNT, 10):
            (first, second)[start // 10 % 2].put(samples_of(range(start, start + 10)))
            assert size(tmp_path / "cache") <= budget
        first.flush()
        second.flush()
        here = found(first, range(COUNT))
        assert here == found(second, range(COUNT))
        content_bytes = sum(len(content(i)) + 49 for i in here)
        assert 0.8 * budget < content_bytes < budget
        # Nothing that is there goes for anything that comes.
        first.put(samples_of(range(COUNT)))
        assert found(first, here) == here


def test_room_is_made_of_what_nobody_uses_the_oldest_first(tmp_path: Path) -> None:
    path, budget = tmp_path / "cache", 20_000
    references = [DatasetReference(name="old", version=str(n) * 16) for n in range(3)]
    for age, reference in zip((30, 10, 20), references, strict=True):
        with cache_at(path, reference, budget) as cache:
            cache.put(samples_of(range(25)))
        then = time.time() - age
        os.utime(cache.path / "users", (then, then))
    with cache_at(path, references[0], budget) as used, cache_at(path, budget=budget) as new:
        at = 0
        while (path / f"old@{'2' * 16}").exists():
            new.put(samples_of(range(at, at + 5)))
            at += 5
        assert (path / f"old@{'1' * 16}").exists()
        new.put(samples_of(range(at, COUNT)))
        assert not (path / f"old@{'1' * 16}").exists()
        assert found(used, range(COUNT)) == set(range(25))
        assert size(path) <= budget
    assert {v.name for v in CacheFolder.open(path, budget).versions()} == {
        f"old@{'0' * 16}",
        f"photos@{PHOTOS.version}",
    }


def test_samples_larger_than_a_segment_and_than_the_budget(tmp_path: Path) -> None:
    large = Samples(
        ids=np.array([1, 2, 3]),
        data=np.arange(121_000, dtype=np.uint64).view(np.uint8)[:121_000],
        offsets=np.array([0, 20_000, 120_000, 121_000]),
        labels=np.array([0, 1, 2]),
    )
    with cache_at(tmp_path / "cache", budget=64_000) as cache:  # segments of 4,000
        cache.put(large)
        ((rows, samples),) = cache.parts(np.array([3, 2, 1]))
        assert rows.tolist() == [0, 2] and samples.labels.tolist() == [2, 0]
        assert samples.sample(1).tobytes() == large.sample(0).tobytes()


@pytest.mark.parametrize("budget", [1, 50, 700])
def test_hardly_any_budget(tmp_path: Path, budget: int) -> None:
    with cache_at(tmp_path / "cache", budget=budget) as cache:
        for sample in range(60):
            cache.put(samples_of([sample]))
        assert size(tmp_path / "cache") <= budget
        assert found(cache, range(COUNT)) <= set(range(60))


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["data", "head", "footer", "trailer", "short", "empty", "zeros"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_damage_is_a_miss_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str, when: str
) -> None:
    path = tmp_path / "cache"
    with cache_at(path, budget=1 << 14) as cache:  # segments of 1,024
        cache.put(samples_of(range(40)))
    victim = max(files(path), key=lambda file: file.stat().st_size)
    opened = cache_at(path)
    before = opened.samples
    if when == "before":
        opened.close()
    data = bytearray(victim.read_bytes())
    places = {"data": 30, "head": 17, "footer": -60, "trailer": -1}
    if at in places:
        data[places[at]] ^= 1
    elif at == "zeros":
        data = bytearray(len(data))
    else:
        del data[len(data) // 2 if at == "short" else 0 :]
    victim.write_bytes(data)
    if when == "before":
        opened = cache_at(path)
    with opened as cache, caplog.at_level(logging.WARNING, "hapi.cache"):
        left = found(cache, range(40))
        if when == "before" or at not in ("footer", "trailer"):
            assert len(caplog.records) == 1 and "damaged" in caplog.text
        whole = {"data": 39, "head": 39, "footer": 40, "trailer": 40}
        if at in whole:  # one record at most
            assert len(left) == whole[at] and victim.exists()
        else:
            assert left < set(range(40)) and (at == "short" or not victim.exists())
        cache.put(samples_of(range(40)))
        assert found(cache, range(40)) == set(range(40)) and cache.samples == before
    caplog.clear()
    with cache_at(path) as again:  # which reads the footers anew
        assert found(again, range(40)) == set(range(40))
        assert bool(caplog.records) == (when == "after" and at in ("footer", "trailer"))


def test_damage_in_its_own_open_segment(cache: SampleCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.put(samples_of(range(20)))
    (own,) = cache.path.glob("open-*")
    with own.open("r+b") as file:
        file.write(b"x" * 200)
    left = found(cache, range(20))
    assert 10 < len(left) < 20 and left == set(range(20 - len(left), 20))
    cache.put(samples_of(range(20)))
    cache.flush()
    assert found(cache, range(20)) == set(range(20)) and len(list(cache.path.glob("*-*"))) == 1
    with cache_at(cache.folder.path) as later:
        assert found(later, range(20)) == set(range(20))
    assert len(caplog.records) == 1


def test_the_folder_goes_away(cache: SampleCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.put(samples_of(range(20)))
    cache.flush()
    for path in sorted(cache.folder.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert found(cache, range(30)) <= set(range(20))
    cache.put(samples_of(range(20, 30)))
    cache.flush()
    cache.put(samples_of(range(20, 30)))
    assert len(caplog.records) == 1 and "nothing more is kept" in caplog.text


def test_a_full_disk_ends_keeping_and_nothing_else(
    cache: SampleCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(samples_of(range(20)))
    room, write = [300], os.pwrite

    def pwrite(descriptor: int, data: bytes, start: int) -> int:
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        room[0] -= 100
        return write(descriptor, bytes(data)[:100], start)

    def pwritev(descriptor: int, buffers: list[memoryview], start: int) -> int:
        return pwrite(descriptor, b"".join(buffers), start)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "pwritev", pwritev)
    cache.put(samples_of(range(20, 40)))
    room[0] = 1 << 20
    cache.put(samples_of(range(40, 60)))
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    # What had been written before is sealed, since there was room for that.
    assert found(cache, range(60)) == set()
    monkeypatch.undo()
    cache.close()
    assert not list(cache.path.glob("open-*"))


def test_segments_that_were_written_do_not_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache of any size needs no more files than its bound, whoever wrote it; the one that grows comes on top."""
    monkeypatch.setattr(record_cache, "SEGMENT_BYTES", 2_000)
    monkeypatch.setattr(cache_catalogue, "_MOST_OPEN", 3)
    with cache_at(tmp_path / "cache") as cache:
        cache.put(samples_of([0]))
        cache.flush()
        before = len(list(Path("/dev/fd").iterdir())) - 1
        for first in range(0, COUNT, 10):
            cache.put(samples_of(range(first, first + 10)))
            assert found(cache, range(first + 10)) == set(range(first + 10))
            assert len(list(Path("/dev/fd").iterdir())) <= before + 3 + 1
        cache.flush()
        assert len(files(tmp_path / "cache")) > 20 and not caplog.records
        assert len(list(Path("/dev/fd").iterdir())) <= before + 3
        assert found(cache, range(COUNT)) == set(range(COUNT))
    assert len(list(Path("/dev/fd").iterdir())) < before


def test_a_segment_is_read_while_it_is_written_and_sealed(
    cache: SampleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's file is his own: it stays open when the writer's is closed in the middle of his read."""
    monkeypatch.setattr(cache_catalogue, "_MOST_OPEN", 0)
    cache.put(samples_of(range(20)))
    read = os.preadv

    def preadv(*arguments: Any) -> int:
        cache.flush()
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert found(cache, range(20)) == set(range(20))


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_segments_that_cannot_be_opened_while_too_many_files_are_open_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with cache_at(tmp_path) as cache:
        cache.put(samples_of(range(20)))
    opened = os.open

    def short(path: Any, *more: Any, **named: Any) -> int:
        if "segment-" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *more, **named)

    if when == "opening":
        monkeypatch.setattr(os, "open", short)
    monkeypatch.setattr(cache_catalogue, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(cache_catalogue, "_FRESH_SECONDS", 0.0)
    with cache_at(tmp_path) as cache:
        monkeypatch.setattr(os, "open", short)
        for _ in range(3):
            assert found(cache, range(20)) == set()
        monkeypatch.setattr(os, "open", opened)
        until(lambda: found(cache, range(20)) == set(range(20)), 20, "its samples")


# -- wrong folders -----------------------------------------------------------------------------------------------


def test_a_wrong_folder_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"--cache-dir .*full: has other files in it; give a new or empty"):
        CacheFolder.open(tmp_path / "full", BUDGET, "--cache-dir")
    with pytest.raises(UsageError, match=r"cannot be used: (Not a directory|File exists)"):
        CacheFolder.open(tmp_path / "full" / "thesis.tex", BUDGET)
    with pytest.raises(UsageError, match="cannot be used"):
        CacheFolder.open("/proc/cache", BUDGET)
    with pytest.raises(UsageError, match="cannot be used"):
        CacheFolder.open("a\0b", BUDGET)
    CacheFolder.open(tmp_path / "new" / "cache", BUDGET).make()
    (tmp_path / "new" / "cache" / cache_folder.MARKER).write_text("9\n")
    with pytest.raises(UsageError, match="is of another version of Hapi"):
        CacheFolder.open(tmp_path / "new" / "cache", BUDGET)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told_in_one_line(tmp_path: Path) -> None:
    CacheFolder.open(tmp_path / "cache", BUDGET).make()
    (tmp_path / "cache" / "lock").chmod(0o400)
    (tmp_path / "cache").chmod(0o500)
    with pytest.raises(UsageError, match="cannot be used: Permission denied"):
        CacheFolder.open(tmp_path / "cache", BUDGET)


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = CacheFolder.open(tmp_path / "cache", BUDGET)
    for name, version in (("../x", "0" * 16), ("x", "../../etc"), ("x", "")):
        with pytest.raises(BadRequestError):
            SampleCache(folder, DatasetReference(name=name, version=version), COUNT)


def test_a_lock_that_is_not_given_back_keeps_nobody(
    cache: SampleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "LOCK_SECONDS", 0.05)
    cache.put(samples_of(range(5)))
    cache.flush()
    with cache.folder.locked():
        cache.put(samples_of(range(10)))
        assert found(cache, range(10)) == set(range(5))
    cache.put(samples_of(range(10)))
    assert found(cache, range(10)) == set(range(10))
    with cache.folder.locked():
        cache.flush()  # cannot be sealed, so it goes
    assert found(cache, range(10)) == set(range(5))


# -- several at a time -------------------------------------------------------------------------------------------
