"""``benchmarks layers``, ``reuse`` and ``concurrency``: arithmetic with tiers that are made up, small real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_bed import FakeBed

from benchmarks.__main__ import main
from benchmarks.serving import concurrency, reuse
from benchmarks.serving.concurrency import ConcurrencySettings, chosen_splits, measure_concurrency
from benchmarks.serving.layers import LayersSettings, _ranges, measure_layers
from benchmarks.serving.plots_measured import draw_concurrency, draw_reuse
from benchmarks.serving.reuse import ReuseSettings, measure_reuse, reuse_rows, reuse_table
from benchmarks.split.study import measured_cells
from benchmarks.split.sweep import sweep
from benchmarks.split.views import VIEWS
from benchmarks.testbed.cells import Grid, Results
from benchmarks.testbed.loose import LooseBed
from hapi.errors import TransportError, UsageError


class Client:
    """Answers as a client would; ``loaded`` servers take longer, and choose another split."""

    def __init__(self, bed: FakeBed, token: str, folder: Path, name: str = "client") -> None:
        self.bed, self.loaded = bed, "loaded" in name
        self.epochs = 0

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, "do_" + do)(**arguments)
        return {"ok": True, **found}

    def do_open(self, **settings: Any) -> dict[str, Any]:
        assert self.bed.bandwidths[-1] is None, "weights come over the link, and are not measured"
        return {"freeze": 11, "splits": list(range(14))}

    def do_plan(self, samples: int, epoch: int) -> dict[str, Any]:
        return {"choices": {"auto": 0 if self.loaded else 9}}

    def do_epoch(self, split: int, samples: int, epoch: int, limit: float | None) -> dict[str, Any]:
        self.epochs += 1
        seconds = 100.0 if self.epochs == 1 else 3.0 if self.loaded else 2.0
        stages = {"queue": 50.0, "model": 4.0 if split else 0.0, "forward": 8.0, "send": 70.0}
        return {"seconds": seconds, "stages": stages, "requests": 8}

    def do_fetch(self, split: int, samples: int, at_once: int) -> dict[str, Any]:
        return {"seconds": 1.0 + 0.25 * samples / 16, "bytes": 100 * samples}


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> FakeBed:
    for module in (reuse, concurrency):
        monkeypatch.setattr(module, "make_store", lambda folder, samples, side, forms: folder)
        monkeypatch.setattr(module, "start_server", lambda *args, **kwargs: "http://nowhere")
        monkeypatch.setattr(module, "BenchClient", Client)
    monkeypatch.setattr(reuse, "push_model", lambda *args: None)
    return FakeBed()


def test_reuse_does_not_count_the_first_epochs_nor_waiting(bed: FakeBed, tmp_path: Path) -> None:
    settings = ReuseSettings(models=("alexnet",), repeats=2)
    results = Results(tmp_path / "reuse.jsonl", {})
    measure_reuse(bed, settings, results, lambda line: None)  # type: ignore[arg-type]
    (row,) = reuse_rows(results.records)
    assert (row.kept_seconds, row.loaded_seconds, row.speedup) == (2.0, 3.0, 1.5)
    # The loading server's choice is split 0, where nothing is loaded: its account is taken at the freeze.
    assert (row.kept_split, row.loaded_split, row.load_split) == (9, 0, 11)
    assert (row.load_seconds, row.request_seconds) == (0.5, 1.5)
    table = "\n".join(reuse_table([row], settings))
    assert "1.50" in table and "2.00 @9" in table and table.split("split 11")[1].split()[2:4] == ["33", "77"]
    assert bed.bandwidths == [None, settings.bandwidth]
    draw_reuse([row], str(tmp_path / "x.svg"))


def test_reuse_goes_on_where_it_broke_off(
    bed: FakeBed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = ReuseSettings(models=("alexnet", "resnet18", "vgg11"), repeats=1), list[str]()

    def pushed(store: Path, model: str, side: int) -> None:
        if model == "resnet18" and len(said) == 2:
            raise TransportError("the server ended")

    monkeypatch.setattr(reuse, "push_model", pushed)
    with pytest.raises(TransportError):
        measure_reuse(bed, settings, Results(tmp_path / "reuse.jsonl", {}), said.append)  # type: ignore[arg-type]
    results = Results(tmp_path / "reuse.jsonl", {})
    measure_reuse(bed, settings, results, said.append)  # type: ignore[arg-type]
    assert [line for line in said if "to measure" in line] == [
        "3 models, 3 to measure",
        "3 models, 2 to measure",
    ]
    assert [row.model for row in reuse_rows(results.records)] == list(settings.models)


def test_loading_is_shown_beside_that_of_other_code() -> None:
    before = reuse.ReuseRow(
        model="alexnet", kept_split=9, loaded_split=0, kept_seconds=2.0, loaded_seconds=3.0, load_split=11,
        load_seconds=0.5, request_seconds=1.5,
    )  # fmt: skip
    now = replace(before, loaded_split=11, loaded_seconds=2.5, load_seconds=0.1, request_seconds=1.0)
    _, line = reuse.change_table([before, replace(before, model="vgg11")], [now, replace(now, model="vgg19")])
    assert line.split() == [
        "alexnet",
        *["0.500", ">", "0.100", "33", ">", "10", "0", ">", "11", "3.00", ">", "2.50"],
    ]


def test_what_was_measured_is_not_measured_again(bed: FakeBed, tmp_path: Path) -> None:
    told: list[str] = []
    for models in (("alexnet",), ("alexnet", "vgg11"), ("vgg11", "alexnet")):
        results = Results(tmp_path / "reuse.jsonl", {})
        measure_reuse(bed, ReuseSettings(models=models, repeats=1), results, told.append)  # type: ignore[arg-type]
    assert [line for line in told if "to measure" in line] == [
        "1 models, 1 to measure", "2 models, 1 to measure", "2 models, 0 to measure",
    ]  # fmt: skip
    assert {row.model for row in reuse_rows(results.records)} == {"alexnet", "vgg11"}


@pytest.mark.slow
def test_concurrency(bed: FakeBed, tmp_path: Path) -> None:
    settings = ConcurrencySettings(models=("resnet18",), repeats=2)
    for _ in range(2):  # the second finds everything there, read back from the file
        results = Results(tmp_path / "concurrency.jsonl", {})
        measure_concurrency(bed, settings, results, lambda line: None)  # type: ignore[arg-type]
    rows, tenants = concurrency.request_rows(results.records), concurrency.tenant_rows(results.records)
    assert [row.split for row in rows] == [1, 5, 9, 13] and rows[0].request_bytes == 1600
    assert rows[0].seconds == {1: 1.25, 2: 1.5, 4: 2.0} and rows[0].speedup(4) == 2.5
    assert [(t.clients, t.makespan, t.mean, t.samples) for t in tenants] == [
        (count, 3.0, 3.0, 128) for count in (1, 2, 4)
    ]
    table = "\n".join(concurrency.concurrency_table(rows, tenants, settings))
    assert "1.67" in table and "2.50" in table and table.rstrip().splitlines()[-2].endswith("4.00")
    draw_concurrency(rows, tenants, str(tmp_path / "x.png"))


@pytest.mark.parametrize(
    ("last", "expected"), [(38, [1, 13, 26, 38]), (4, [1, 2, 3, 4]), (2, [1, 2]), (1, [1]), (0, [0])]
)
def test_four_splits_that_push_something_down(last: int, expected: list[int]) -> None:
    assert chosen_splits(range(last + 1)) == expected


@pytest.mark.slow
def test_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {flag: tmp_path / f"layers.{flag}" for flag in ("svg", "csv", "json")}
    arguments = ["layers", "--model", "resnet18", "--bs", "2", "--repeats", "1"]
    arguments += ["--figure", str(files["svg"]), "--csv", str(files["csv"]), "--json", str(files["json"])]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "frozen outputs smaller than the input at 7-11 (the paper names 4)" in printed
    found = json.loads(files["json"].read_text())["rows"]
    assert [row["layer"] for row in found] == list(range(1, 15))
    assert found[3] | {"seconds": 0} == {
        "model": "resnet18", "layer": 4, "name": "maxpool", "frozen": True, "output_bytes": 64 * 16 * 16 * 4,
        "input_bytes": 3 * 64 * 64 * 4, "seconds": 0, "memory_bytes": found[3]["memory_bytes"],
    }  # fmt: skip
    assert all(row["seconds"] > 0 and row["memory_bytes"] >= 2 * row["output_bytes"] for row in found)
    assert files["csv"].read_text().count("\n") == 15 and "</svg>" in files["svg"].read_text()


def test_ranges() -> None:
    assert _ranges([3, 4, 5, 9]) == "3-5, 9" and _ranges([]) == "none" and _ranges([1]) == "1"


def test_loose_bed_tells_every_link_its_rate() -> None:
    told: list[float | None] = []
    with LooseBed("a test") as loose:
        loose.set_bandwidth(1e6)
        loose.limit_with(told.append)
        loose.set_bandwidth(None)
        assert told == [1e6, None] and "a test" in loose.describe()
        process = loose.start("client", ["sleep", "60"])
    assert process.poll() is not None


SMALL = Grid(
    models=("resnet18",),
    batches=(16,),
    bandwidths=(40e6,),
    epoch_batches=2,
    least_samples=32,
    least_profile_samples=32,
    repeats=2,
    profile_batches=2,
)


@pytest.mark.slow
@pytest.mark.long
def test_a_small_sweep_without_a_test_bed(forked_tiers: None, tmp_path: Path) -> None:
    """Every split is measured, bytes and times fit the link's rate, and every view can be made of it."""
    results = Results(tmp_path / "sweep.jsonl", {})
    sweep(LooseBed("a test"), SMALL, results, lambda line: None)
    (cell,) = measured_cells(results.records)
    assert cell.times.keys() | cell.bounds.keys() == set(range(12)) and not cell.unfit
    assert cell.best > 0 and cell.tensors.keys() <= {"uint8", "float32"}
    for split, times in cell.times.items():
        # A little of the first frames passes at once, and end frames are no payload.
        assert min(times) > 0.85 * cell.bytes_received[split] * 8 / 40e6
        assert cell.bytes_received[split] == pytest.approx(cell.wire[split], rel=0.05)
    for view in VIEWS.values():
        assert view([cell])
    again = Results(tmp_path / "sweep.jsonl", {})
    sweep(LooseBed("a test"), SMALL, again, lambda line: None)
    assert len(again.records) == len(results.records) + 1  # its conditions


@pytest.mark.long
def test_small_studies_without_a_test_bed(forked_tiers: None, tmp_path: Path) -> None:
    kept = Results(tmp_path / "reuse.jsonl", {})
    settings = ReuseSettings(models=("resnet18",), bs=16, epoch_batches=2, repeats=1)
    measure_reuse(LooseBed("a test"), settings, kept, lambda line: None)
    (row,) = reuse_rows(kept.records)
    assert row.load_split > 0 and 0 < row.load_seconds < row.request_seconds
    beside = Results(tmp_path / "concurrency.jsonl", {})
    few = ConcurrencySettings(models=("resnet18",), repeats=1)
    measure_concurrency(LooseBed("a test"), few, beside, lambda line: None)
    assert len(concurrency.request_rows(beside.records)) == 4
    assert all(t.makespan >= t.mean > 0 for t in concurrency.tenant_rows(beside.records))


def test_layers_of_an_unknown_device() -> None:
    with pytest.raises(UsageError):
        measure_layers(LayersSettings(device="tpu"), lambda line: None)
