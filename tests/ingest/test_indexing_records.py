"""MDS and TFRecord folders become datasets where they are: from the shards to the samples read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.foreign_shards import example, mds_index, mds_shard, tfrecord
from support.formats_tools import image, memory_store

from hapi.data.dataset import find_dataset
from hapi.data.manifest import InPlace
from hapi.data.verify import verify_dataset
from hapi.errors import DataError, UsageError
from hapi.ingest.formats.shard import Fields
from hapi.ingest.in_place.discover import find_folder
from hapi.ingest.in_place.indexer import Indexed, IndexOptions, index_folder
from hapi.store.base import ObjectStore
from hapi.wire.references import TransformSpec

COLUMNS = {"image": "png", "label": "int", "note": "str"}
HASHES = ("sha1", "xxh64")


def write_mds(store: ObjectStore, folder: str = "set", count: int = 30, shards: int = 3) -> None:
    """``count`` images in some shards, with their index."""
    samples = [{"image": image(n), "label": n % 3, "note": "x" * n} for n in range(count)]
    parts = {
        f"shard.{k:05d}.mds": mds_shard(COLUMNS, samples[k * count // shards : (k + 1) * count // shards])
        for k in range(shards)
    }
    for name, data in {**parts, "index.json": mds_index(COLUMNS, parts, HASHES)}.items():
        store.put(f"{folder}/{name}", data)


def write_tfrecord(store: ObjectStore, count: int = 30, shards: int = 3, first_label: int = 0) -> None:
    records = [
        example({"image/class/label": n % 3 + first_label, "image/encoded": image(n)}) for n in range(count)
    ]
    for k in range(shards):
        part = records[k * count // shards : (k + 1) * count // shards]
        store.put(f"set/train-{k:05d}-of-{shards:05d}", tfrecord(part))
    store.put("set/dataset_info.json", b"{}")


WRITERS = {"mds": write_mds, "tfrecord": write_tfrecord}


@pytest.fixture(params=list(WRITERS))
def kind(request: pytest.FixtureRequest) -> str:
    """A format; TFRecord where the library of its checksums is installed."""
    if request.param == "tfrecord":
        pytest.importorskip("google_crc32c")
    return str(request.param)


@pytest.fixture
def store() -> ObjectStore:
    return memory_store()


def index(store: ObjectStore, folder: str = "set", name: str = "d", **options: Any) -> Indexed:
    replace = options.pop("replace", False)
    transform = TransformSpec.for_image_size(8)
    chosen = IndexOptions(workers=2, transform=transform, **options)
    return index_folder(store, name, find_folder(store, folder), chosen, replace=replace)


def swap(store: ObjectStore, key: str, old: bytes, new: bytes) -> None:
    """The object with some bytes replaced by as many others."""
    data = store.get(key)
    assert len(old) == len(new) and data.count(old) == 1
    store.put(key, data.replace(old, new))


def test_every_sample_is_read_where_it_is(kind: str, store: ObjectStore) -> None:
    WRITERS[kind](store)
    before = {info.key: store.get(info.key) for info in store.list("set")}
    manifest = index(store).manifest
    assert manifest.in_place == InPlace(format=kind, folder="set")
    assert (manifest.count, manifest.classes, manifest.shards) == (30, ("0", "1", "2"), 3)
    ids = np.array([29, 0, 10, 9, 15])
    found = find_dataset(store, "d").read(ids)
    assert [found.sample(k).tobytes() for k in range(5)] == [image(n) for n in ids.tolist()]
    assert found.labels.tolist() == (ids % 3).tolist()
    assert verify_dataset(store, "d").sound
    assert {info.key: store.get(info.key) for info in store.list("set")} == before


def test_same_images_in_both_formats_are_the_same_samples(store: ObjectStore) -> None:
    pytest.importorskip("google_crc32c")
    write_mds(store, "mds")
    write_tfrecord(store)
    index(store, "mds", "a")
    index(store, "set", "b")
    one, other = (find_dataset(store, name).read(range(30)) for name in ("a", "b"))
    assert one.data.tobytes() == other.data.tobytes() and one.labels.tolist() == other.labels.tolist()


def test_a_damaged_image_names_shard_and_sample(kind: str, store: ObjectStore) -> None:
    """Found as the shard is scanned where the format has a checksum of the record, else by the shard's digest."""
    WRITERS[kind](store)
    key = next(info.key for info in store.list("set") if "00001" in info.key)
    damaged = image(13)[:-20] + b"\0" * 20
    swap(store, key, image(13), damaged)
    with pytest.raises(DataError) as caught:
        index(store)
    told = "sample 3: it fails its checksum" if kind == "tfrecord" else "its sha1 is"
    assert key.removeprefix("set/") in str(caught.value) and told in str(caught.value)
    assert not store.exists("datasets/d/manifest.json")


def test_bad_samples_are_skipped_and_counted_as_the_user_says(kind: str, store: ObjectStore) -> None:
    if kind == "mds":
        samples = [{"image": image(n) if n != 2 else b"", "label": n, "note": ""} for n in range(5)]
        parts = {"a.mds": mds_shard(COLUMNS, samples)}
        store.put("set/index.json", mds_index(COLUMNS, parts))
        store.put("set/a.mds", parts["a.mds"])
    else:
        records = [example({"image": image(n) if n != 2 else b"", "label": n}) for n in range(5)]
        store.put("set/a.tfrecord", tfrecord(records))
    with pytest.raises(DataError, match=r"shard a\.\w+, sample 2: it has no bytes"):
        index(store)
    indexed = index(store, skip_bad=True)
    assert indexed.manifest.count == 4 and indexed.skipped.count == 1
    assert find_dataset(store, "d").labels(np.arange(4)).tolist() == [0, 1, 3, 4]


