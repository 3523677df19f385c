"""``benchmarks directory`` on a small directory: the figures are those of what was made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.storage.directory import NAME, DirectorySettings, make_index
from hapi.data.dataset import find_dataset
from hapi.store.open import open_store


def test_the_index_that_is_made_is_sound(tmp_path: Path) -> None:
    manifest = make_index(str(tmp_path), DirectorySettings(samples=3000))
    dataset = find_dataset(open_store(str(tmp_path)), NAME)
    places = dataset.locate(np.arange(3000))
    assert manifest.shards > 1 and (places.length > 0).all()
    assert np.bincount(places.shard).tolist() == dataset.shards.count.tolist()
    assert dataset.shards.size.max() <= 64 << 20


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    flags = ["--samples", "20000", "--processes", "1", "--folder", str(tmp_path), "--json", str(out)]
    code = main(["directory", *flags])
    printed = capsys.readouterr().out
    assert code == 0 and "20000 samples in" in printed and "by calculation 50000000" in printed
    found = json.loads(out.read_text())
    assert (
        found["bytes_per_sample"]["directory"] == 16
        and 32 <= found["bytes_per_sample"]["with_labels_and_checksums"] < 33
    )
    assert found["calculated"]["directory_bytes"] == 800_000_000
    assert found["open_seconds"]["cold"]["min"] > 0 and found["open_seconds"]["warm"]["count"] == 5
    assert set(found["lookup_nanoseconds_per_sample"]) == {"256", "65536"}
    assert found["resident_bytes"]["mapped"] >= 20_000 * 32
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples", "0"), "--samples: expected 1 to"),
        (("--processes", "1000"), "--processes: expected 1 to 100"),
        (("--samples", "1G", "--folder", "."), "are free"),
        (("--folder", "nowhere"), "nowhere: No such file"),
    ],
)
def test_wrong_flags(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.storage import directory

    monkeypatch.setattr(directory.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**9}))
    assert main(["directory", *flags]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
