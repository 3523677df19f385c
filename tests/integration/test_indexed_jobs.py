"""A training on shards that are indexed in place is the training on the same images packed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.foreign_shards import example, mds_index, mds_shard, tfrecord
from support.harness import DIGITS_JOB, hapi, losses, report_of, server, train

from hapi.data.dataset import find_dataset
from hapi.store.open import open_store

COUNT = 120
COMMON = (*DIGITS_JOB, "--bs", "32", "--request-size", "16", "--epochs", "2")


Labelled = tuple[bytes, int]


def _tar(images: Sequence[Labelled], first: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, (data, label) in enumerate(images, first):
            for extension, content in (("cls", str(label).encode()), ("png", data)):
                info = tarfile.TarInfo(f"digits/{number:05d}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _write_foreign(store: Path, packed: str) -> None:
    """The packed images once more, as shards of the formats in the same order."""
    dataset = find_dataset(open_store(str(store)), packed)
    found = dataset.read(range(dataset.count))
    images = [(found.sample(n).tobytes(), int(found.labels[n])) for n in range(dataset.count)]
    files: dict[str, bytes] = {}
    columns = {"image": "png", "label": "int"}
    for first in range(0, dataset.count, 30):
        part = images[first : first + 30]
        files[f"webdataset/{first:04d}.tar"] = _tar(part, first)
        files[f"mds/{first:04d}.mds"] = mds_shard(columns, [{"image": data, "label": n} for data, n in part])
        files[f"tfrecord/{first:04d}.tfrecord"] = tfrecord(
            [example({"image/encoded": data, "image/class/label": n}) for data, n in part]
        )
    shards = {name[4:]: data for name, data in files.items() if name.startswith("mds/")}
    files["mds/index.json"] = mds_index(columns, shards, ["sha256"])
    for name, content in files.items():
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_bytes(content)


@pytest.mark.slow
def test_losses_are_those_of_the_packed_images(tmp_path: Path) -> None:
    store = tmp_path / "store"
    hapi("pack", "sklearn:digits", f"{store}/packed", "--image-size", "32", "--limit", str(COUNT))
    _write_foreign(store, "packed")
    formats = ["webdataset", "mds", *(["tfrecord"] if find_spec("google_crc32c") else [])]
    for name in formats:
        said = hapi("index", name, f"{store}/foreign-{name}", "--image-size", "32").stdout
        assert f"{COUNT} samples, 10 classes" in said
    reports = {}
    names = ("packed", *(f"foreign-{name}" for name in formats))
    with server(store) as running:
        for name in names:
            path = tmp_path / f"{name}.json"
            train(*COMMON, "--server", running.url, "--dataset", name, "--report", str(path))
            reports[name] = report_of(path)
    for name in names[1:]:
        assert losses(reports[name]) == pytest.approx(losses(reports["packed"]), rel=1e-4)
        assert [e["samples"] for e in reports[name]["epochs"]] == [COUNT, COUNT]
        assert "sound" in hapi("verify", f"{store}/{name}").stdout
