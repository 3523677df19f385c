"""Files of labels in object stores: at a URL, or by their key in the dataset's store."""

from __future__ import annotations

import io
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from support.formats_tools import image, tar

import hapi
from hapi.cli.main import main
from hapi.data.dataset import find_dataset
from hapi.errors import UsageError
from hapi.ingest.labels import file as label_files
from hapi.ingest.labels.file import StoredFile, label_file
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

TABLE = b"path,age\n1.png,10\n2.png,20\n"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for name in ("1.png", "2.png"):
        Image.new("L", (8, 8), 9).save(tmp_path / "photos" / name)
    return tmp_path / "photos"


@pytest.fixture
def away() -> ObjectStore:
    """A store elsewhere."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def parquet() -> bytes:
    written = io.BytesIO()
    pa.parquet.write_table(pa.table({"path": ["1.png", "2.png"], "age": [10, 20]}), written)
    return written.getvalue()


@pytest.mark.parametrize(("name", "content"), [("t.csv", TABLE), ("deep/t.parquet", parquet())])
def test_a_table_at_a_url(photos: Path, away: ObjectStore, name: str, content: bytes) -> None:
    away.put(name, content)
    local = photos.parent / "local.csv"
    local.write_bytes(TABLE)
    found = hapi.pack(
        photos, f"{photos.parent}/store/a", labels=f"{away.url}/{name}", label_kind="regression"
    )
    same = hapi.pack(photos, f"{photos.parent}/store/b", labels=local, label_kind="regression")
    assert found.version == same.version and found.classes == ("age",)


def test_labels_of_an_array(tmp_path: Path, away: ObjectStore) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2, 2), dtype=np.uint8))
    written = io.BytesIO()
    np.save(written, np.array([2, 0, 1]))
    away.put("y.npy", written.getvalue())
    away.put("y.txt", b"2\n0\n1\n")
    for name in ("y.npy", "y.txt"):
        hapi.pack(tmp_path / "x.npy", f"{tmp_path}/store/d", labels=f"{away.url}/{name}", replace=True)
        assert find_dataset(open_store(f"{tmp_path}/store"), "d").labels([0, 1, 2]).tolist() == [2, 0, 1]
    away.put("y.npy", b"damaged")
    with pytest.raises(UsageError, match=r"--labels memory://.*/y\.npy: .*give a \.npy file"):
        hapi.pack(tmp_path / "x.npy", f"{tmp_path}/store/e", labels=f"{away.url}/y.npy")


def test_a_key_in_the_datasets_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the shards lie; a file on this machine comes first."""
    monkeypatch.chdir(tmp_path)
    store = open_store("store")
    store.put("wds/a.tar", tar([(f"{n}.png", image(n)) for n in range(3)]))
    store.put("wds/ages.csv", b"path,age\n0.png,5\n1.png,6\n2.png,7.5\n")
    arguments = [
        "index",
        "wds",
        "store/d",
        "--labels",
        "wds/ages.csv",
        "--label-kind",
        "regression",
        "--quiet",
    ]
    assert main(arguments) == 0, capsys.readouterr().err
    assert find_dataset(store, "d").labels([0, 1, 2])[:, 0].tolist() == [5, 6, 7.5]
    assert isinstance(label_file("wds/ages.csv", store), StoredFile)
    Path("wds").mkdir()
    Path("wds/ages.csv").write_bytes(TABLE)
    assert label_file("wds/ages.csv", store) == Path("wds/ages.csv")
    assert label_file("none.csv", store) == Path("none.csv")


def test_what_is_wrong_is_one_line(
    photos: Path, away: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away.put("large.csv", TABLE * 10)
    monkeypatch.setattr("hapi.ingest.labels.table.MAX_TABLE_BYTES", 100)
    for labels, message in (
        (f"{away.url}/none.csv", f"--labels {away.url}/none.csv: cannot be read: there is no such object"),
        (f"{away.url}/large.csv", "large.csv: has more than 100 bytes"),
        ("s3://labels.csv", "--labels s3://labels.csv: is no object; for example s3://bucket/labels.csv"),
        ("ftp://host/t.csv", "unknown scheme 'ftp'"),
        ("nowhere.csv", "--labels nowhere.csv: cannot be read: No such file"),
    ):
        assert main(["pack", str(photos), f"{photos.parent}/store/d", "--labels", labels]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert label_files.MAX_TABLE_BYTES > 1 << 20
