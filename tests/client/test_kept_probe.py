"""The measurement of a cache's disk for a run's first plan: beside the training, and only where something is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kept_tools import kept_service, train

from hapi.cache import folder as cache_folder
from hapi.server.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with kept_service(tmp_path_factory.mktemp("probe") / "store") as running:
        yield running


@pytest.mark.slow
def test_a_disk_is_measured_ahead_and_for_what_is_kept_alone(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes, started = list[Path](), list[str]()
    measure, start = cache_folder.measure_disk, threading.Thread.start

    def measured(folder: Path) -> object:
        probes.append(folder)
        return measure(folder)

    monkeypatch.setattr(cache_folder, "measure_disk", measured)
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self))[1])
    train(service, tmp_path / "kept", split="auto", epochs=2)
    assert len(probes) == 1 and started.count("hapi-cache-probe") == 1
    probes.clear()
    train(service, tmp_path / "once", split="auto", epochs=1)
    assert not probes and started.count("hapi-cache-probe") == 1
