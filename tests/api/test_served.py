"""A fine-tuned network beside the data: the same outputs as here, or a line that says why all layers run here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import open_session, pack_blobs, service_of, trainer_of

from hapi.api.inference import predict_dataset
from hapi.api.model_files import load_model
from hapi.api.models import push
from hapi.api.served import ServedModel, open_served
from hapi.client.settings import SessionSettings
from hapi.data.mount import open_dataset
from hapi.errors import NotFoundError, UsageError
from hapi.models.model_file import write_model
from hapi.repository.versions import version_key
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.transport.http import LoopbackTransport

MODEL = "squeezenet1_1"
BATCH = 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("served") / "store"
    pack_blobs(store, count=20, side=64)
    pack_blobs(store, "large", count=4, side=96)
    push(MODEL, f"{store}/pushed", weights="random:9", input_size=64)
    return store


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as running:
        yield running


def trained(service: Service, output: Path, **changes: Any) -> Path:
    changes = {"model": MODEL, "freeze": 10, "bs": 10, "epochs": 1, "output": str(output), **changes}
    with open_session(service, **changes) as session:
        trainer_of(session, **changes).run()
    return output / "model.safetensors"


def served(service: Service, file: Path, dataset: str = "blobs") -> ServedModel:
    settings = SessionSettings(dataset=dataset, bs=BATCH, request_size=BATCH, threads=1)
    return open_served(
        load_model(file), settings, transports=lambda: [LoopbackTransport(loopback_handler(service))]
    )


def compared(service: Service, store: Path, file: Path) -> tuple[torch.Tensor, torch.Tensor, ServedModel]:
    """Outputs float32 [20, 4] beside the store and here, in the order of the ids."""
    with served(service, file) as beside:
        batches = list(beside.outputs())
        assert [name for batch in batches for name in batch.names] == [str(n) for n in range(20)]
        assert [label for batch in batches for label in batch.labels.tolist()] == [n % 4 for n in range(20)]
    with open_dataset(f"{store}/blobs") as blobs:
        here = torch.cat([o.logits for o in predict_dataset(load_model(file), blobs, BATCH)])
    return torch.cat([batch.logits for batch in batches]), here, beside


@pytest.mark.slow
def test_frozen_layers_run_on_the_server(service: Service, store: Path, tmp_path: Path) -> None:
    """To the last bits: the server's batches are its own (4 samples here), so kernels may round otherwise."""
    for number, changes in enumerate(({}, {"model": "store:pushed", "weights": "auto"})):
        file = trained(service, tmp_path / str(number), **changes)
        found, here, beside = compared(service, store, file)
        assert beside.note is None and beside.split == 10
        torch.testing.assert_close(found, here, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_other_frozen_layers_run_here(service: Service, store: Path, tmp_path: Path) -> None:
    """Those of weights that the server has otherwise, or that it no longer has: bit for bit as without a server."""
    file = trained(service, tmp_path / "run")
    model = load_model(file)
    state = model.module.state_dict()
    state["features.0.weight"] = state["features.0.weight"] * 1.5
    write_model(tmp_path / "other.safetensors", state, model.card)
    found, here, beside = compared(service, store, tmp_path / "other.safetensors")
    assert "those of random:0 are others" in str(beside.note) and beside.split == 0
    assert torch.equal(found, here)
    push(MODEL, f"{store}/gone", weights="random:5", input_size=64)
    file = trained(service, tmp_path / "gone", model="store:gone", weights="auto")
    (store / version_key("gone", 1)).unlink()
    found, here, beside = compared(service, store, file)
    assert "gone" in str(beside.note) and torch.equal(found, here)


@pytest.mark.slow
def test_datasets_that_do_not_fit(service: Service, tmp_path: Path) -> None:
    file = trained(service, tmp_path / "run")
    with pytest.raises(NotFoundError, match="nothing"):
        served(service, file, "nothing")
    with pytest.raises(UsageError, match="gives inputs of"):
        served(service, file, "large")
