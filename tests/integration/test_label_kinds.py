"""Several labels for a sample, and numbers as labels: the same at every split, from cache and store, and compared."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_job import Interrupting, open_session, service_of, trainer_of
from torch import nn

from hapi.api.model_files import load_model
from hapi.cli.main import main
from hapi.data.dataset import find_dataset
from hapi.data.epoch_order import HOLDOUT_EPOCH, epoch_sequence
from hapi.data.mount import open_dataset
from hapi.errors import DataError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.server.service import Service
from hapi.store.open import open_store
from hapi.train.steps.gradient_step import step_seed
from hapi.wire.labels import LabelKind

COUNT = 40
KINDS: tuple[LabelKind, ...] = ("multi", "regression")


def labels_of(kind: LabelKind) -> np.ndarray:
    draws = np.random.default_rng(3).normal(size=(COUNT, 3)).astype(np.float32)
    return draws if kind == "regression" else (draws > 0).astype(np.float32)


def balance(labels: np.ndarray) -> torch.Tensor:
    count = labels.sum(0)
    return torch.tensor((len(labels) - count) / count, dtype=torch.float32)


def training_labels(kind: LabelKind, held_out: float) -> np.ndarray:
    """Without the share that a training holds out."""
    order = epoch_sequence(0, HOLDOUT_EPOCH, COUNT)
    return labels_of(kind)[order[round(COUNT * held_out) :]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        np.savez(folder / "x.npz", x=np.random.default_rng(0).normal(size=(COUNT, 3, 32, 32)).astype(np.float32),
                 y=np.zeros(COUNT, np.int64))  # fmt: skip
        source = open_source(str(folder / "x.npz"))
        source.labels, source.label_kind, source.classes = labels_of(kind), kind, ("left", "right", "up")
        pack(source, open_store(str(folder / "store")), kind, PackOptions(shard_bytes=100_000))
    return folder / "store"


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as service:
        yield service


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_keeps_them(store: Path, kind: LabelKind) -> None:
    dataset = find_dataset(open_store(str(store)), kind)
    assert dataset.manifest.label_kind == kind and len(dataset.shards) > 1
    assert dataset.labels(np.arange(COUNT)).tolist() == labels_of(kind).tolist()
    with open_dataset(f"{store}/{kind}") as reader:
        ids = reader.sequence(seed=1, epoch=0)
        assert np.array_equal(np.concatenate([batch.labels for batch in reader]), labels_of(kind)[ids])


def test_an_index_of_another_kind_than_the_manifest_says(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path, dirs_exist_ok=True)
    manifest = find_dataset(open_store(str(tmp_path)), "multi").manifest
    wrong = replace(manifest, label_kind="single").to_bytes()
    (tmp_path / "datasets" / "multi" / "manifest.json").write_bytes(wrong)
    with pytest.raises(DataError, match="its labels are not single labels, as the manifest says"):
        find_dataset(open_store(str(tmp_path)), "multi")


@pytest.mark.slow_except("0-regression", "4-regression")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [0, 4, "freeze"])
def test_every_split_brings_the_same_labels(service: Service, kind: LabelKind, split: int | str) -> None:
    with open_session(service, dataset=kind, split=split, recheck=COUNT) as session:
        assert session.label_kind == kind
        assert session.trained(next(iter(session.epoch(0)))[0]).shape[1] == 3
        ids = np.concatenate(session.batch_ids(0))
        batches = [labels for _, labels in session.epoch(0)]
        assert batches[0].dtype == torch.float32 and batches[0].shape == (10, 3)
        assert np.array_equal(torch.cat(batches).numpy(), labels_of(kind)[ids])
        assert session.recheck is not None and session.recheck.compared >= COUNT


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_keeps_them(service: Service, kind: LabelKind, features: bool, tmp_path: Path) -> None:
    for epoch in range(2):
        with open_session(service, dataset=kind, split=0, cache="auto", cache_dir=str(tmp_path)) as session:
            session.keeping.fills = features
            ids = np.concatenate(session.batch_ids(epoch))
            found = torch.cat([labels for _, labels in session.epoch(epoch)])
            assert np.array_equal(found.numpy(), labels_of(kind)[ids])
            assert session.last.traffic.cached_samples == (0 if features else epoch * COUNT)
            assert session.last.kept.hits == (epoch * COUNT if features else 0)


@pytest.mark.slow_except("regression-plain3-changes3", "multi-plain1-changes1")
@pytest.mark.parametrize(
    ("kind", "plain", "changes"),
    [
        ("multi", nn.BCEWithLogitsLoss(), {}),
        (
            "multi",
            nn.BCEWithLogitsLoss(pos_weight=balance(training_labels("multi", 0.25))),
            {"class_weights": "balanced"},
        ),
        ("regression", nn.MSELoss(), {}),
        ("regression", nn.HuberLoss(delta=0.5), {"loss": "huber", "huber_delta": 0.5}),
        ("regression", nn.L1Loss(), {"loss": "l1"}),
    ],
)
def test_the_trainer_is_the_plain_loop(
    service: Service, kind: LabelKind, plain: nn.Module, changes: dict[str, Any]
) -> None:
    job = {"dataset": kind, "validation": 0.25, **changes}
    with open_session(service, **job) as session:
        module, losses = session.trained, []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        for epoch in range(2):
            total = 0.0
            for batch, (features, labels) in enumerate(session.epoch(epoch)):
                torch.manual_seed(step_seed(0, epoch, batch))
                loss = plain(module(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(labels)
            losses.append(total / 30)
    with open_session(service, **job) as session:
        report = trainer_of(session, **job).run()
    assert [entry["loss"] for entry in report["epochs"]] == losses
    entry = report["epochs"][-1]
    assert (entry["accuracy"] is None) == (kind == "regression")
    names = {"multi": {"accuracy", "f1", "auroc"}, "regression": {"mae", "rmse"}}[kind]
    assert names <= {name.removeprefix("validation_") for name in entry}
    details = entry["validation_details"]
    assert details["confusion"] is None and len(details["worst"]) == 10
    assert len(details["classes"]) == (3 if kind == "multi" else 0)


@pytest.mark.slow_except("multi-2")
@pytest.mark.parametrize(("kind", "at"), [("multi", 2), ("regression", 4)])
def test_a_resumed_training_is_the_same(service: Service, kind: LabelKind, at: int, tmp_path: Path) -> None:
    job: dict[str, Any] = {"dataset": kind, "validation": 0.25, "feature_mixup": 0.3, "split": 4}
    with open_session(service, **job) as session:
        whole = trainer_of(session, **job).run()
    for watcher in (Interrupting(at), None):
        kept = {**job, "checkpoint": str(tmp_path / "c.pt"), "resume": True}
        with open_session(service, **kept) as session, suppress(KeyboardInterrupt):
            report = trainer_of(session, watcher, **kept).run()
    for entry, expected in zip(report["epochs"], whole["epochs"], strict=True):
        for name in ("loss", "accuracy", "validation_loss", "samples"):
            assert entry[name] == expected[name]
    assert report["epochs"][-1]["validation_details"] == whole["epochs"][-1]["validation_details"]


def test_the_server_tells_the_samples_of_each_class(service: Service) -> None:
    with open_session(service, dataset="multi") as session:
        counts = session.job_context.description.label_counts
    assert counts == tuple(labels_of("multi").sum(0).astype(int).tolist())
    with open_session(service, dataset="regression") as session:
        assert session.job_context.description.label_counts == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_file_knows_what_its_outputs_mean(
    service: Service, store: Path, kind: LabelKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, Any] = {"dataset": kind, "validation": kind, "epochs": 1, "output": str(tmp_path)}
    with open_session(service, **job) as session:
        entry = trainer_of(session, **job).run()["epochs"][0]
    model, address = str(tmp_path / "model.safetensors"), f"{store}/{kind}"
    card = load_model(model, allow_import=True).card
    measured = {n.removeprefix("validation_") for n in card.metrics or {} if n.startswith("validation_")}
    assert card.label_kind == kind
    assert measured == {"loss", *(("mae", "rmse") if kind == "regression" else ("accuracy", "f1", "auroc"))}
    allowed = ("--allow-model", card.spec.architecture)
    files = tmp_path / "e.json", tmp_path / "p.csv"
    assert main(["evaluate", model, "--dataset", address, "--json", str(files[0]), *allowed]) == 0
    found = json.loads(files[0].read_text())
    for name in measured:
        assert found[name] == pytest.approx(entry[f"validation_{name}"], rel=1e-5)
    assert [sample["id"] for sample in found["worst"]] == [
        s["id"] for s in entry["validation_details"]["worst"]
    ]
    assert main(["predict", model, address, "--csv", str(files[1]), "--top", "2", *allowed]) == 0
    rows = list(csv.DictReader(files[1].open()))
    columns = ["left", "right", "up"] if kind == "regression" else ["predicted", "left", "right", "up"]
    assert len(rows) == COUNT and list(rows[0]) == ["sample", "label", *columns]
    said = "mean absolute error: left " if kind == "regression" else " of 40 as labelled"
    assert said in capsys.readouterr().out
    other = "regression" if kind == "multi" else "multi"
    assert main(["evaluate", model, "--dataset", f"{store}/{other}", *allowed]) == 2
    assert "the model was trained for" in capsys.readouterr().err
