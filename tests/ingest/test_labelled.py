"""Folders and shards with their labels in a table: packed, indexed, and what does not fit is one clear line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.formats_tools import image, tar
from support.indexing_tools import index

import hapi
from hapi.data.dataset import Dataset, find_dataset
from hapi.errors import UsageError
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore
from hapi.store.open import open_store

SHADES = {"a/1.png": 10, "a/2.png": 20, "b/3.jpg": 30, "4.png": 40}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for name, shade in SHADES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), shade).save(root / name)
    (root / ".hidden").mkdir()
    Image.new("L", (8, 8)).save(root / ".hidden" / "x.png")
    return root


def table(root: Path, text: str, name: str = "labels.csv") -> Path:
    path = root / name
    path.write_text(text)
    return path


ROWS = "path,age\n4.png,40\n./a/1.png,10\na\\2,20\nb/3.jpg,30\n"


def packed(root: Path, labels: Path, **options: Any) -> Dataset:
    """The dataset of ``root`` with these labels."""
    address = f"{root.parent}/store/d"
    hapi.pack(root, address, labels=labels, replace=True, **options)
    return find_dataset(open_store(str(root.parent / "store")), "d")


def shades(dataset: Dataset) -> list[int]:
    """The grey of each sample, which tells its file."""
    read = dataset.read(np.arange(dataset.count))
    found = [Image.open(io.BytesIO(read.sample(n).tobytes())) for n in range(len(read))]
    return [int(np.asarray(one).mean().round()) for one in found]


def test_a_folder_with_a_table(folder: Path) -> None:
    labels = table(folder, ROWS)
    dataset = packed(folder, labels, label_kind="regression")
    assert dataset.manifest.label_kind == "regression" and dataset.classes == ("age",)
    assert dataset.labels(np.arange(4))[:, 0].tolist() == shades(dataset) == [40, 10, 20, 30]
    single = packed(folder, labels, label="age")
    assert single.classes == ("10", "20", "30", "40") and single.manifest.label_kind == "single"
    assert single.labels(np.arange(4)).tolist() == [3, 0, 1, 2]
    assert single.version != dataset.version


def test_whole_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    rows = f"path,age\n{folder}/4.png,40\n{link}/a/../a/1.png,10\na/2.png,20\n{folder}/b/3,30\n"
    labels = table(folder.parent, rows)
    monkeypatch.chdir(folder.parent)
    for root in (link, Path("link"), Path("photos", "..", "link")):
        dataset = packed(root, labels, label_kind="regression")
        assert dataset.labels(np.arange(4))[:, 0].tolist() == shades(dataset) == [40, 10, 20, 30]
    twice = table(folder.parent, rows + f"{folder}/a/2.png,21\n")
    with pytest.raises(UsageError, match=r"line 6: .*/a/2\.png has another label than in line 4"):
        packed(link, twice)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "{above}/other",
            r"none of its rows names a file in folder .*photos: .* has /.*/other/a/1\.png, a file",
        ),
        ("{above}/photos/a/..", None),
        ("{above}/photo", r"none of its rows names a file"),
    ],
)
def test_whole_paths_elsewhere(folder: Path, place: str, message: str | None) -> None:
    place = place.format(above=folder.parent)
    labels = table(
        folder.parent, "path,y\n" + "".join(f"{place}/{name},{n}\n" for n, name in enumerate(SHADES))
    )
    if message is None:
        assert packed(folder, labels).count == 4
        return
    with pytest.raises(UsageError, match=message):
        packed(folder, labels)


def test_several_columns_and_their_names(folder: Path) -> None:
    labels = table(folder, "left,file,up\n1,a/1,0\n0,a/2,0\n1,b/3,1\n0,4,1\n")
    dataset = packed(folder, labels, label=("left", "up"))
    assert dataset.classes == ("left", "up") and dataset.manifest.label_kind == "multi"
    assert dataset.labels(np.arange(4)).tolist() == [[0, 1], [1, 0], [0, 0], [1, 1]]
    assert packed(folder, labels, label="up,left", classes=("p", "q")).classes == ("p", "q")
    part = packed(folder, labels, label="up,left", options=hapi.PackOptions(limit=2))
    assert part.labels(np.arange(2)).tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "path,y\na/1.png,1\na/2.png,1\n",
            r"folder .*photos: 4\.png \(and 1 more\) has no row in .*labels\.csv; add rows",
        ),
        (
            ROWS + "a/5.png,5\nc.png,7\n",
            r"labels\.csv line 6: there is no a/5\.png in folder .* \(and 1 more such row\)",
        ),
        (ROWS + "a/1,5\n", r"line 6: there is no a/1 in folder"),
        (ROWS.replace("4.png", "photos/4.png"), r"folder .*: 4\.png has no row in"),
        (
            "path,y\nx.png,1\ny.png,2\n",
            r"none of its rows names a file in folder .*: .* line 2 has x\.png, a file there is 4",
        ),
    ],
)
def test_files_and_rows_that_do_not_fit(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        packed(folder, table(folder, text))


def test_two_files_of_one_row(folder: Path) -> None:
    Image.new("L", (8, 8), 11).save(folder / "a" / "1.jpg")
    with pytest.raises(
        UsageError, match=r"line 3: \./a/1 fits 2 files in folder .*; name each with its extension"
    ):
        packed(folder, table(folder, ROWS.replace("a/1.png", "a/1")))


def test_what_does_not_fit_is_left_out_if_the_user_says_so(folder: Path) -> None:
    labels = table(folder, "path,age\na/1.png,10\n4,40\nx.png,7\n")
    dataset = packed(folder, labels, label_kind="regression", skip_unmatched=True)
    assert shades(dataset) == dataset.labels(np.arange(2))[:, 0].tolist() == [40, 10]
    assert dataset.manifest.skipped == 2


def test_sources_that_take_no_table(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 8, 8), np.float32))
    labels = table(tmp_path, ROWS)
    for source, options, message in (
        (tmp_path / "x.npy", {"labels": labels}, "a table of files is for a folder of images"),
        (folder, {"labels": tmp_path / "x.npy"}, "for a folder it is a table of files and labels"),
        ("sklearn:digits", {"labels": labels}, "are for folders and array files; this source has labels"),
        (folder, {"label": "age"}, "--label is for a file of labels; give it with --labels FILE"),
    ):
        with pytest.raises(UsageError, match=message):
            hapi.pack(source, f"{tmp_path}/store/d", **options)


@pytest.mark.parametrize("kind", ["multi", "regression"])
def test_arrays_with_several_numbers_a_label(tmp_path: Path, kind: Any) -> None:
    values = np.array([[0, 1], [1, 1], [1, 0]])
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 4, 4), np.uint8), y=values)
    with pytest.raises(UsageError, match="several labels a sample give --label-kind regression or multi"):
        hapi.pack(tmp_path / "x.npz", f"{tmp_path}/store/d")
    manifest = hapi.pack(tmp_path / "x.npz", f"{tmp_path}/store/d", label_kind=kind, classes=("p", "q"))
    dataset = find_dataset(open_store(f"{tmp_path}/store"), "d")
    assert manifest.label_kind == kind and manifest.classes == ("p", "q")
    assert dataset.labels([0, 1, 2]).tolist() == values.tolist()
    (tmp_path / "y.txt").write_text("1.5 2\n3")
    np.save(tmp_path / "x.npy", np.zeros((3, 4, 4), np.uint8))
    if kind == "regression":
        hapi.pack(tmp_path / "x.npy", f"{tmp_path}/store/e", labels=tmp_path / "y.txt", label_kind=kind)
        assert find_dataset(open_store(f"{tmp_path}/store"), "e").labels([0, 2]).tolist() == [[1.5], [3]]


# -- in place ------------------------------------------------------------------------------------------------------


def objects(store: ObjectStore) -> None:
    for name, shade in SHADES.items():
        store.put(f"photos/{name}", image(shade))


def test_single_objects_with_a_table(store: ObjectStore, tmp_path: Path) -> None:
    objects(store)
    labels = table(tmp_path, ROWS)
    found = index(store, "photos", labels=labels, label_kind="regression").manifest
    dataset = find_dataset(store, "d")
    assert found.label_kind == "regression" and found.classes == ("age",)
    names = [dataset.shards.key(n) for n in range(4)]
    assert dataset.labels(np.arange(4))[:, 0].tolist() == [SHADES[name] for name in names]
    again = index(store, "photos", labels=labels, label_columns=("age",), replace=True).manifest
    assert again.label_kind == "single" and again.classes == ("10", "20", "30", "40")
    for text, message in (
        (ROWS.replace("4.png,40\n", ""), r"photos: 4\.png has no row in"),
        (ROWS + "5.png,1\n", r"line 6: there is no 5\.png in photos"),
        ("path,y\nx,1\n", r"none of its rows names a file in photos"),
    ):
        with pytest.raises(UsageError, match=message):
            index(store, "photos", labels=table(tmp_path, text), replace=True)
    whole = "path,y\n" + "".join(f"{store.url}/photos/{name},{n}\n" for n, name in enumerate(SHADES))
    assert index(store, "photos", labels=table(tmp_path, whole), replace=True).manifest.count == 4
    both = table(tmp_path, "path,y\na/1,1\nb/3,0\nx,1\n")
    some = index(store, "photos", labels=both, skip_unmatched=True, replace=True)
    assert some.manifest.count == 2 and some.manifest.skipped == 2
    assert "has no row in" in some.skipped.lines[0]


def tars(store: ObjectStore) -> None:
    for shard in range(2):
        members = [(f"{n:04d}.png", image(10 * n)) for n in range(3 * shard, 3 * shard + 3)]
        store.put(f"wds/{shard:03d}.tar", tar(members))


def test_shards_with_a_table(store: ObjectStore, tmp_path: Path) -> None:
    tars(store)
    rows = "".join(f"{n:04d}.png,{n % 2},{n // 4}\n" for n in reversed(range(6)))
    labels = table(tmp_path, "image,odd,late\n" + rows)
    manifest = index(store, "wds", labels=labels, label_columns=("odd", "late")).manifest
    dataset = find_dataset(store, "d")
    assert manifest.label_kind == "multi" and manifest.classes == ("odd", "late")
    assert dataset.labels(np.arange(6)).tolist() == [[n % 2, n // 4] for n in range(6)]
    lacking = table(tmp_path, "image,odd,late\n" + "\n".join(rows.splitlines()[1:]))
    with pytest.raises(
        UsageError, match=r"shard .*001\.tar, sample 0005: has no row in .*, whose first file is 0004"
    ):
        index(store, "wds", labels=lacking, label_columns=("odd",), replace=True, skip_bad=True)
    some = index(store, "wds", labels=lacking, label_columns=("odd",), replace=True, skip_unmatched=True)
    assert some.manifest.count == 5 and some.skipped.count == 1
    extra = table(tmp_path, "image,odd\n" + "".join(f"{n:04d},{n % 2}\n" for n in range(8)))
    with pytest.raises(UsageError, match=r"line 8: there is no 0006 in wds \(and 1 more such row\)"):
        index(store, "wds", labels=extra, replace=True)


def test_an_interrupted_indexing_goes_on_only_with_the_same_table(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tars(store)
    rows = [f"{n:04d},{n}.5\n" for n in range(6)]
    started: list[int] = []

    def indexed(text: str) -> list[float]:
        index(
            store,
            "wds",
            labels=table(tmp_path, text),
            replace=True,
            on_start=lambda n, size: started.append(n),
        )
        values: list[float] = find_dataset(store, "d").labels(np.arange(6))[:, 0].tolist()
        return values

    assert indexed("image,y\n" + "".join(rows)) == indexed("image,y\n" + "".join(reversed(rows)))


def test_labels_in_order_of_other_kinds(store: ObjectStore, tmp_path: Path) -> None:
    tars(store)
    np.save(tmp_path / "y.npy", np.arange(12).reshape(6, 2) / 2)
    with pytest.raises(UsageError, match="--label-kind is for a file of labels"):
        index(store, "wds", label_kind="regression")
    manifest = index(store, "wds", labels=tmp_path / "y.npy", label_kind="regression").manifest
    assert manifest.label_kind == "regression" and manifest.classes == ("0", "1")
    assert find_dataset(store, "d").labels([5]).tolist() == [[5, 5.5]]
