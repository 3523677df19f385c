"""The benchmark of stored models: its models, its cells, its tables and goals, and small real runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.models.clients import why_missing
from benchmarks.models.content import checksums, filled, touched
from benchmarks.models.engine import measure
from benchmarks.models.figure import draw
from benchmarks.models.pages import make_cold, make_warm, resident
from benchmarks.models.rows import goals_of, left_out, rows_of, table
from benchmarks.models.settings import (
    COLD,
    GOALS,
    HAPI,
    HTTP,
    LOCAL,
    ON_DEMAND,
    SAFETENSORS,
    STAGES,
    STORE,
    SWIFT,
    TORCH,
    WARM,
    ModelCell,
    ModelsSettings,
    goal_groups,
    groups_of,
    way_of,
)  # fmt: skip
from benchmarks.models.shapes import WHOLE, shape_of, synthetic, tensors_of
from benchmarks.testbed.cells import Results
from benchmarks.testbed.loose import LooseBed
from hapi.errors import UsageError


@pytest.mark.parametrize(
    ("name", "nbytes", "layers"),
    [("vgg19", 574.7e6, 19), ("bert", 2.985e9, 34), ("10x1GB", 1e9, 10), ("1000x4GB", 4e9, 1000)],
)
def test_models_have_the_papers_sizes(name: str, nbytes: float, layers: int) -> None:
    shape = shape_of(name)
    assert shape.nbytes == pytest.approx(nbytes, rel=2e-3) and len(shape.layers) == layers
    names = [tensor for tensor, _ in tensors_of(shape.layers)]
    assert len(set(names)) == len(names)


def test_parts_have_their_share_of_the_bytes() -> None:
    for name, part, share in (
        ("vgg19", "prefix", 0.14), ("bert", "prefix", 0.346), ("10x1GB", "50%", 0.5), ("10x1GB", "25%", 0.2),
        ("100x1GB", "25% spread", 0.25), ("vgg19", WHOLE, 1.0),
    ):  # fmt: skip
        shape = shape_of(name)
        assert sum(layer.nbytes for layer in shape.part(part)) / shape.nbytes == pytest.approx(
            share, abs=0.01
        )
    spread = [layer.name for layer in shape_of("100x1GB").part("25% spread")]
    assert spread[:3] == ["layer1", "layer5", "layer9"] and len(spread) == 25


def test_sizes_of_generated_layers_differ_as_told() -> None:
    sizes = [layer.nbytes for layer in synthetic("x", 10**8, 50, 600_000).layers]
    assert sum(sizes) == pytest.approx(10**8, rel=1e-3)
    assert max(sizes) - min(sizes) == pytest.approx(600_000, rel=0.02)  # rows are whole
    varied = [layer.nbytes for layer in shape_of("100x400MB~30%").layers]
    assert min(varied) == pytest.approx(0.7 * 4e6, rel=1e-2) and max(varied) == pytest.approx(
        1.3 * 4e6, rel=1e-2
    )


@pytest.mark.parametrize("name", ["vgg16", "0x1GB", "10x1KB", "1000x1MB", "10x1GB~"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="model"):
        shape_of(name)


def test_content_is_a_function_of_the_seed() -> None:
    layers = synthetic("x", 40_000, 2, 0).layers
    first, second, other = (checksums(filled(layers, seed)) for seed in (1, 1, 2))
    assert first == second and not set(first.values()) & set(other.values()) and len(set(first.values())) == 4
    assert set(touched(layers)) == set(first)


def test_files_leave_the_page_cache_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    make_warm([path])
    assert resident([path]) == 1.0
    assert make_cold([path]) < 0.01 and resident([path]) < 0.01
    make_warm([path])
    assert resident([path]) == 1.0 and resident([]) == 0.0


def test_cells_are_what_the_figures_need() -> None:
    settings = ModelsSettings()
    cells = settings.cells()
    assert len({cell.key for cell in cells}) == len(cells)
    loads = [cell for cell in cells if cell.shape == "vgg19" and cell.part == "prefix"]
    local = {(cell.way, cell.pages) for cell in loads if cell.place == LOCAL}
    assert local >= {(TORCH, COLD), (HAPI, WARM), ("h5py", COLD)}
    assert {cell.place for cell in loads} == {LOCAL, HTTP, SWIFT}
    assert not any(cell.part == STORE and cell.place == HTTP for cell in cells)
    assert not any(cell.part == "prefix" for cell in cells if "x" in cell.shape)
    # What is read whole for any part is not read so for every part, and Swift gets no large models.
    torch_parts = {cell.part for cell in cells if cell.way == TORCH and cell.shape == "100x1GB"}
    assert torch_parts == {STORE, "25%", WHOLE}
    assert {cell.part for cell in cells if cell.shape == "100x4GB"} == {STORE, "25%", WHOLE}
    assert {cell.shape for cell in cells if cell.place == SWIFT and "GB" in cell.shape} == {"10x1GB"}
    assert {cell.clients for cell in cells if cell.shape == "10x512MB"} == {1, 2, 4, 8}
    assert {cell.way for cell in cells if cell.part == STAGES} == {HAPI, ON_DEMAND}
    for group in groups_of(cells):
        assert len({(c.shape, c.place, c.clients, way_of(c.way).written_by) for c in group}) == 1
    some = replace(settings, quick=True, ways=(HAPI,), places=(LOCAL,), figures=(9,), clients=(3,))
    assert {(cell.shape, cell.clients) for cell in some.cells()} == {("10x64MB", 3)}
    assert all(cell.group == GOALS for group in goal_groups() for cell in group)


def test_models_and_loads_can_be_chosen() -> None:
    some = ModelsSettings(ways=(HAPI,), places=(LOCAL,), shapes=("10x256MB", "100x1GB"), loads=(WHOLE,))
    found = {(cell.shape, cell.part, cell.pages) for cell in some.cells()}
    both = {(part, pages) for part, pages in ((STORE, WARM), (WHOLE, WARM), (WHOLE, COLD))}
    assert found == {
        ("10x256MB", STAGES, WARM), *((shape, *rest) for shape in ("10x256MB", "100x1GB") for rest in both)
    }  # fmt: skip
    with pytest.raises(UsageError, match="no cell is left"):
        ModelsSettings(figures=(8,), shapes=("10x1GB",)).cells()
    with pytest.raises(UsageError, match=r"--model 10x3GB: expected one of .*vgg19"):
        ModelsSettings(shapes=("10x3GB",)).cells()
    with pytest.raises(UsageError, match=r"--load nope: expected one of .*25%"):
        ModelsSettings(loads=("25%", "nope")).cells()


def record(way: str, part: str, seconds: list[float], **changes: Any) -> dict[str, Any]:
    fields = {name: changes.pop(name) for name in ModelCell.__dataclass_fields__ if name in changes}
    cell = ModelCell(**{"shape": "vgg19", "way": way, "part": part, **fields})
    moved = {"read": 101.0, "disk": 120.0, "network": 100.5}
    return {
        "kind": "cell", "cell": cell.key, **cell.to_json(), "seconds": seconds, "slowest": seconds, "first": 9.0,
        "bytes": 100, "moved": moved, **changes,
    }  # fmt: skip


def test_goals_are_pairs_of_rounds() -> None:
    goal = {"group": GOALS}
    records = [
        record(SAFETENSORS, WHOLE, [1.0, 4.0, 3.0], **goal),
        record(HAPI, WHOLE, [1.0, 2.0, 4.0], **goal),
        record(TORCH, "prefix", [10.0], **goal),
        record(HAPI, "prefix", [0.2], **goal),
        record(TORCH, "prefix", [10.0], pages=COLD, **goal),
        record(HAPI, "prefix", [2.0], pages=COLD, **goal),
        record(HAPI, WHOLE, [0.5], place=HTTP, bytes=2 * 10**9, moved={"network": 2e9}, **goal),
    ]
    found = {goal.name: goal for goal in goals_of(records)}
    values = [(goal.value, goal.reached) for goal in found.values()]
    assert values == [(1.0, True), (50.0, True), (5.0, False), (4.0, True), (1.2, False)]
    text = "\n".join(table(records))
    assert "speed over torch.save/load's, vgg19, prefix cold at least 8: 5, missed" in text
    assert goals_of([record(HAPI, WHOLE, [1.0])]) == []


@pytest.mark.slow
def test_tables_and_figures_show_what_was_measured(tmp_path: Path) -> None:
    records = [
        record(HAPI, STORE, [1.0, 1.5, 1.2]),
        record(HAPI, WHOLE, [0.2]),
        record(HAPI, WHOLE, [0.3], pages=COLD),
        record(ON_DEMAND, WHOLE, [0.9]),
        record(TORCH, WHOLE, [7.0]),
        record(HAPI, WHOLE, [0.5], place=HTTP),
        record(HAPI, STAGES, [0.3], shape="10x1GB", stages={"memory": 0.1, "read": 0.2}),
        {"kind": "missing", "way": "h5py", "why": "no module"},
        {"kind": "failed", "cell": "a/b", "why": "ended"},
    ]
    records[-3] |= {"cell": "stages"}
    lines = table(records)
    text = "\n".join(lines)
    assert "DStore's Figure 8: VGG19" in text and "vgg19 (0.575 GB), http" in text
    assert any(line.split() == ["Hapi", "1.20", "0.2000", "0.3000", "1.2000"] for line in lines)
    assert "Hapi, one by one: memory 0.1000, read 0.2000" in text
    assert left_out(records) == ["h5py is left out: no module", "a/b failed: ended"]
    rows = rows_of(records)
    assert [row.moved for row in rows] == [None, 1.01, 1.2, 1.01, None, 1.005, None]
    draw(rows, str(tmp_path / "found.svg"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found-6.svg", "found-8.svg"]
    assert "torch.save/load" in (tmp_path / "found-8.svg").read_text()
    assert table([]) == ["nothing was measured yet"]
    with pytest.raises(UsageError, match="nothing was measured"):
        draw([], "x.svg")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--way pickle", "expected one of hapi"),
        ("--place moon", "--place moon: expected one of local"),
        ("--page 3", "--page: expected 4"),
        ("--clients 0", "--clients: expected 1"),
        ("--limit 1ms", "--limit"),
        ("--cell-time 0", "--cell-time"),
        ("--figure x.gif", "must end in"),
    ],
)
def test_wrong_flags(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *flags.split(), "--results", str(tmp_path / "found.jsonl")]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.jsonl"
    path.write_text(json.dumps(record(HAPI, WHOLE, [0.2])) + "\n")
    document = tmp_path / "found.json"
    assert main(["models", "--view", "--results", str(path), "--json", str(document)]) == 0
    assert "vgg19" in capsys.readouterr().out
    assert json.loads(document.read_text())["rows"][0]["bytes_per_second"] == 500


def test_a_missing_package_is_told_and_no_error() -> None:
    gone = replace(way_of("h5py"), needs="import no_such_package")  # its process imports nothing else
    assert "no_such_package" in (why_missing(gone, ()) or "") and why_missing(way_of(TORCH), ()) is None


def cells_of(ways: tuple[str, ...], parts: tuple[str, ...], **more: Any) -> list[ModelCell]:
    return [ModelCell(shape="3x1MB", way=way, part=part, **more) for way in ways for part in parts]


def measured(
    tmp_path: Path, cells: list[ModelCell], rounds: int = 1, cell_time: float = 120.0
) -> tuple[list[dict[str, Any]], list[str]]:
    results, said = Results(tmp_path / "found.jsonl", {}), list[str]()
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    settings = ModelsSettings(rounds=rounds, folder=folder, cell_time=cell_time)
    measure(LooseBed("test"), groups_of(cells), settings, results, said.append)
    assert not list(folder.iterdir())
    return results.records, said


@pytest.mark.slow
def test_models_are_stored_and_loaded(tmp_path: Path, forked_tiers: None) -> None:
    cells = cells_of((HAPI, ON_DEMAND, TORCH, SAFETENSORS), (WHOLE, "50%"))
    cells += (
        cells_of((HAPI, TORCH), (STORE,))
        + cells_of((HAPI,), (WHOLE,), pages=COLD)
        + cells_of((HAPI,), (STAGES,))
    )
    records, said = measured(tmp_path, cells)
    found = {r["cell"]: r for r in records if r["kind"] == "cell"}
    assert set(found) == {cell.key for cell in cells}, said
    whole = found["3x1MB/local/hapi/100%/warm/1"]
    assert whole["bytes"] == shape_of("3x1MB").nbytes and whole["resident"] == [1.0]
    assert 1.0 <= whole["moved"]["read"] / whole["bytes"] < 1.02
    assert found["3x1MB/local/hapi/100%/cold/1"]["resident"] == [0.0]
    assert set(found["3x1MB/local/hapi/stages/warm/1"]["stages"]) >= {"memory", "read", "check"}
    _, said = measured(tmp_path, cells)
    assert said == ["0 cells to measure"]


@pytest.mark.slow
def test_clients_load_each_others_models_from_a_server(tmp_path: Path, forked_tiers: None) -> None:
    cells = cells_of((HAPI, SAFETENSORS), (WHOLE,), place=HTTP, clients=2)
    records, said = measured(tmp_path, cells)
    found = [r for r in records if r["kind"] == "cell"]
    assert len(found) == 2, said
    assert all(1.0 <= r["moved"]["network"] / r["bytes"] < 1.05 for r in found if r["way"] == HAPI)


@pytest.mark.slow
def test_a_way_that_fails_is_recorded_and_the_others_go_on(
    tmp_path: Path, forked_tiers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.models.engine.why_missing", lambda way, peers: None)
    cells = cells_of(("fastsafetensors", SAFETENSORS), (WHOLE,))
    records, said = measured(tmp_path, cells)
    assert [r["cell"] for r in records if r["kind"] == "cell"] == [cells[1].key]
    failed = [r for r in records if r["kind"] == "failed"]
    assert [r["cell"] for r in failed] == [cells[0].key] and "fastsafetensors" in failed[0]["why"], said


@pytest.mark.slow
def test_slow_cells_get_fewer_rounds_and_warm_ones_come_first(tmp_path: Path, forked_tiers: None) -> None:
    """One round counts whatever it takes. Files that a cold load has dropped need not be read for a warm one."""
    cells = [
        *cells_of((HAPI,), (WHOLE,), pages=COLD),
        *cells_of((HAPI,), (STORE, WHOLE)),
    ]
    records, said = measured(tmp_path, cells, rounds=1000, cell_time=0.0)
    found = [r for r in records if r["kind"] == "cell"]
    assert [(r["part"], r["pages"]) for r in found] == [(STORE, WARM), (WHOLE, WARM), (WHOLE, COLD)], said
    assert {len(r["seconds"]) for r in found} == {1}
