"""Bounds of a cache folder in odd cases: the last bytes of a budget, full disks, others' files, many open keys."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cache_tools import COUNT as SAMPLES
from support.cache_tools import PHOTOS, cache_at, files, samples_of, size
from support.cache_tools import found as samples_in
from support.feature_tools import COUNT, KEY, OTHER, features_at, found, put

from hapi.cache import catalog as cache_catalogue
from hapi.cache import records as record_cache
from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.wire.references import DatasetReference


def whole(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("budget", range(6_000, 6_700, 50))
def test_files_beside_the_records_count(tmp_path: Path, budget: int) -> None:
    """Another key, and another computer's line, need room for their file, too."""
    made = ["cpu, batches of 16", "a quite different device whose name takes many bytes" * 3]
    with (
        features_at(tmp_path, budget, made_with=made[0]) as one,
        features_at(tmp_path, budget, key=OTHER) as two,
    ):
        for start in range(0, COUNT, 5):
            for cache in (one, two):
                put(cache, range(start, start + 5))
                assert whole(tmp_path) <= budget
        assert found(one)
        one.flush()
        two.flush()
        with features_at(tmp_path, budget, key=replace(KEY, prefix="d" * 32)) as third:
            put(third, range(COUNT))
            assert whole(tmp_path) <= budget
    with features_at(tmp_path, budget, made_with=made[1]) as again:
        put(again, range(COUNT))
        assert whole(tmp_path) <= budget


def test_a_key_whose_file_was_never_written_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was killed before that; what opens it goes on without keeping anything."""
    folder = CacheFolder.open(tmp_path, 1 << 20)
    folder.make()
    (tmp_path / f"features@{KEY.digest}").mkdir()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for text in (None, "{"):
        if text is not None:
            (tmp_path / f"features@{KEY.digest}").mkdir(exist_ok=True)
            (tmp_path / f"features@{KEY.digest}" / "key.json").write_text(text)
        with features_at(tmp_path) as cache:
            put(cache, range(10))
            assert found(cache) == set() and cache.trouble == "No space left on device"


def test_all_keys_of_a_process_share_its_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_cache, "SEGMENT_BYTES", 2_000)
    monkeypatch.setattr(cache_catalogue, "_MOST_OPEN", 4)
    monkeypatch.setattr(cache_catalogue, "_OPEN", type(cache_catalogue._OPEN)())
    before = len(list(Path("/dev/fd").iterdir()))
    references = [DatasetReference(name="photos", version=str(number) * 16) for number in range(3)]
    for _ in range(2):  # closed ones give theirs back
        caches = [cache_at(tmp_path, reference) for reference in references]
        for cache in caches:
            cache.put(samples_of(range(60)))
            cache.flush()
        for cache in caches:
            assert samples_in(cache, range(60)) == set(range(60))
        assert len(files(tmp_path)) > 6
        assert len(list(Path("/dev/fd").iterdir())) <= before + 4 + len(caches)
        for cache in caches:
            cache.close()
    assert len(list(Path("/dev/fd").iterdir())) <= before


def test_a_default_leaves_room_on_a_disk_that_others_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 20]
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: shutil._ntuple_diskusage(1 << 40, 0, free[0]),  # type: ignore[attr-defined]
    )
    monkeypatch.setattr(record_cache, "SEGMENT_BYTES", 4_000)
    with SampleCache(CacheFolder.open(tmp_path, None), PHOTOS, SAMPLES) as cache:
        cache.put(samples_of(range(40)))
        held = size(tmp_path)
        free[0] = held + 4_000  # what is there is half of what there is, nearly
        cache.put(samples_of(range(SAMPLES)))
        assert held <= size(tmp_path) <= held + 2_000 + 4_000
        assert cache.samples < SAMPLES
    with cache_at(tmp_path, budget=1 << 20) as named:
        named.put(samples_of(range(SAMPLES)))
        assert samples_in(named, range(SAMPLES)) == set(range(SAMPLES)), (
            "a bound that was named is that bound"
        )


def test_what_cannot_be_removed_is_left_and_counts(tmp_path: Path) -> None:
    with features_at(tmp_path, 6_000) as cache:
        put(cache, range(40))
    (version,) = tmp_path.glob("*@*")
    (version / "mine").mkdir()
    with features_at(tmp_path, 6_000, key=OTHER) as other:
        put(other, range(COUNT))
        assert 0 < len(found(other)) < COUNT and not other.trouble
        assert (version / "mine").is_dir() and whole(tmp_path) <= 6_000


def test_versions_that_others_remove_meanwhile_are_not_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        with cache_at(tmp_path, replace(PHOTOS, name=name)) as cache:
            cache.put(samples_of(range(3)))
    folder = CacheFolder.open(tmp_path, 1 << 20)
    listed = folder.versions()
    monkeypatch.setattr(folder, "versions", lambda: listed)
    shutil.rmtree(tmp_path / listed[0].name)
    assert folder.clear() == listed[1:]
    assert not list(tmp_path.glob("*@*"))
