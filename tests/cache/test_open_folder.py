"""Opening the cache's folder: the named one or the user's own, its default budget, and that nothing is made early."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.cache_tools import BUDGET, cache_at, found, samples_of

from hapi.cache.folder import CacheFolder
from hapi.cache.open_folder import default_path, open_cache_folder
from hapi.cache.writing.bounds import MAX_DEFAULT_BYTES
from hapi.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_folder_is_made_when_something_is_kept(home: Path) -> None:
    folder = open_cache_folder(None, BUDGET)
    assert folder is not None and folder.path == home / "hapi" / "cache" and not folder.versions()
    with cache_at(folder.path) as cache:
        assert found(cache, range(10)) == set() and cache.share(np.arange(10)) == 0
        cache.flush()
        assert not home.exists()
        cache.put(samples_of([1]))
        assert home.exists() and found(cache, range(10)) == {1}


def test_a_version_without_samples_leaves_nothing(tmp_path: Path) -> None:
    with cache_at(tmp_path / "cache", budget=50) as cache:  # room for no segment
        cache.put(samples_of(range(10)))
    assert not (tmp_path / "cache").exists()
    with cache_at(tmp_path / "cache") as first, cache_at(tmp_path / "cache") as second:
        first.put(samples_of([1]))
        first.flush()
        assert found(second, [1]) == {1}
        for path in first.path.glob("segment-*"):
            path.unlink()
        first.close()
        assert first.path.exists()  # in use by the second
    assert not first.path.exists()


def test_an_unusable_folder_of_the_user_is_one_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file in its place")
    assert open_cache_folder(None, BUDGET) is None
    assert len(caplog.messages) == 1 and "Not a directory" in caplog.text and "--cache-dir" in caplog.text
    with pytest.raises(UsageError, match=r"^--cache-dir .*: cannot be used: Not a directory"):
        open_cache_folder(str(home), BUDGET)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert default_path() is None and open_cache_folder(None, BUDGET) is None
    assert len(caplog.messages) == 2 and "there is no home folder" in caplog.messages[1]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("marker", ["hapi-cache", "hapi-sample-cache"])
def test_a_folder_of_another_version(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).write_text("1\n")
    with pytest.raises(UsageError, match="is of another version of Hapi; remove it or give another folder"):
        CacheFolder.open(tmp_path, BUDGET)


def test_a_dead_link(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UsageError, match="cannot be used: No such file"):
        CacheFolder.open(tmp_path / "cache", BUDGET)


def test_the_default_budget_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))  # type: ignore[attr-defined]
    assert CacheFolder.open(tmp_path / "cache", None).budget == free // 2
    with cache_at(tmp_path / "cache") as cache:
        cache.put(samples_of(range(400)))
        cache.flush()
        held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*@*/*"))
        free -= held  # what is kept does not become the reason to keep more
        assert CacheFolder.open(tmp_path / "cache", None).budget == (1 << 30) // 2
    free = 1 << 50
    assert CacheFolder.open(tmp_path / "cache", None).budget == MAX_DEFAULT_BYTES
