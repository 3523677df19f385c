"""Every kind of source gives the samples, labels and classes that the user's own reading would."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image
from torchvision import datasets

from hapi.errors import UsageError
from hapi.ingest.sources.folder import FolderSource
from hapi.ingest.sources.open import SourceOptions, open_source


def image_file(path: Path, seed: int, size: tuple[int, int] = (9, 7)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def image_folder(root: Path) -> Path:
    names = [
        "cat/b.jpg",
        "cat/a.PNG",
        "cat/sub/z.jpg",
        "cat/Sub2/c.bmp",
        "dog/1.jpeg",
        "dog/10.jpg",
        "dog/2.jpg",
        "äñ/x.png",
    ]
    for seed, name in enumerate(names):
        image_file(root / name, seed)
    (root / "cat" / "notes.txt").write_text("no image")
    (root / ".hidden").mkdir()
    (root / "README.md").write_text("top")
    return root


def test_folder_equals_torchvisions_image_folder(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "data")
    (root / ".hidden").rmdir()
    source = open_source(str(root))
    theirs = datasets.ImageFolder(str(root))
    assert source.classes == tuple(theirs.classes)
    assert isinstance(source, FolderSource)
    assert [(str(source.path(n)), int(source.labels[n])) for n in range(source.count)] == theirs.samples
    assert all(source.sample(n) == Path(theirs.samples[n][0]).read_bytes() for n in range(source.count))
    assert "1 file" in source.note


def test_folder_notices_changes(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    before = open_source(str(root)).fingerprint()
    assert open_source(str(root)).fingerprint() == before
    os.utime(root / "cat" / "b.jpg", (1, 1))
    assert open_source(str(root)).fingerprint() != before


def test_folder_with_a_link_upwards(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    (root / "cat" / "loop").symlink_to(root / "cat")
    (root / "cat" / "up").symlink_to(root)
    assert open_source(str(root)).count == 8


def test_links_that_lead_nowhere_are_counted(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    (root / "cat" / "gone.jpg").symlink_to(root / "nowhere.jpg")
    (root / "cat" / "round").symlink_to("round")
    (root / "cat" / "b-again.jpg").symlink_to(root / "cat" / "b.jpg")
    source = open_source(str(root))
    assert source.count == 9
    assert source.note == (
        "3 files left out: hidden, no images by their names, in no class's folder, or links that lead nowhere; "
        f"the first is {root / 'cat' / 'gone.jpg'}"
    )


def test_hidden_files_and_folders_are_no_samples(tmp_path: Path) -> None:
    """Those of macOS, Jupyter and others beside each image: they would be damaged images, or each image twice."""
    root = image_folder(tmp_path)
    (root / "cat" / "._b.jpg").write_bytes(b"no image")
    (root / "cat" / ".ipynb_checkpoints").mkdir()
    image_file(root / "cat" / ".ipynb_checkpoints" / "b-checkpoint.png", 3)
    source = open_source(str(root))
    assert source.count == 8 and source.note.startswith("2 files left out: hidden, ")
    assert source.note.endswith("/cat/._b.jpg")


def test_what_lies_in_no_class_is_counted(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    image_file(root / "loose.png", 3)
    (root / "unmounted").symlink_to("/nowhere/at/all")
    source = open_source(str(root))
    assert source.count == 8 and source.note.startswith("3 files left out")


def test_training_and_validation_are_no_classes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        image_folder(tmp_path / "data" / part)
    with pytest.raises(
        UsageError, match=r"training data \(train\) and other data \(val\), which are not mixed"
    ):
        open_source(str(tmp_path / "data"))
    (tmp_path / "data" / "val").rename(tmp_path / "data" / "bus")
    assert open_source(str(tmp_path / "data")).classes == ("bus", "train")


def test_the_store_is_no_part_of_the_folder(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    for store in (root / "store", root / "cat" / "store", root):
        image_file(store / "datasets" / "raw" / "x.png", 3)
        source = open_source(str(root), SourceOptions(store=store))
        assert (source.count, len(source.classes)) == (8, 3)
        assert ("no class, as the dataset goes there" in source.note) == (store.parent != root / "cat")
        shutil.rmtree(store / "datasets" if store == root else store)


def test_classes_by_name(tmp_path: Path) -> None:
    """A part of the classes, with the names of all: the labels are those of the whole."""
    root = image_folder(tmp_path)
    own = open_source(str(root))
    names = ("owl", "äñ", "dog", "cat")
    source = open_source(str(root), SourceOptions(classes=names))
    assert source.classes == names and source.fingerprint() != own.fingerprint()
    assert [names[n] for n in source.labels] == [own.classes[n] for n in own.labels]
    others = open_source(str(root), SourceOptions(classes=("Katze", "Hund", "Eule")))
    assert others.classes == ("Katze", "Hund", "Eule") and (others.labels == own.labels).all()
    for wrong, word in ((("cat", "dog"), "class 'äñ'"), (("a", "b"), "none of these 2")):
        with pytest.raises(UsageError, match=word):
            open_source(str(root), SourceOptions(classes=wrong))


def test_folders_that_are_none(tmp_path: Path) -> None:
    image_file(tmp_path / "flat" / "a.png", 0)
    (tmp_path / "empty").mkdir()
    image_file(tmp_path / "hole" / "a" / "a.png", 0)
    (tmp_path / "hole" / "b").mkdir()
    for name, word in (("flat", "class"), ("empty", "class"), ("hole", "no images"), ("missing", "no such")):
        with pytest.raises(UsageError, match=word):
            open_source(str(tmp_path / name))


def test_arrays_of_each_kind_agree(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((6, 3, 4, 5)).astype(np.float32)
    y = np.array([0, 1, 2, 0, 1, 2])
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    (tmp_path / "y.txt").write_text("\n".join(map(str, y)))
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    safetensors.numpy.save_file({"features": x, "labels": y}, tmp_path / "xy.safetensors")
    sources = [
        open_source(str(tmp_path / "x.npy"), SourceOptions(labels=tmp_path / "y.npy")),
        open_source(str(tmp_path / "x.npy"), SourceOptions(labels=tmp_path / "y.txt")),
        open_source(str(tmp_path / "xy.npz")),
        open_source(str(tmp_path / "xy.safetensors")),
    ]
    for source in sources:
        assert source.layout.sample_shape == (3, 4, 5) and source.layout.sample_dtype == "float32"
        assert source.transform is None and source.classes == ("0", "1", "2")
        assert source.labels.tolist() == y.tolist()
        assert [bytes(source.sample(n)) for n in range(6)] == [v.tobytes() for v in x]


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_arrays_of_the_other_byte_order(tmp_path: Path, kind: str) -> None:
    x = np.arange(24).reshape(4, 2, 3).astype(f">{kind}")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.array([0, 1, 2, 0], dtype=">i4"))
    np.savez(tmp_path / "xy.npz", x=x, y=np.array([0, 1, 2, 0], dtype=">i4"))
    for source in (
        open_source(str(tmp_path / "x.npy"), SourceOptions(labels=tmp_path / "y.npy")),
        open_source(str(tmp_path / "xy.npz")),
    ):
        assert source.labels.tolist() == [0, 1, 2, 0] and source.layout.sample_dtype == x.dtype.name
        found = [np.frombuffer(source.sample(n), dtype=source.layout.sample_dtype) for n in range(4)]
        assert np.array_equal(np.stack(found).reshape(x.shape), x)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off"])
def test_files_of_labels_that_are_none(tmp_path: Path, content: bytes) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2), dtype=np.float32))
    (tmp_path / "y.npy").write_bytes(content)
    with pytest.raises(UsageError, match=r"labels .*y\.npy: .*; give a \.npy file, or text"):
        open_source(str(tmp_path / "x.npy"), SourceOptions(labels=tmp_path / "y.npy"))


def test_uint8_images_become_channels_first(tmp_path: Path) -> None:
    for shape, wanted in (((5, 8, 6, 3), (3, 8, 6)), ((5, 8, 6), (1, 8, 6)), ((5, 3, 8, 6), (3, 8, 6))):
        x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        np.savez(tmp_path / "a.npz", images=x, targets=np.zeros(5, dtype=np.uint8))
        source = open_source(str(tmp_path / "a.npz"))
        assert source.layout.sample_shape == wanted
        assert source.transform is not None and source.transform.resize == source.transform.crop == 6
        first = x[0].transpose(2, 0, 1) if shape[-1] == 3 else x[0]
        assert bytes(source.sample(0)) == first.tobytes()


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    x, y = np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 2])

    def refused(word: str, options: SourceOptions | None = None, **arrays: np.ndarray) -> None:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(UsageError, match=word):
            open_source(str(tmp_path / "a.npz"), options)

    refused("no labels", x=x)
    refused("no array is named", other=x, y=y)
    refused("2 labels", x=x, y=y[:2])
    refused("integer label", x=x, y=y / 2)
    refused("element type", x=x.astype(np.complex64), y=y)
    refused("labels are -1", x=x, y=y - 1)
    refused("classes", SourceOptions(classes=("only", "two")), x=x, y=y)
    refused("too large", x=x, y=y + 10**9)
    refused("no samples", x=x[:0], y=y[:0])
    refused("cannot be read", x=np.array([{}, {}], dtype=object), y=y)
    (tmp_path / "b.npy").write_bytes(b"junk")
    (tmp_path / "b.csv").write_bytes(b"junk")
    (tmp_path / "b.safetensors").write_bytes(b"junk")
    np.savez_compressed(tmp_path / "c.npz", x=np.arange(9000.0).reshape(3, 3000), y=y)
    damaged = bytearray((tmp_path / "c.npz").read_bytes())
    damaged[300:400] = bytes(100)
    (tmp_path / "c.npz").write_bytes(damaged)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, \n"
    (tmp_path / "d.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for name in ("b.npy", "b.csv", "b.safetensors", "c.npz", "d.npy"):
        with pytest.raises(UsageError, match=name):
            open_source(str(tmp_path / name))


def test_torchvision_fake_data_is_lossless() -> None:
    source = open_source("torchvision:FakeData:size=7:image_size=3,8,9:num_classes=4")
    theirs = datasets.FakeData(size=7, image_size=(3, 8, 9), num_classes=4)
    assert source.count == 7 and max(source.labels) < 4
    for n in range(7):
        image, _ = theirs[n]
        stored = Image.open(io.BytesIO(bytes(source.sample(n))))
        assert stored.format == "PNG" and np.array_equal(np.asarray(stored), np.asarray(image))
        assert int(source.labels[n]) == int(theirs[n][1])


def test_torchvision_image_files_are_kept(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    (root / ".hidden").rmdir()
    source = open_source(f"torchvision:ImageFolder:root={root}")
    plain = open_source(str(root))
    assert [source.sample(n) for n in range(source.count)] == [plain.sample(n) for n in range(plain.count)]
    assert source.classes == plain.classes and source.labels.tolist() == plain.labels.tolist()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("torchvision:Nothing", "no dataset"),
        ("torchvision:cifar10", "CIFAR10"),
        ("torchvision:CIFAR10:root=/nonexistent", "--download"),
        ("torchvision:CIFAR10:root=/nonexistent:split=test", "--download"),
        ("torchvision:FakeData:colour=1", "no option 'colour'"),
        ("torchvision:FakeData:size", "no option"),
        ("torchvision:FakeData:size=0", "no samples"),
        ("sklearn:faces", "sklearn:digits"),
        ("torchvision:FakeData:size=abc", "check its options"),
        ("torchvision:FakeData:size=-1", "check its options"),
        ("nowhere/at/all", "no such"),
        ("a" * 300, "no such"),
        (" ", "is empty"),
    ],
)
def test_wrong_names(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        open_source(text)


def test_sklearn_digits_and_photos() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    digits = open_source("sklearn:digits")
    theirs = sklearn_datasets.load_digits()
    assert (
        digits.count == 1797
        and digits.labels.tolist() == theirs.target.tolist()
        and len(digits.classes) == 10
    )
    pixels = np.asarray(Image.open(io.BytesIO(bytes(digits.sample(5)))))
    assert np.array_equal(pixels, np.rint(theirs.images[5] * 255 / 16).astype(np.uint8))
    photos = open_source("sklearn:photos")
    assert photos.classes == ("china", "flower") and photos.count == 456
    assert np.asarray(Image.open(io.BytesIO(bytes(photos.sample(0))))).shape == (64, 64, 3)
