"""``--init-from``: a new training begins with an old one's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.local_job import SMALL_MODEL, open_session, trainer_of

from hapi.api.models import push
from hapi.client.session import Session
from hapi.config.settings import load
from hapi.errors import ModelError, UsageError
from hapi.models.model_file import read_card, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.init_from import started
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import LoopbackTransport

SHAPE = (3, 64, 64)
HEAD = "classifier.1.weight"


@pytest.fixture(scope="module")
def old(small_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training with freeze 10."""
    folder = tmp_path_factory.mktemp("old")
    changes = {"model": SMALL_MODEL, "freeze": 10, "bs": 8, "epochs": 1, "output": str(folder), "seed": 4}
    with open_session(small_service, **changes) as session:
        trainer_of(session, **changes).run()
    return folder


def settings_from(path: Path, **changes: Any) -> TrainSettings:
    job = {
        "dataset": "blobs",
        "bs": 8,
        "epochs": 1,
        "threads": 1,
        "split": "freeze",
        "init_from": str(path),
        **changes,
    }
    return started(load(TrainSettings, None, job).value, has_model="model" in changes)


def begun(
    small_service: Service, settings: TrainSettings, output: Path
) -> tuple[dict[str, torch.Tensor], Session]:
    """The network at the beginning of a training, which then is run to its end."""
    transport = LoopbackTransport(loopback_handler(small_service))
    with Session.open(settings, transports=[transport]) as session:
        trainer = Trainer(session, settings)
        trainer.save_model(output)
        assert len(trainer.run()["epochs"]) == 1
        return load_file(output), session


def same(found: dict[str, torch.Tensor], file: Path, but: str = "none") -> bool:
    own = load_file(file)
    return found.keys() == own.keys() and all(
        torch.equal(found[name], own[name]) for name in own if not name.startswith(but)
    )


@pytest.mark.slow
def test_it_begins_where_the_old_one_ended(small_service: Service, old: Path, tmp_path: Path) -> None:
    """From a model file and a checkpoint, also with an earlier freeze; the server's layers are the zoo's still."""
    for file, freeze in (
        ("model.safetensors", None),
        ("checkpoint.pt", 5),
        ("model.safetensors", "features.2"),
    ):
        settings = settings_from(old / file, freeze=freeze, lr=0.002)
        assert settings.model == SMALL_MODEL and settings.weights == "random:4"
        found, session = begun(small_service, settings, tmp_path / "new.safetensors")
        assert same(found, old / "model.safetensors") and session.job_context.client_model.pushed is None
        assert session.job_context.freeze == {None: 10, 5: 5, "features.2": 3}[freeze]
    assert read_card(tmp_path / "new.safetensors").freeze == 3


@pytest.mark.slow
def test_other_classes_have_a_new_head(
    small_service: Service, old: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_from(old / "model.safetensors", dataset="three", seed=7)
    found, _ = begun(small_service, settings, tmp_path / "new.safetensors")
    assert same(found | {HEAD: torch.empty(0)}, old / "model.safetensors", but="classifier.1.")
    fresh = build(
        ModelSpec(architecture=SMALL_MODEL, num_classes=3, input_shape=SHAPE, head_seed=7)
    ).module.state_dict()
    assert torch.equal(found[HEAD], fresh[HEAD])
    (line,) = [r.getMessage() for r in caplog.records if "--init-from" in r.getMessage()]
    assert line.endswith("the head (classifier.1) is new: 3 classes now, 4 there")


@pytest.mark.slow
def test_a_deeper_freeze_needs_the_layers_on_the_server(
    small_service: Service, small_store: Path, old: Path, tmp_path: Path
) -> None:
    file, server = old / "model.safetensors", {"server": ["http://127.0.0.1:1"]}
    with pytest.raises(
        UsageError, match=r"layers 11 to 12 were trained.*'hapi push .*model.safetensors STORE/NAME'"
    ):
        settings_from(file, freeze=12, **server)
    with pytest.raises(
        UsageError, match=r"'hapi export .*checkpoint.pt --output model.safetensors', 'hapi push"
    ):
        settings_from(old / "checkpoint.pt", freeze=12, store=str(small_store))
    settings = settings_from(file, freeze=12, store=str(small_store))  # pushed by the job itself
    found, session = begun(small_service, settings, tmp_path / "new.safetensors")
    assert same(found, file) and str(session.job_context.client_model.pushed).startswith("file-")
    push(str(file), f"{small_store}/tuned")
    found, _ = begun(
        small_service,
        settings_from(file, freeze=12, model="store:tuned", **server),
        tmp_path / "again.safetensors",
    )
    assert same(found, file)


@pytest.mark.slow
def test_from_a_training_of_a_pushed_model(small_service: Service, tmp_path: Path) -> None:
    changes = {
        "model": "store:pushed",
        "weights": "auto",
        "freeze": 10,
        "epochs": 1,
        "output": str(tmp_path / "run"),
    }
    with open_session(small_service, **changes) as session:
        trainer_of(session, **changes).run()
    settings = settings_from(tmp_path / "run" / "model.safetensors")
    assert settings.model == "store:pushed@1"
    found, _ = begun(small_service, settings, tmp_path / "new.safetensors")
    assert same(found, tmp_path / "run" / "model.safetensors")


@pytest.mark.slow
def test_networks_that_do_not_fit(small_service: Service, old: Path, tmp_path: Path) -> None:
    file = old / "model.safetensors"
    with pytest.raises(
        UsageError, match=r"--model resnet18: --init-from .* is a squeezenet1_1; leave --model out"
    ):
        settings_from(file, model="resnet18")
    with pytest.raises(UsageError, match=r"--freeze: .*nothing.*hapi layers"):
        settings_from(file, freeze="nothing")
    with pytest.raises(ModelError, match=r"none\.safetensors does not exist"):
        settings_from(tmp_path / "none.safetensors")
    wrong = load_file(file)
    wrong["features.0.weight"] += 1
    write_model(tmp_path / "wrong.safetensors", wrong, read_card(file))
    with pytest.raises(UsageError, match=r"layers 1 to 10 are not those of random:4.*hapi push"):
        begun(small_service, settings_from(tmp_path / "wrong.safetensors"), tmp_path / "new.safetensors")
    settings = replace(settings_from(file), model="resnet18", weights="random:0", blocks=(), freeze=12)
    with pytest.raises(UsageError, match=r"is a squeezenet1_1, --model resnet18 is a resnet18"):
        begun(small_service, settings, tmp_path / "new.safetensors")
