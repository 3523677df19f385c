"""The trainer's model from a store: what it may import, when its tensors are asked for, and who pushes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.local_job import open_session, pack_blobs, service_of
from support.threads import at_once

from hapi.client.models import open_client_model
from hapi.client.settings import ModelSettings
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import ConflictError, ModelError, UsageError
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.names import is_checkpoint
from hapi.repository.opening import open_model
from hapi.repository.push import push
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.store.local import LocalStore
from hapi.wire.transport.http import Handler, LoopbackTransport

MODULE = "hapi_test_client_models"
FACTORY = f"{MODULE}:net"
SHAPE = (3, 8, 8)
SPEC = ModelSpec(architecture=FACTORY, weights="random:0", input_shape=SHAPE)
SOURCE = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 4))
"""
OWN: dict[str, Any] = {"model": "store:own", "freeze": 0, "split": 0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a dataset and a model of the user's own factory, which is importable."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "store"
    pack_blobs(folder, side=SHAPE[1])
    push(LocalStore(str(folder)), "own", build(SPEC, allow_import=True), SPEC)
    monkeypatch.delitem(sys.modules, MODULE)
    return folder


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with service_of(folder) as running:
        yield running


@pytest.mark.parametrize("allowed", [(), (f"{MODULE}:other", "os")], ids=["none", "others"])
def test_a_factory_that_a_server_names_is_not_imported(service: Service, allowed: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"model 'own' .*'{FACTORY}'.* --allow-model {FACTORY}"):
        open_session(service, **OWN, allow_model=allowed)
    assert MODULE not in sys.modules


@pytest.mark.parametrize("allowed", [FACTORY, MODULE])
def test_a_factory_that_is_allowed(service: Service, allowed: str) -> None:
    with open_session(service, **OWN, allow_model=(allowed,)) as session:
        assert len(session.job_context.model) == 5


@pytest.mark.parametrize(
    "changes",
    [{"shape": (2**35, 3, 3, 3)}, {"shape": (4, 3, 9)}, {"dtype": "float64"}],
    ids=["huge", "another shape", "another type"],
)
def test_tensors_of_other_forms_are_not_asked_for(
    folder: Path, service: Service, changes: dict[str, Any]
) -> None:
    manifest = open_model(LocalStore(str(folder)), "own").manifest
    old = manifest.structure
    forms = tuple(replace(form, **changes) if form.name == "0.weight" else form for form in old.forms)
    structure = replace(old, forms=forms)
    lies = {
        "/v1/models/own": replace(manifest, structure=structure).to_json(),
        f"/v1/structures/{structure.digest}": structure.to_json(),
    }
    with pytest.raises(
        ConflictError, match=r"tensor '0\.weight' was pushed as .* but is float32 \[4, 3, 3, 3\]"
    ):
        open_session(answering(service, lies), **OWN, allow_model=(FACTORY,))


def answering(service: Service, documents: dict[str, Any]) -> Handler:
    """``service``, with its own answers to some paths."""
    handle = loopback_handler(service)
    return lambda method, path, body: (
        (200, {}, iter([json.dumps(documents[path]).encode()]))
        if path in documents
        else handle(method, path, body)
    )


@pytest.fixture
def weights(tmp_path: Path, folder: Path) -> str:
    """A file of weights that no store has yet."""
    path = tmp_path / "weights.safetensors"
    save_file(build(replace(SPEC, weights="random:3"), allow_import=True).module.state_dict(), path)
    return str(path)


def open_from_file(service: Service, store: Path | str, weights: str) -> str:
    """Where the weights are in the end."""
    settings = ModelSettings(model=FACTORY, weights=weights)
    servers = ServerPool([LoopbackTransport(loopback_handler(service))])
    return open_client_model(settings, servers, str(store), seed=0, classes=4, shape=SHAPE).weights


@pytest.mark.parametrize("form", ["index", "folder", "folder by its name"])
def test_weights_in_shards_are_those_of_one_file(
    service: Service, folder: Path, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    state, shards, homes = load_file(weights), tmp_path / "shards", {}
    shards.mkdir()
    for number, (name, tensor) in enumerate(state.items()):
        homes[name] = f"part-{number}.safetensors"
        save_file({name: tensor}, shards / homes[name])
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    monkeypatch.chdir(tmp_path)
    given = {"index": str(index), "folder": str(shards), "folder by its name": "shards"}[form]
    whole = open_from_file(service, folder, weights)
    assert open_from_file(service, folder, given).partition("@")[0] == whole.partition("@")[0]
    (shards / "part-0.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-0\.safetensors is missing"):
        open_from_file(service, folder, given)
    index.unlink()
    with pytest.raises(ModelError, match=r"shards.* has 5 files that may be the checkpoint|does not exist"):
        open_from_file(service, folder, given)


def test_a_folder_is_no_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("auto", "random", "DEFAULT"):
        (tmp_path / word).mkdir()
        assert not is_checkpoint(word)
    (tmp_path / "mine").mkdir()
    assert is_checkpoint("mine")


def test_two_jobs_with_one_file_of_weights(service: Service, folder: Path, weights: str) -> None:
    names: list[str] = []
    at_once(2, lambda _: names.append(open_from_file(service, folder, weights)))
    assert len(set(names)) == 1 and names[0].startswith("pushed:file-")
    name = names[0].removeprefix("pushed:").partition("@")[0]
    assert open_model(LocalStore(str(folder)), name).digest.startswith(name.removeprefix("file-"))