def test_of_a_shard_that_is_not_what_the_index_says_nothing_is_used(store: ObjectStore) -> None:
    """Which of its bytes are wrong nobody knows: all images begin as they should."""
    write_mds(store)
    swap(store, "set/shard.00001.mds", image(13), image(13)[:-20] + b"\0" * 20)
    indexed = index(store, skip_bad=True)
    assert indexed.manifest.count == 20 and indexed.manifest.shards == 2
    (line,) = indexed.skipped.lines
    assert line.startswith("shard shard.00001.mds: its sha1 is") and line.endswith("(all of it is left out)")
    found = find_dataset(store, "d").read(np.arange(20))
    left = [*range(10), *range(20, 30)]
    assert [found.sample(k).tobytes() for k in range(20)] == [image(n) for n in left]
    assert found.labels.tolist() == [n % 3 for n in left]


def test_a_cut_off_shard(kind: str, store: ObjectStore) -> None:
    WRITERS[kind](store)
    key = next(info.key for info in store.list("set") if "00002" in info.key)
    store.put(key, store.get(key)[:-10])
    with pytest.raises(DataError, match=r"cut off"):
        index(store)


def test_index_json_that_no_longer_fits(store: ObjectStore) -> None:
    write_mds(store)
    document = json.loads(store.get("set/index.json"))
    document["shards"][1]["samples"] = 11
    store.put("set/index.json", json.dumps(document).encode())
    with pytest.raises(DataError, match=r"it has 10 samples, index.json says 11"):
        index(store)


def test_folders_of_streams_are_named_and_each_can_be_indexed(store: ObjectStore) -> None:
    write_mds(store, "set/train")
    write_mds(store, "set/val", count=6)
    with pytest.raises(UsageError, match=r"folders train, val have: index each of them, as in set/train"):
        index(store)
    assert index(store, "set/val").manifest.count == 6


def test_train_and_validation_files_in_one_folder_are_not_mixed(store: ObjectStore) -> None:
    write_tfrecord(store)
    store.put("set/validation-00000-of-00001", tfrecord([example({"image": image(1), "label": 1})]))
    with pytest.raises(UsageError, match=r"2 sets of TFRecord files \(set/train-\?\?\?\?\?-of-00003"):
        index(store)
    assert index(store, "set/train-*").manifest.count == 30


def test_labels_from_a_file_need_none_in_the_shards(store: ObjectStore, kind: str, tmp_path: Path) -> None:
    """What stands where a label might be is not even looked at."""
    if kind == "mds":
        columns = {"image": "png", "label": "str"}
        samples = [{"image": image(n), "label": "x" * (2000 if n else 3)} for n in range(3)]
        parts = {"shard.00000.mds": mds_shard(columns, samples)}
        for name, data in {**parts, "index.json": mds_index(columns, parts, HASHES)}.items():
            store.put(f"set/{name}", data)
    else:
        records = [example({"label": b"\xff\xfe", "image/encoded": image(n)}) for n in range(3)]
        store.put("set/train-00000-of-00001", tfrecord(records))
    with pytest.raises(DataError, match="its label"):
        index(store)
    labels = tmp_path / "labels.txt"
    labels.write_text("2\n0\n1\n")
    index(store, name="e", labels=labels)
    assert find_dataset(store, "e").labels([0, 1, 2]).tolist() == [2, 0, 1]


def test_labels_that_count_from_one_stay_as_they_are(store: ObjectStore) -> None:
    pytest.importorskip("google_crc32c")
    write_tfrecord(store, first_label=1)
    manifest = index(store, classes=("background", "a", "b", "c")).manifest
    assert manifest.classes == ("background", "a", "b", "c")
    assert set(find_dataset(store, "d").labels(np.arange(30)).tolist()) == {1, 2, 3}
    assert index(store, replace=True).manifest.classes == ("0", "1", "2", "3")


def test_class_names_and_fields_by_name(kind: str, store: ObjectStore) -> None:
    animals = ["cat", "dog", "ant"]
    if kind == "mds":
        columns = {"left": "png", "right": "bytes", "animal": "str", "label": "int"}
        samples = [
            {"left": image(n), "right": image(n + 100), "animal": animals[n], "label": 0} for n in range(3)
        ]
        store.put("set/a.mds", mds_shard(columns, samples))
        store.put("set/index.json", mds_index(columns, {"a.mds": mds_shard(columns, samples)}))
    else:
        records = [
            example({"left": image(n), "right": image(n + 100), "animal": animals[n].encode()})
            for n in range(3)
        ]
        store.put("set/a.tfrecord", tfrecord(records))
    assert index(store, fields=Fields("right", "animal")).manifest.classes == ("ant", "cat", "dog")
    found = find_dataset(store, "d").read(range(3))
    assert [found.sample(n).tobytes() for n in range(3)] == [image(n + 100) for n in range(3)]
    assert found.labels.tolist() == [1, 2, 0]


def test_a_changed_shard_is_one_clear_error(kind: str, store: ObjectStore) -> None:
    WRITERS[kind](store)
    index(store)
    key = next(info.key for info in store.list("set") if "00000" in info.key)
    swap(store, key, image(4), image(4)[:-1] + b"\1")
    with pytest.raises(DataError, match="00000"):
        find_dataset(store, "d").read(range(10))
    assert not verify_dataset(store, "d").sound
