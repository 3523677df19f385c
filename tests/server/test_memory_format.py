"""``--memory-format``: contiguous unless it is asked for otherwise; ``auto`` takes what is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.local_job import ALLOWED, open_session, pack_blobs
from torch import nn

from hapi.models.graph.layers import layered
from hapi.server.device import memory_format
from hapi.server.device.memory_format import channels_last, suits_channels_last
from hapi.server.service import Service
from hapi.server.settings import MemoryFormat, ServerSettings
from hapi.store.open import open_store

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "store"
    pack_blobs(folder)
    return folder


@contextmanager
def service_with(store: Path, wanted: MemoryFormat) -> Iterator[Service]:
    settings = ServerSettings(
        store=str(store), cos_batch=4, threads=1, memory_format=wanted, allow_model=ALLOWED
    )
    service = Service(settings, open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


def features_of(service: Service, split: int = 6, **changes: object) -> list[torch.Tensor]:
    with open_session(service, split=split, **changes) as session:
        return [features.clone() for features, _ in session.epoch(0)]


@pytest.mark.slow
def test_the_format_changes_no_more_than_last_bits(store: Path) -> None:
    with service_with(store, "contiguous") as service:
        exact = features_of(service)
        assert not any(p.channels_last for p in service.workers.all[0].cache._prefixes.values())
    with service_with(store, "channels-last") as service:
        found = features_of(service)
        assert all(p.channels_last for p in service.workers.all[0].cache._prefixes.values())
        timed = features_of(service, split="auto", epochs=1)  # type: ignore[arg-type]
    for a, b, c in zip(found, exact, timed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
        torch.testing.assert_close(c, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
        assert a.is_contiguous()


def test_the_layers_get_inputs_in_the_format() -> None:
    seen = []

    def layers(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return x

    channels_last(layers)(torch.zeros(2, 3, 4, 4))
    assert seen == [True]


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((1.0, 0.5), True), ((1.0, 0.97), False), ((1.0, 1.5), False)]
)
def test_auto_takes_what_is_clearly_faster(
    seconds: tuple[float, float], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = layered(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (3, 8, 8)).segment(0, 2, frozen=True)
    measured = memory_format._seconds(segment, CPU, 2)
    assert min(measured) > 0
    monkeypatch.setattr(memory_format, "_seconds", lambda *_: seconds)
    assert suits_channels_last(segment, "auto", CPU, 2) is chosen
    assert suits_channels_last(segment, "channels-last", CPU, 2)
    assert not suits_channels_last(segment, "contiguous", CPU, 2)


def test_a_measurement_that_finds_no_memory_stays_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = layered(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (3, 8, 8)).segment(0, 2, frozen=True)

    def full(*_: object) -> tuple[float, float]:
        raise MemoryError

    monkeypatch.setattr(memory_format, "_seconds", full)
    assert not suits_channels_last(segment, "auto", CPU, 2)


def test_inputs_without_channels_have_one_format() -> None:
    segment = layered(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (4,)).segment(0, 2, frozen=True)
    assert not suits_channels_last(segment, "channels-last", CPU, 2)
