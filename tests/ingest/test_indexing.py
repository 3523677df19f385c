"""Indexing in place: what is found is read as it lies there, goes on after interruptions, and tells what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.formats_tools import image, memory_store, samples, tar
from support.indexing_tools import everything, index, three_shards
from support.stores import flip

from hapi.data.dataset import find_dataset
from hapi.data.listing import describe
from hapi.data.manifest import InPlace
from hapi.data.verify import verify_dataset
from hapi.errors import ConflictError, DataError, NotFoundError, UsageError
from hapi.ingest.formats import imagefolder as objects_format
from hapi.ingest.in_place import scan as index_runs
from hapi.ingest.in_place.discover import find_folder, left_out_note
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec


def test_tar_shards_are_read_where_they_are(store: ObjectStore) -> None:
    three_shards(store)
    before = everything(store)
    told: list[tuple[int, int]] = []
    indexed = index(
        store, transform=TransformSpec.for_image_size(8), on_progress=lambda *numbers: told.append(numbers)
    )
    manifest = indexed.manifest
    assert np.sum(told, axis=0).tolist() == [30, sum(len(data) for data in before.values())]
    assert manifest.in_place == InPlace(format="webdataset", folder="wds")
    assert (manifest.count, manifest.classes, manifest.shards) == (30, ("0", "1", "2"), 3)
    dataset = find_dataset(store, "d", manifest.version)
    assert [dataset.shards.key(n) for n in range(3)] == ["part/000.tar", "part/001.tar", "part/002.tar"]
    ids = np.array([29, 0, 10, 9, 15])
    found = dataset.read(ids)
    assert [found.sample(k).tobytes() for k in range(5)] == [image(n) for n in ids.tolist()]
    assert found.labels.tolist() == (ids % 3).tolist()
    assert verify_dataset(store, "d").sound and everything(store) == before
    assert sorted(info.key.rpartition("/")[2] for info in store.list("datasets")) == [
        "index.safetensors",
        "manifest.json",
        "marks.safetensors",
    ]
    summary = describe(store, "d")
    assert summary is not None and summary.in_place == manifest.in_place and summary.state == "whole"


def test_the_same_samples_elsewhere_have_the_same_version(store: ObjectStore) -> None:
    three_shards(store)
    for info in store.list("wds"):
        store.put(f"other/{info.key}", store.get(info.key))
    assert index(store).manifest.version == index(store, "other/wds", "e").manifest.version


def test_single_objects_are_read_where_they_are(store: ObjectStore) -> None:
    names = ["cat/1.png", "cat/deep/ü ~2.jpg", "ant/x.PNG", "10/z.webp", "9/'; drop.bmp"]
    wanted = {}
    for number, name in enumerate(names):
        form = {"jpg": "JPEG", "webp": "WEBP", "bmp": "BMP"}.get(name.rpartition(".")[2], "PNG")
        wanted[name] = image(number, form)
        store.put(f"pictures/{name}", wanted[name])
    store.put("pictures/cat/README.md", b"text")
    folder = find_folder(store, "pictures/")
    assert left_out_note(folder) == (
        "1 object is no objects shard by its name and left out: pictures/cat/README.md"
    )
    manifest = index(store, "pictures").manifest
    assert manifest.classes == ("10", "9", "ant", "cat") and manifest.shards == 5
    dataset = find_dataset(store, "d")
    read = dataset.read(np.arange(5))
    for number in range(5):
        name = dataset.shards.key(number)
        assert read.sample(number).tobytes() == wanted[name]
        assert manifest.classes[read.labels[number]] == name.partition("/")[0]
    assert not dataset.reader.chunked and verify_dataset(store, "d").sound


def test_the_whole_store_but_hapis_own(store: ObjectStore) -> None:
    three_shards(store)
    index(store)
    manifest = index(store, ".", "e").manifest
    assert manifest.in_place == InPlace(format="webdataset", folder="") and manifest.count == 30
    assert find_dataset(store, "e").read([29]).data.tobytes() == image(29)
    for folder in ("datasets", "datasets/d", "models/x"):
        with pytest.raises(UsageError, match="is Hapi's own; if the files are yours, make"):
            index(store, folder, "f")


def test_nothing_or_a_mixture_is_one_clear_line(store: ObjectStore) -> None:
    store.put("a/b.tar", tar(samples([1])))
    store.put("a/b.png", image(1))
    with pytest.raises(NotFoundError, match=r"nothing below .*nowhere; give the key prefix"):
        index(store, "nowhere")
    with pytest.raises(
        UsageError, match=r"a mixture of formats: 1 of objects \(b.png\), 1 of webdataset \(b.tar\)"
    ):
        index(store, "a")
    assert index(store, "a", format="webdataset").manifest.count == 1
    store.put("c/notes.txt", b"")
    with pytest.raises(
        UsageError, match=r"no shards and no images that Hapi knows .*\(1 object: notes.txt\)"
    ):
        index(store, "c")
    with pytest.raises(UsageError, match="has no webdataset shards by their names"):
        index(store, "c", format="webdataset")
    store.put("z/a.tar.gz", b"\x1f\x8b")
    with pytest.raises(UsageError, match=r"a.tar.gz is compressed, .* unpack the shards, or pack"):
        index(store, "z")
    with pytest.raises(UsageError, match="is not in the store"):
        index(store, "../x")


def test_training_and_validation_are_not_mixed(store: ObjectStore) -> None:
    for part, first in (("train", 0), ("val", 50)):
        for shard in range(2):
            numbers = range(first + 10 * shard, first + 10 * shard + 10)
            store.put(f"wds/net-{part}-{shard:03d}.tar", tar(samples(numbers)))
        store.put(f"p/{part}/cat/1.png", image(1))
    with pytest.raises(
        UsageError, match=r"training data \(net-train-000.tar\) and other data \(net-val-000.tar\)"
    ):
        index(store)
    with pytest.raises(UsageError, match=r"training data \(train/cat/1.png\) and other data"):
        index(store, "p")
    with pytest.raises(
        UsageError, match=r"net-train-000.tar is an object, no folder; give its folder \(wds\)"
    ):
        index(store, "wds/net-train-000.tar")
    store.put("both/train-test-000.tar", tar(samples(range(10))))
    assert index(store, "both", "b").manifest.count == 10, "made of both on purpose"
    manifest = index(store, "wds/net-train-*").manifest
    assert manifest.count == 20 and manifest.in_place is not None and manifest.in_place.folder == "wds"
    assert find_dataset(store, "d").read([19]).data.tobytes() == image(19)
    assert index(store, "*-val-00?.tar", "e").manifest.count == 20 and verify_dataset(store, "e").sound
    assert index(store, "p/val", "f").manifest.classes == ("cat",)
    with pytest.raises(NotFoundError, match=r"nothing below .*wds/test-\*; give"):
        index(store, "wds/test-*", "g")


def test_too_many_single_objects_are_sent_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    monkeypatch.setattr(objects_format, "MAX_OBJECTS", 2)
    for number in range(3):
        store.put(f"p/a/{number}.png", image(number))
    with pytest.raises(
        UsageError, match=r"has 3 images; up to 2 single objects .* pack them with 'hapi pack'"
    ):
        index(store, "p")


def bad_shards(store: ObjectStore) -> None:
    three_shards(store)
    second = samples(range(10, 20))
    second[4] = ("000012.png", b"")
    second[8] = ("000014.png", b"no image")
    second[13] = ("000016.cls", b"-1")
    store.put("wds/part/001.tar", tar(second))
    store.put("wds/part/002.tar", tar(samples(range(20, 30)))[:-12_000])


def test_the_first_bad_sample_ends_it_and_leaves_nothing(store: ObjectStore) -> None:
    bad_shards(store)
    before = everything(store)
    with pytest.raises(DataError) as raised:
        index(store)
    assert str(raised.value) == (
        "shard part/001.tar, sample 000012: it has no bytes; "
        "repair or remove it, or pass --skip-bad to leave bad samples out"
    )
    assert not store.list("datasets") and describe(store, "d") is None and everything(store) == before


def test_images_that_are_sound_at_the_beginning_only(store: ObjectStore) -> None:
    files = samples(range(10))
    place = next(n for n, (name, _) in enumerate(files) if name == "000004.png")
    files[place] = ("000004.png", files[place][1][:-30])
    store.put("wds/000.tar", tar(files))
    assert index(store).manifest.count == 10, "as fast as reading"
    with pytest.raises(DataError, match=r"shard 000\.tar, sample 000004: cannot be decoded .* --skip-bad"):
        index(store, replace=True, decode=True)
    again = index(store, replace=True, decode=True, skip_bad=True)
    assert again.manifest.count == 9 and again.manifest.skipped == 1


def test_bad_samples_can_be_skipped_and_are_counted(store: ObjectStore) -> None:
    bad_shards(store)
    indexed = index(store, skip_bad=True)
    assert indexed.manifest.in_place is not None
    assert indexed.skipped.count == indexed.manifest.skipped == 4
    for line, words in zip(
        indexed.skipped.lines,
        (
            "shard part/001.tar, sample 000012: it has no bytes",
            "shard part/001.tar, sample 000014: cannot be decoded as an image: cannot identify image file; its",
            "shard part/001.tar, sample 000016: its label -1 is no class number",
            "shard part/002.tar is cut off",
        ),
        strict=True,
    ):
        assert line.startswith(words)
    dataset = find_dataset(store, "d")
    found = dataset.read(np.arange(dataset.count))
    kept = [n for n in range(30) if n not in (12, 14, 16)][: dataset.count]
    assert [found.sample(k).tobytes() for k in range(len(kept))] == [image(n) for n in kept]
    assert 17 < dataset.count < 27 and verify_dataset(store, "d").sound


def test_nothing_that_can_be_used_is_an_error_also_when_skipping() -> None:
    store = memory_store()
    store.put("wds/a.tar", tar([("a.png", b"x"), ("a.cls", b"1")]))
    with pytest.raises(
        DataError, match=r"not one sample in 1 webdataset shards can be used; shard a.tar, sample a: "
    ):
        index(store, skip_bad=True)
    assert describe(store, "d") is None


def test_labels_of_every_kind(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    named = [("a.png", image(1)), ("a.cls", b"dog"), ("b.png", image(2)), ("b.cls", b"cat")]
    store.put("named/1.tar", tar(named))
    store.put(
        "named/2.tar", tar([("c.png", image(3)), ("c.cls", b"ant"), ("d.png", image(4)), ("d.cls", b"dog")])
    )
    manifest = index(store, "named").manifest
    assert manifest.classes == ("ant", "cat", "dog")
    assert find_dataset(store, "d").labels(range(4)).tolist() == [2, 1, 0, 2]
    manifest = index(store, "named", "e", classes=("dog", "eel", "cat", "ant")).manifest
    assert find_dataset(store, "e").labels(range(4)).tolist() == [0, 2, 3, 0] and len(manifest.classes) == 4
    with pytest.raises(UsageError, match="the label 'ant' is not among --classes"):
        index(store, "named", "f", classes=("dog", "cat"))
    store.put("mixed/1.tar", tar(named))
    store.put("mixed/2.tar", tar(samples([5])))
    with pytest.raises(
        UsageError, match=r"some labels are numbers \(like 2\) and some are names \(like 'dog'\)"
    ):
        index(store, "mixed", "m")
    store.put("one/1.tar", tar([*named, *samples([5])]))
    with pytest.raises(
        DataError, match="sample 000005: its label 2 is not one of the names that came before"
    ):
        index(store, "one", "o")
    store.put("none/1.tar", tar([("a.png", image(1)), ("b.png", image(2))]))
    with pytest.raises(
        DataError, match="sample a: it has no label; name the label's field with --label, or give"
    ):
        index(store, "none", "n")
    file = tmp_path / "labels.txt"
    file.write_text("1\n0\n")
    manifest = index(store, "none", "n", labels=file, classes=("x", "y")).manifest
    assert find_dataset(store, "n").labels([0, 1]).tolist() == [1, 0] and manifest.classes == ("x", "y")
    file.write_text("1\n0\n1\n")
    with pytest.raises(UsageError, match="there are 3, but 2 samples"):
        index(store, "none", "k", labels=file)
    file.write_text("1\nx\n")
    with pytest.raises(UsageError, match=r"labels .*labels.txt: .*give a .npy file"):
        index(store, "none", "k", labels=file)
    store.put("high/1.tar", tar([("a.png", image(1)), ("a.cls", b"5")]))
    with pytest.raises(UsageError, match="labels are 5 to 5, but must be 0 to 1 for 2 classes"):
        index(store, "high", "h", classes=("x", "y"))


def test_damage_after_indexing_names_shard_and_sample(store: ObjectStore) -> None:
    three_shards(store)
    index(store)
    dataset = find_dataset(store, "d")
    place = dataset.locate([13])
    key, whole = "wds/part/001.tar", store.get("wds/part/001.tar")
    flip(store, key, int(place.offset[0]))
    with pytest.raises(
        DataError, match=r"sample 13 in shard part/001.tar fails its checksum; .* and index it again"
    ):
        find_dataset(store, "d").read([3, 13])
    (damage,) = verify_dataset(store, "d").damages
    assert str(damage).startswith(f"{key}: sample 13, bytes")
    store.put(key, whole[:3000])
    with pytest.raises(
        DataError, match=r"sample 13: shard part/001.tar has 3000 bytes, not \d+; index it again"
    ):
        find_dataset(store, "d").read([3, 13])
    store.delete(key)
    with pytest.raises(DataError, match=r"sample 13: shard part/001.tar is gone \(.*\); index it again"):
        find_dataset(store, "d").read([3, 13, 25])
    assert [str(d) for d in verify_dataset(store, "d").damages] == [f"{key}: missing, with samples 10 to 19"]


def test_linked_folders_are_indexed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put("own/1.tar", tar(samples([1])))
    elsewhere = open_store(str(tmp_path / "elsewhere"))
    elsewhere.put("2.tar", tar(samples([2])))
    elsewhere.put("deep/3.tar", tar(samples([3])))
    (tmp_path / "store" / "own" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "store" / "own" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "store")
    assert index(store, "own").manifest.count == 3
    dataset = find_dataset(store, "d")
    assert [dataset.shards.key(n) for n in range(3)] == ["1.tar", "more/2.tar", "more/deep/3.tar"]
    assert [dataset.read([n]).data.tobytes() for n in range(3)] == [image(1), image(2), image(3)]


@pytest.mark.slow_except("memory")
def test_a_name_that_is_taken(store: ObjectStore) -> None:
    three_shards(store)
    old = index(store).manifest
    with pytest.raises(
        ConflictError, match=r"there is a dataset .*/d already; choose another name, or pass --replace"
    ):
        index(store)
    before = everything(store)
    assert index(store, replace=True).manifest.version == old.version
    pack(open_source("sklearn:digits"), store, "d", replace=True)
    assert everything(store) == before and verify_dataset(store, "d").sound


def test_many_single_objects_open_with_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 7)
    for number in range(40):
        store.put(f"p/{number % 4}/{number}.png", image(number))
    manifest = index(store, "p").manifest
    assert manifest.shards == manifest.count == 40 and len(manifest.to_bytes()) < 2000
    dataset = find_dataset(store, "d")
    order = np.random.default_rng(0).permutation(40)
    found = dataset.read(order)
    for place, number in enumerate(order.tolist()):
        key = dataset.shard_key(number)
        assert found.sample(place).tobytes() == store.get(key) and key.startswith(f"p/{found.labels[place]}/")
