"""A training on shards that are indexed in place is the training on the same images packed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from harness import hapi, losses, report_of, server, train

from hapi.storage.dataset import open_dataset
from hapi.storage.objects import open_store

COMMON = (
    "--model", "resnet18", "--weights", "random", "--image-size", "32", "--bs", "64", "--request-size", "16",
    "--lr", "0.002", "--no-progress", "--epochs", "2",
)  # fmt: skip


def _write_foreign(store: Path, packed: str) -> None:
    """The packed images once more, as WebDataset shards in the same order."""
    dataset = open_dataset(open_store(str(store)), packed)
    found = dataset.read(range(dataset.count))
    images = [(found.sample(n).tobytes(), int(found.labels[n])) for n in range(dataset.count)]
    (store / "wds").mkdir()
    for shard, first in enumerate(range(0, dataset.count, 70)):
        with tarfile.open(store / "wds" / f"{shard:04d}.tar", "w") as archive:
            for number in range(first, min(first + 70, dataset.count)):
                data, label = images[number]
                for extension, content in (("cls", str(label).encode()), ("png", data)):
                    info = tarfile.TarInfo(f"digits/{number:05d}.{extension}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


@pytest.mark.slow
def test_losses_are_those_of_the_packed_images(tmp_path: Path) -> None:
    store = tmp_path / "store"
    hapi("pack", "sklearn:digits", f"{store}/packed", "--image-size", "32", "--limit", "300")
    _write_foreign(store, "packed")
    said = hapi("index", "wds", f"{store}/foreign", "--image-size", "32").stdout
    assert "300 samples, 10 classes" in said
    reports = {}
    with server(store) as running:
        for name in ("packed", "foreign"):
            path = tmp_path / f"{name}.json"
            train(*COMMON, "--server", running.url, "--dataset", name, "--report", str(path))
            reports[name] = report_of(path)
    assert losses(reports["foreign"]) == pytest.approx(losses(reports["packed"]), rel=1e-4)
    assert [e["samples"] for e in reports["foreign"]["epochs"]] == [
        e["samples"] for e in reports["packed"]["epochs"]
    ]
    assert "sound" in hapi("verify", f"{store}/foreign").stdout
