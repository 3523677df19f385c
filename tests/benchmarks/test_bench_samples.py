"""``benchmarks samples``: every reader reads what there is, and the table says what cannot be said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.storage.samples import CHECKED, LARGE, READERS, SamplesResult, SamplesRow, SamplesSettings
from benchmarks.storage.samples_data import RandomBytes, file_of, make_data
from benchmarks.storage.samples_peers import LIBRARIES
from benchmarks.storage.samples_read import read_figure
from hapi.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    assert make_data(folder, 512, 1 << 18, ["tars"]).tolist() == [512] * 512
    return folder


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader not in LIBRARIES])
@pytest.mark.parametrize("cold", [True, False])
def test_every_reader_reads_the_epoch(folder: Path, reader: str, cold: bool) -> None:
    spec = {
        "folder": str(folder),
        "reader": reader,
        "cold": cold,
        "seconds": 30 if cold else 0.2,
        "batch": 50,
    }
    found = read_figure(spec)
    assert found["rate"] > 0 and found["cpu_us"] > 0
    assert found["samples"] == 512 if cold else found["samples"] > 512  # warm, epoch after epoch
    assert 0 <= found["resident"] <= 1 and (cold or found["resident"] == 1)
    assert 0 < found["quality"] <= 1.1
    assert ("lookup_share" in found) == reader.startswith("hapi")


def test_checked_raw_reads_are_checked(tmp_path: Path) -> None:
    make_data(tmp_path, 1 << 14, 1 << 18, [])
    spec = {"folder": str(tmp_path), "reader": "raw 1 checked", "cold": False, "seconds": 0.1, "batch": 4}
    assert read_figure(spec)["samples"] > 0
    shard = next((tmp_path / "store").rglob("*.bin"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    assert read_figure(spec | {"reader": "raw 1"})["samples"] > 0
    with pytest.raises(DataError, match="checksums"):
        read_figure(spec)


def test_the_forms_hold_the_same_bytes(folder: Path) -> None:
    source = RandomBytes(512, 1 << 18)
    assert all(file_of(folder, i).read_bytes() == source.sample(i) for i in (0, 1, 511))
    assert len(list((folder / "tars").iterdir())) == 1


def test_the_mix_is_like_imagenet() -> None:
    lengths = RandomBytes(0, 1 << 28).lengths
    assert 105_000 < np.median(lengths) < 115_000 and lengths.max() > 300_000


def result(resident: float) -> SamplesResult:
    rows = tuple(
        SamplesRow(
            size=512,
            reader=reader,
            cold=cold,
            rate=3_000.0 if reader.startswith("hapi") else 100.0,
            lowest=90.0,
            highest=4_000.0,
            cpu_us=1.0,
            resident=resident if cold else 1.0,
            lookup_share=0.02 if reader.startswith("hapi") else None,
        )
        for reader in READERS
        if reader not in LIBRARIES
        for cold in (True, False)
    )
    return SamplesResult(
        settings=SamplesSettings(sizes=(512,)), rows=rows, missing=tuple(LIBRARIES), conditions={}
    )


def test_table_tells_what_is_missing_and_missed() -> None:
    text = "\n".join(result(0.0).table())
    assert "WebDataset                not installed" in text and "not cold" not in text
    assert "512 B cold over a file each with 8 threads: 30.0 (goal 30): reached" in text
    assert "look-up, largest share of warm reading: 2.00% (goal 1%): missed" in text
    assert "not cold" in "\n".join(result(0.5).table())
    assert "Hapi keeps up to 64 MiB" not in text
    small = replace(result(0.0), settings=SamplesSettings(sizes=(512,), total=32 << 20))
    assert len(small.goals()) == 1 and "datasets of 32 MiB: Hapi keeps up to 64 MiB" in small.goals()[0]
    assert result(0.0).to_json()["not_installed"] == list(LIBRARIES)


def test_large_samples_are_held_against_raw_reads_that_check_and_that_do_not() -> None:
    known = result(0.0)
    rows = tuple(
        replace(row, size=LARGE, rate=800.0 if row.reader in CHECKED else row.rate / 3)
        if row.reader in CHECKED or row.reader == "hapi full"
        else replace(row, size=LARGE, rate=1250.0 if row.reader == "raw 8" else row.rate)
        for row in known.rows
    )
    lines = replace(known, settings=SamplesSettings(sizes=(LARGE,)), rows=rows).goals()
    told = "full permutation over the best raw reads: 0.80, over those with a checksum of each sample, as ours: 1.25"
    assert f"128 KiB cold, {told} (goal 0.95 over raw reads): missed" in lines


def test_only_peers_that_shuffle_as_well_and_were_cold_count() -> None:
    def peer(reader: str, rate: float, quality: float | None, resident: float = 0.0) -> SamplesRow:
        return replace(
            result(0.0).row(512, "hapi chunks", True),
            reader=reader,
            rate=rate,
            quality=quality,
            resident=resident,
        )

    known = tuple(replace(row, quality=0.8) for row in result(0.0).rows)
    cases = {
        "(quality 0.80) over MosaicML Streaming (quality 0.76): 50.0 (goal 50): reached": [
            peer("tars", 500.0, 0.5), peer("mds", 60.0, 0.76), peer("litdata", 900.0, None, 0.5),
        ],
        "over WebDataset (quality not known): 6.0 (goal 50): missed": [
            peer("tars", 500.0, None), peer("mds", 60.0, 0.9), peer("litdata", 900.0, 0.1),
        ],
    }  # fmt: skip
    for told, rows in cases.items():
        found = replace(result(0.0), rows=(*known, *rows), missing=())
        assert any(told in line for line in found.goals())
    none = [peer(form, 900.0, 0.1) for form in LIBRARIES]
    assert not any(
        "WebDataset" in line for line in replace(result(0.0), rows=(*known, *none), missing=()).goals()
    )


def test_a_folder_that_is_none_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--folder", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith(
        "python -m benchmarks: error: /nowhere: No such file or directory; --folder"
    )
