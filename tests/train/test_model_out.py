"""The model at the end of a training: whole, in the library's names, of the last and of the best epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.local_job import Silent, open_session, pack_blobs, service_of, trainer_of
from torch import nn

from hapi.api.inference import evaluate, predict_dataset
from hapi.api.model_files import load_model
from hapi.api.models import push
from hapi.data.mount import open_dataset
from hapi.errors import HapiError, UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.server.service import Service
from hapi.train.checkpoints import checkpoint
from hapi.train.outputs.best import BestEpoch


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("out") / "store"
    pack_blobs(store, side=64)
    push("resnet18", f"{store}/pushed", weights="random:9", input_size=64)
    return store


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as running:
        yield running


def trained(service: Service, output: Path, watcher: Silent | None = None, **changes: Any) -> torch.Tensor:
    """Train; the outputs of the session's own tail in eval mode for the samples in their order, float32 [46, 4]."""
    changes = {"output": str(output), "model": "resnet18", **changes}
    with open_session(service, **changes) as session:
        trainer_of(session, watcher, **changes).run()
        session.trained.eval()
        order = np.concatenate(session.batch_ids(0))
        with torch.no_grad():
            outputs = torch.cat([session.trained(features) for features, _ in session.epoch(0)])
        return outputs[np.argsort(order)]


@pytest.mark.long_cases("freeze")
@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [pytest.param("freeze", marks=pytest.mark.slow), 0, pytest.param("auto", marks=pytest.mark.slow)]
)
def test_the_file_is_the_network_that_was_trained(
    service: Service, store: Path, tmp_path: Path, split: Any
) -> None:
    """Frozen layers that ran on the server only are in it, too."""
    outputs = trained(service, tmp_path / "run", split=split)
    model = load_model(tmp_path / "run" / "model.safetensors")
    with open_dataset(f"{store}/blobs") as blobs:
        found = torch.cat([o.logits for o in predict_dataset(model, blobs, 10)])
        assert evaluate(model, blobs).samples == 46
    torch.testing.assert_close(found, outputs, rtol=1e-5, atol=1e-5)
    plain = build(ModelSpec(architecture="resnet18", num_classes=4, input_shape=(3, 64, 64))).module
    plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert model.card.spec.architecture == "resnet18" and model.card.freeze == 12 and model.card.epoch == 2
    assert model.classes == ("0", "1", "2", "3") and set(model.card.metrics or {}) == {"loss", "accuracy"}


@pytest.mark.slow
def test_frozen_layers_come_from_the_server(service: Service, store: Path, tmp_path: Path) -> None:
    trained(service, tmp_path / "run", model="store:pushed", weights="auto", freeze=11, epochs=1)
    state = load_file(tmp_path / "run" / "model.safetensors")
    pushed = build(ModelSpec(architecture="resnet18", weights="random:9", input_shape=(3, 64, 64))).module
    assert torch.equal(state["conv1.weight"], pushed.get_parameter("conv1.weight"))
    assert not torch.equal(state["layer4.1.conv2.weight"], pushed.get_parameter("layer4.1.conv2.weight"))
    assert load_model(tmp_path / "run" / "model.safetensors").card.spec.weights == "random:9"


class Stops(Silent):
    """Ctrl-C at the beginning of the second epoch's third step."""

    def on_step(self, steps: int) -> None:
        if steps == 7:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_training_knows_its_best_epoch(service: Service, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = {"validation": 0.2, "epochs": 3, "lr": 0.3}
    trained(service, whole, **common)
    with pytest.raises(KeyboardInterrupt):
        trained(service, parts, Stops(), **common)
    assert [p.name for p in parts.iterdir() if p.suffix == ".safetensors"] == []
    trained(service, parts, resume=True, **common)
    for name in ("model.safetensors", "best.safetensors"):
        first, second = load_file(whole / name), load_file(parts / name)
        assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    card = load_model(whole / "best.safetensors").card
    assert 1 <= card.epoch <= 3 and "validation_accuracy" in (card.metrics or {})


@pytest.mark.slow
def test_a_training_that_had_ended_without_a_folder_gets_its_model_in_one(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"checkpoint": str(tmp_path / "kept.pt"), "epochs": 1}
    with open_session(service, **kept) as session:
        trainer_of(session, **kept).run()
    again = {**kept, "resume": True, "output": str(tmp_path / "run")}
    with open_session(service, **again) as session:
        assert trainer_of(session, **again).run()["ended"]["how"] == "finished"
    assert load_model(tmp_path / "run" / "model.safetensors", allow_import=True).card.epoch == 1
    assert not (tmp_path / "run" / "best.safetensors").exists()
    assert "best.safetensors is not written: the epochs were trained without --output" in caplog.text


def test_a_model_is_saved_at_any_time(service: Service, tmp_path: Path) -> None:
    with open_session(service) as session:
        trainer = trainer_of(session)
        trainer.save_model(tmp_path / "before.safetensors")
        with pytest.raises(UsageError, match="no best epoch"):
            trainer.save_model(tmp_path / "best.safetensors", best=True)
    assert load_model(tmp_path / "before.safetensors", allow_import=True).card.epoch == 0


def test_the_best_epoch() -> None:
    best, module = BestEpoch(), nn.Linear(1, 1, bias=False)

    def offer(weight: float, **entry: float) -> None:
        with torch.no_grad():
            module.weight.fill_(weight)
        best.offer(entry, module)

    offer(1, loss=3.0, validation_accuracy=0.5, validation_loss=0.7)
    offer(2, loss=2.0, validation_accuracy=0.6, validation_loss=0.9)
    offer(3, loss=1.0, validation_accuracy=0.6, validation_loss=0.8)
    offer(4, loss=0.5, validation_accuracy=0.6, validation_loss=0.8)
    offer(5, loss=0.1, validation_accuracy=0.2, validation_loss=0.1)
    assert best.trained["weight"].item() == 3
    again = BestEpoch()
    again.load_state_dict(best.state_dict())
    assert again.entry == best.entry and torch.equal(again.trained["weight"], best.trained["weight"])
    plain = BestEpoch()
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        with torch.no_grad():
            module.weight.fill_(number)
        plain.offer({"loss": loss}, module)
    assert plain.trained["weight"].item() == 1


@pytest.mark.slow
def test_the_models_are_written_where_the_last_checkpoint_does_not_fit(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise HapiError("no space left")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(HapiError, match="no space left"):
        trained(service, tmp_path / "run", split=0, epochs=1, patience=0)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "best.safetensors",
        "model.safetensors",
    ]
    assert load_model(tmp_path / "run" / "model.safetensors", allow_import=True).card.epoch == 1
