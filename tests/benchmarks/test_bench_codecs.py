"""``benchmarks codecs``: every cut in both types on trained features, resumed, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_tools import served
from support.local_job import COUNT, Silent, pack_blobs, settings_of, trainer_of

from benchmarks.codecs.accuracy import Features, crossed_features, train_head
from benchmarks.codecs.engine import measure_codecs
from benchmarks.codecs.rows import accuracy_table, cut_rows, summary_table, verdict
from benchmarks.codecs.settings import CodecsSettings
from benchmarks.codecs.training import CLASSES, Crops, held_out_crops
from benchmarks.testbed.cells import Results
from hapi.client.session import Session
from hapi.codecs.names import EXACT, LOSSY
from hapi.data.mount import open_dataset
from hapi.data.transforms.pipeline import input_batch
from hapi.models.zoo.build import ModelSpec, build


def figures(ratio: float) -> list[dict[str, Any]]:
    rates = {"encode_rate": 1e9, "decode_rate": 2e9}
    return [{"name": name, "ratio": ratio if name == "planes" else 1.0, **rates} for name in EXACT]


def cut(number: int, dtype: str, zeros: float, ratio: float) -> dict[str, Any]:
    return {
        "kind": "cut", "model": "m", "cut": number, "name": f"layer{number}", "dtype": dtype, "zeros": zeros,
        "nbytes": 4096, "figures": figures(ratio),
    }  # fmt: skip


def test_the_verdict_names_cuts_below_a_goal() -> None:
    records = [cut(1, "float32", 0.0, 1.2), cut(2, "float32", 0.1, 1.0), cut(3, "bfloat16", 0.95, 9.0)]
    rows = cut_rows([*records, cut(2, "float32", 0.1, 1.12)])
    lines = list(verdict(rows))
    assert lines[0] == "dense float32: 1.12x to 1.20x; 1 of 2 cuts reach 1.16x"
    assert "m 2 (layer2)" in lines[1] and "1.120x" in lines[1]
    assert lines[2:] == ["90% zeros and more: 9.00x to 9.00x; 1 of 1 cuts reach 8.0x"]
    assert summary_table(rows)[2] == (
        "| m | under 30% zeros | float32 | 2 | 1.12 1.16 1.20 | 1.00 / 2.00 | 7.9 7.9 7.9 |"
    )


def test_accuracies_are_compared_seed_by_seed() -> None:
    found = {("none", 0): 0.8, ("none", 1): 0.9, ("int8", 0): 0.79, ("int8", 1): 0.92}
    records = [
        {"kind": "accuracy", "cut": "c", "codec": codec, "seed": seed, "accuracy": value}
        for (codec, seed), value in found.items()
    ]
    assert accuracy_table(records)[-1] == "| c | int8 | 2 | 85.50 % | 9.19 | +0.50, -1.00 to +2.00 |"


def test_held_out_crops_are_none_of_the_training() -> None:
    inputs, labels = held_out_crops(64, 48)
    again, _ = held_out_crops(64, 48)
    assert torch.equal(inputs, again) and inputs.shape == (48, 3, 64, 64)
    assert set(labels.tolist()) <= set(range(CLASSES)) and len(set(labels.tolist())) > CLASSES // 2
    trained, _ = Crops(64, 1).draw(48)
    assert not any(torch.equal(a, b) for a in inputs for b in trained)


@pytest.mark.slow
def test_every_cut_is_measured_once(tmp_path: Path) -> None:
    settings = CodecsSettings(models=("resnet18",), steps=2, repeats=1)
    path = tmp_path / "codecs.jsonl"

    def measured() -> tuple[Any, list[str]]:
        told: list[str] = []
        results = Results(path, {"grid": settings.measuring()})
        return measure_codecs(settings, results, told.append), told

    result, told = measured()
    assert any("2 steps of 16 crops" in line for line in told)
    document = json.loads(json.dumps(result.to_json()))
    rows = document["rows"]
    cuts = sorted({row["cut"] for row in rows})
    assert cuts == list(range(1, cuts[-1] + 1)) and len(rows) == 2 * len(cuts)
    assert all(set(row["figures"]) == set(EXACT) for row in rows)
    assert all(figure["ratio"] >= 1 for row in rows for figure in row["figures"].values())
    relu = next(row for row in rows if row["name"] == "relu" and row["dtype"] == "float32")
    assert 0.3 < relu["zeros"] < 0.7 and relu["figures"]["zeros"]["ratio"] > 1.3
    assert "trained from random weights for 2 steps" in document["sources"]["resnet18"]

    lines = path.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "model"]
    path.write_text("\n".join(kept[:-3]) + "\n")  # as a kill leaves it
    again, told = measured()
    assert not any("% held-out," in line for line in told), "trained again"
    measured_again = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(record["kind"] == "cut" for record in measured_again) == len(rows)
    ratios = [[f["ratio"] for f in row["figures"].values()] for row in rows]
    assert ratios == [[f["ratio"] for f in row["figures"].values()] for row in again.to_json()["rows"]]
    assert measured()[1] == ["resnet18: is measured"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", LOSSY)
def test_heads_on_rounded_features_are_those_of_a_job_through_the_wire(tmp_path: Path, codec: str) -> None:
    split, freeze, batch = 3, 12, 16
    pack_blobs(tmp_path / "store")
    spec = ModelSpec(architecture="resnet18", num_classes=4, weights="random:0", input_shape=(3, 32, 32))
    with open_dataset(str(tmp_path / "store" / "blobs")) as reader:
        ids = torch.arange(COUNT).numpy()
        inputs = input_batch(reader.read(ids), reader.dataset.layout, None)
        labels = torch.from_numpy(reader.dataset.labels(ids)).long()
    crossed = crossed_features(build(spec), split, freeze, iter(inputs.split(batch)), (codec,))
    optimizer = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    _, losses = train_head(spec, freeze, Features(crossed[codec], labels), 2, batch, optimizer)

    found: list[float] = []
    with served(tmp_path / "store", cos_batch=batch, threads=1) as server:
        changes = {
            "split": split, "wire_codec": codec, "server": (f"http://127.0.0.1:{server.port}",), "bs": batch,
            "model": "resnet18", "request_size": batch, "drop_last": True, "shuffle": "full", "seed": 0,
            "optimizer": "sgd", **optimizer,
        }  # fmt: skip
        with Session.open(settings_of(**changes)) as session:
            watcher = Losses(found)
            trainer_of(session, watcher, **changes).run()
    assert found == losses


class Losses(Silent):
    """Remembers the loss of each step."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self._losses = losses

    def step_done(self, step: Any) -> None:
        self._losses.append(float(step.loss))
