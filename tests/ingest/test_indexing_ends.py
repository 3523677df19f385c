"""Indexing that is killed at any step: the old dataset is there, or the new one, and nothing is scanned twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.formats_tools import image, memory_store, samples, tar
from support.indexing_tools import everything, index, three_shards
from support.stores import DyingStore, Killed, flip

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.verify import verify_dataset
from hapi.errors import ConflictError, DataError
from hapi.ingest.formats.shard import Fields
from hapi.ingest.in_place import scan as index_runs
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.ingest.transaction import PackFolder
from hapi.store.base import ObjectStore
from hapi.wire.references import TransformSpec


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True])
def test_death_at_every_single_change(replacing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death at any step the old dataset is there, or the new one, or none; going on does not scan again."""
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    store = memory_store()
    three_shards(store)
    before = everything(store)
    wanted = index(store, name="other").manifest.version
    deaths = 0
    while True:
        for info in store.list("datasets/d"):
            store.delete(info.key)
        if replacing:
            pack(open_source("sklearn:digits"), store, "d")
        old = describe(store, "d")
        try:
            index(DyingStore(store, deaths), replace=replacing)  # type: ignore[arg-type]
            break
        except Killed:
            deaths += 1
        summary = describe(store, "d")
        if summary is not None and summary.state == "whole":
            assert summary.version in (wanted, old and old.version) and verify_dataset(store, "d").sound
        done: list[int] = []
        parts = len([i for i in store.list("datasets/d") if i.key.endswith(".part.safetensors")])
        resumed = index(store, replace=replacing, on_start=lambda count, size, into=done: into.append(count))
        assert resumed.manifest.version == wanted and done in ([10 * parts], [])
        assert len(store.list("datasets/d")) == (6 if replacing else 3) and everything(store) == before
    assert deaths > 5


@pytest.mark.slow
def test_a_damaged_part_of_an_unfinished_indexing_is_scanned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    store = memory_store()
    three_shards(store)
    wanted = index(store, name="other").manifest.version
    rng = np.random.default_rng(0)
    for _ in range(40):
        with pytest.raises(Killed):
            index(DyingStore(store, 3), replace=True, workers=1)  # type: ignore[arg-type]
        parts = [info.key for info in store.list("datasets/d") if info.key.endswith(".part.safetensors")]
        assert len(parts) == 2
        flip(store, parts[0], int(rng.integers(len(store.get(parts[0])))))
        assert index(store, replace=True).manifest.version == wanted


def test_what_was_kept_of_shards_that_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    store = memory_store()
    three_shards(store)
    whole = store.get("wds/part/002.tar")
    store.put("wds/part/002.tar", whole[:-12_000])
    with pytest.raises(DataError, match=r"shard part/002.tar is cut off"):
        index(store, workers=1)
    summary = describe(store, "d")
    assert summary is not None and summary.state == "incomplete"
    with pytest.raises(ConflictError, match="half packed from another source, from one that has changed"):
        index(store, fields=Fields(label="json"))
    skipping = index(store, "wds", "skipping", skip_bad=True)
    assert skipping.skipped.count == 1
    store.put("wds/part/002.tar", whole)
    done: list[tuple[int, int]] = []
    manifest = index(store, on_start=lambda *numbers: done.append(numbers)).manifest
    assert done == [(20, sum(info.size for info in store.list("wds")[:2]))] and manifest.count == 30


def test_what_was_kept_of_a_shard_that_was_rewritten_in_its_size_is_not_used(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding of tar makes most shards of like samples as long as each other."""
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    three_shards(store)
    if (local := store.local_path("wds/part/000.tar")) is not None:
        os.utime(local, (1, 1))  # clocks of file systems tick every few milliseconds
    whole = store.get("wds/part/002.tar")
    store.put("wds/part/002.tar", whole[:-12_000])
    with pytest.raises(DataError, match=r"shard part/002.tar is cut off"):
        index(store, workers=1)
    store.put("wds/part/002.tar", whole)
    before, after = store.get("wds/part/000.tar"), tar(samples(range(40, 50)))
    assert len(before) == len(after) and before != after
    store.put("wds/part/000.tar", after)
    done: list[int] = []
    index(store, on_start=lambda count, size: done.append(count))
    found = find_dataset(store, "d").read([3, 13])
    assert done == [10] and [found.sample(k).tobytes() for k in range(2)] == [image(43), image(13)]


CHANGES: dict[str, dict[str, Any]] = {
    "pattern": {"folder": "wds/part/00[01]*"},
    "labels": {"labels": "other.txt"},
    "classes": {"classes": ("a", "b", "c")},
    "transform": {"transform": TransformSpec.for_image_size(8)},
    "shards": {},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_other_options_after_a_death_at_every_single_change(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes is what was asked for last, also when the first had all but cleaned up."""
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    (tmp_path / "one.txt").write_text("0\n" * 30)
    (tmp_path / "other.txt").write_text("1\n" * 30)
    options: dict[str, Any] = {"folder": "wds/part/*"}
    if changed == "labels":
        options["labels"] = tmp_path / "one.txt"
    others = {**options, **CHANGES[changed]}
    if changed == "labels":
        others["labels"] = tmp_path / "other.txt"
    store = memory_store()
    three_shards(store)
    first, second = store.get("wds/part/000.tar"), tar(samples(range(40, 50)))
    last = second if changed == "shards" else first
    store.put("wds/part/000.tar", last)
    wanted = index(store, name="other", **others).manifest.version
    deaths = 0
    while True:
        store.put("wds/part/000.tar", first)
        for info in store.list("datasets/d"):
            store.delete(info.key)
        try:
            index(DyingStore(store, deaths), **options)  # type: ignore[arg-type]
            break
        except Killed:
            deaths += 1
        store.put("wds/part/000.tar", last)
        assert index(store, replace=True, keep_old=0, **others).manifest.version == wanted
        assert len(store.list("datasets/d")) == 3 and verify_dataset(store, "d").sound
    assert deaths > 5


def test_a_finished_one_is_not_taken_for_another_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which only the clean-up was interrupted: what it is made from does not bind who replaces it."""
    store = memory_store()
    three_shards(store)
    with monkeypatch.context() as patched:
        patched.setattr(PackFolder, "clean", lambda *_: None)
        version = index(store).manifest.version
    assert store.exists("datasets/d/packing.json") and index(store).manifest.version == version
    with monkeypatch.context() as patched:
        patched.setattr(PackFolder, "clean", lambda *_: None)
        index(store, replace=True)
    with pytest.raises(ConflictError, match=r"there is a dataset .* or pass --replace"):
        index(store, classes=("a", "b", "c"))
    assert index(store, replace=True, decode=True, classes=("a", "b", "c")).manifest.classes == (
        "a",
        "b",
        "c",
    )
