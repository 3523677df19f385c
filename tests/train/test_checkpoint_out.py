"""The whole network of a checkpoint: its frozen layers come from the zoo, a file, a store or a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.http_tools import served
from support.local_job import SMALL_MODEL, Silent, open_session, trainer_of

from hapi.api.export import export
from hapi.api.model_files import FrozenSource, load_model
from hapi.api.models import push
from hapi.errors import ModelError, UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.server.service import Service

SHAPE = (3, 64, 64)


def trained(small_service: Service, output: Path, watcher: Silent | None = None, **changes: Any) -> Path:
    """Train, with the run's folder as output; its checkpoint."""
    changes = {"model": SMALL_MODEL, "freeze": 10, "bs": 8, "epochs": 2, "output": str(output), **changes}
    with open_session(small_service, **changes) as session:
        trainer_of(session, watcher, **changes).run()
    return output / "checkpoint.pt"


def same(found: dict[str, torch.Tensor], expected: Path) -> bool:
    own = load_file(expected)
    return found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.slow
def test_frozen_layers_of_the_zoo(small_service: Service, tmp_path: Path) -> None:
    """The last and the best epoch's network, as the training itself wrote them."""
    checkpoint = trained(small_service, tmp_path / "run", lr=0.02, validation=0.25)
    for best, name in ((False, "model.safetensors"), (True, "best.safetensors")):
        export(checkpoint, tmp_path / name, best=best)
        assert same(load_file(tmp_path / name), tmp_path / "run" / name)
        assert load_model(tmp_path / name).card == load_model(tmp_path / "run" / name).card
        assert load_model(checkpoint, best=best).card == load_model(tmp_path / name).card


class Stops(Silent):
    """Ctrl-C in the middle of the first epoch."""

    def on_step(self, steps: int) -> None:
        if steps == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_training_has_a_network_too(small_service: Service, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trained(small_service, tmp_path / "run", Stops())
    model = load_model(tmp_path / "run" / "checkpoint.pt")
    assert model.card.epoch == 0 and model.classes == ("0", "1", "2", "3")
    with pytest.raises(UsageError, match="no best epoch"):
        load_model(tmp_path / "run" / "checkpoint.pt", best=True)


@pytest.mark.slow
def test_frozen_layers_of_a_pushed_model(small_service: Service, small_store: Path, tmp_path: Path) -> None:
    """From the store, and from a server, where the client never had them."""
    checkpoint = trained(
        small_service, tmp_path / "run", model="store:pushed", weights="auto", split="freeze"
    )
    expected = tmp_path / "run" / "model.safetensors"
    assert same(
        dict(load_model(checkpoint, source=FrozenSource(store=str(small_store))).module.state_dict()),
        expected,
    )
    with served(small_store) as server:
        url = f"http://127.0.0.1:{server.port}"
        model = load_model(checkpoint, source=FrozenSource(server=(url,)))
    assert same(dict(model.module.state_dict()), expected) and model.card.pushed == "pushed@1"


@pytest.mark.slow
def test_frozen_layers_of_a_file(small_service: Service, small_store: Path, tmp_path: Path) -> None:
    """That moved since; and another file, whose weights are not those of the training."""
    start = build(
        ModelSpec(architecture=SMALL_MODEL, weights="random:5", input_shape=SHAPE)
    ).module.state_dict()
    save_file(start, tmp_path / "start.safetensors")
    options = {"weights": str(tmp_path / "start.safetensors"), "store": str(small_store)}
    checkpoint = trained(small_service, tmp_path / "run", **options)
    expected = tmp_path / "run" / "model.safetensors"
    assert same(dict(load_model(checkpoint).module.state_dict()), expected)
    (tmp_path / "start.safetensors").rename(tmp_path / "moved.safetensors")
    moved = FrozenSource(weights=str(tmp_path / "moved.safetensors"), store=str(tmp_path / "none"))
    assert same(dict(load_model(checkpoint, source=moved).module.state_dict()), expected)
    other = build(
        ModelSpec(architecture=SMALL_MODEL, weights="random:6", input_shape=SHAPE)
    ).module.state_dict()
    save_file(other, tmp_path / "other.safetensors")
    wrong = FrozenSource(weights=str(tmp_path / "other.safetensors"), store=str(tmp_path / "none"))
    document = torch.load(checkpoint, weights_only=True)
    document["network"]["store"] = None
    torch.save(document, tmp_path / "elsewhere.pt")
    with pytest.raises(ModelError, match=r"not in reach.*other weights than those of the training") as caught:
        load_model(tmp_path / "elsewhere.pt", source=wrong)
    assert "\n" not in str(caught.value) and "--weights FILE" in str(caught.value)


@pytest.mark.slow
def test_a_model_file_is_pushed(small_service: Service, small_store: Path, tmp_path: Path) -> None:
    """By its path alone or as the weights of an architecture; a checkpoint says what to do first."""
    checkpoint = trained(small_service, tmp_path / "run", epochs=1)
    file = str(tmp_path / "run" / "model.safetensors")
    pushed = push(file, f"{small_store}/out")
    assert pushed.manifest.classes == 4 and pushed.spec.architecture == SMALL_MODEL
    assert pushed.spec.input_shape == SHAPE and pushed.spec.weights == "model.safetensors"
    head = "classifier.1.weight"
    assert torch.equal(dict(pushed.read([head]))[head], load_file(file)[head])
    again = push(SMALL_MODEL, f"{small_store}/again", weights=file, input_size=64)
    assert again.digest == pushed.digest
    for model, weights in ((SMALL_MODEL, str(checkpoint)), (str(checkpoint), None)):
        with pytest.raises(
            ModelError, match=r"checkpoint of hapi-train.*'hapi export .*checkpoint.pt --output"
        ):
            push(model, f"{small_store}/none", weights=weights)
    with pytest.raises(ModelError, match="'hapi export "):
        trained(small_service, tmp_path / "next", weights=str(checkpoint), store=str(small_store))
    with pytest.raises(UsageError, match="has weights already"):
        push(file, f"{small_store}/none", weights="random:0")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "plain.pth")
    plain = push(str(tmp_path / "plain.pth"), f"{small_store}/plain")
    assert plain.manifest.spec is None and list(plain.manifest.tensors) == ["weight"]


@pytest.mark.slow
def test_files_that_are_no_checkpoints(small_service: Service, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "plain.pth")
    with pytest.raises(
        UsageError, match=r"plain\.pth is not a checkpoint of hapi-train \(there is no 'format'"
    ):
        load_model(tmp_path / "plain.pth")
    checkpoint = trained(small_service, tmp_path / "run", epochs=1)
    with pytest.raises(UsageError, match="--best"):
        load_model(tmp_path / "run" / "model.safetensors", best=True)
    document = torch.load(checkpoint, weights_only=True)
    torch.save({**document, "network": None}, tmp_path / "old.pt")
    with pytest.raises(ModelError, match="does not say how its network is built"):
        load_model(tmp_path / "old.pt")
