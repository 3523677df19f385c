"""Tests of noticing that foreign files changed since they were indexed, though nothing in their listing says so."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from support.foreign_shards import mds_index, mds_shard
from support.formats_tools import memory_store, tar
from support.indexing_tools import index

from hapi.data import shard_marks
from hapi.data.dataset import find_dataset
from hapi.data.manifest import Manifest, dataset_prefix
from hapi.data.shard_marks import changed_shards
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

FILES = 6


def picture(color: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(buffer, "BMP")
    return buffer.getvalue()


def fill(store: ObjectStore, kind: str) -> None:
    """Three or more shards of this kind, below ``data``; all pictures have the same size."""
    if kind == "objects":
        for number in range(FILES):
            store.put(f"data/c{number % 2}/{number}.bmp", picture(number))
    elif kind == "tar":
        for shard in range(3):
            numbers = range(4 * shard, 4 * shard + 4)
            members = [m for n in numbers for m in ((f"{n}.bmp", picture(n)), (f"{n}.cls", b"1"))]
            store.put(f"data/{shard}.tar", tar(members))
    else:
        columns = {"label": "int", "picture": "jpeg"}
        shards = {
            f"shard.{n:05d}.mds": mds_shard(columns, [{"label": n, "picture": picture(n)}]) for n in range(3)
        }
        for name, data in {**shards, "index.json": mds_index(columns, shards)}.items():
            store.put(f"data/{name}", data)


def changed(store: ObjectStore) -> int:
    dataset = find_dataset(store, "d")
    return changed_shards(store, dataset.manifest, dataset.shards)


def edit(store: ObjectStore, key: str) -> None:
    """Change a byte of the first picture in a file, and put the file's times back."""
    data = bytearray(store.get(key))
    place = data.find(b"BM") + 60 if b"BM" in data else 1700
    data[place] ^= 1
    path = store.local_path(key)
    if path is None:
        store.put(key, bytes(data))
        return
    before = Path(path).stat()
    with Path(path).open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = Path(path).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def version(store: ObjectStore, **options: bool) -> Manifest:
    return index(store, "data", "d", **options).manifest


@pytest.mark.parametrize("where", ["folder", "objects"])
@pytest.mark.parametrize("kind", ["objects", "tar", "mds"])
def test_an_edit_that_hides(tmp_path: Path, kind: str, where: str) -> None:
    store = open_store(str(tmp_path)) if where == "folder" else memory_store()
    fill(store, kind)
    first = version(store)
    assert changed(store) == 0
    key = next(i.key for i in store.list("data") if not i.key.endswith("json"))
    edit(store, key)
    assert changed(store) == 1, "without another indexing it is noticed"
    again = version(store, replace=True)
    assert again.version != first.version, "and another indexing gives another version"
    assert changed(store) == 0


def test_a_copied_store_is_read_and_found_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "one"))
    fill(store, "objects")
    version(store)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    copied = open_store(str(tmp_path / "two"))
    assert changed(copied) == 0
    monkeypatch.setattr(shard_marks, "VERIFY_BYTES", 10)
    assert changed(copied) == FILES and changed(store) == 0


def test_files_that_went_away_or_came(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    fill(store, "objects")
    version(store)
    store.put("data/c1/99.bmp", picture(99))
    assert changed(store) == 0, "what is not in the dataset does not matter"
    store.delete("data/c0/2.bmp")
    store.put("data/c1/1.bmp", picture(1) + b"longer")
    assert changed(store) == 2


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_without_marks_files_are_read(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an older Hapi."""
    store = open_store(str(tmp_path))
    fill(store, "objects")
    manifest = version(store)
    marks = f"{dataset_prefix('d')}/{manifest.pack}/marks.safetensors"
    data = store.get(marks)
    store.delete(marks)
    if damage == "cut":
        store.put(marks, data[:20])
    assert changed(store) == 0
    edit(store, "data/c0/0.bmp")
    assert changed(store) == 1
