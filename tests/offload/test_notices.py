"""What offloading does and costs is said in a script that sets nothing up, and never twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from support.forked import ForkedProcess

from hapi.offload.loop.notices import notice

TESTS = Path(__file__).parents[1]
FITS = "all fits, states stay in memory"
COST = ": free where forward and backward take longer"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a script's users see, by how they set up logging, where all fits and where it does not."""
    folder = tmp_path_factory.mktemp("notices")
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    assert ForkedProcess(["support.offload_notices", str(folder)], env=environment).wait(240) == 0
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("set_up", ["plain", "info", "own-handler"])
def test_all_lines_are_seen_once(set_up: str, shown: dict[str, str]) -> None:
    fitting, offloaded = shown[f"{set_up}-1GB"], shown[f"{set_up}-1KB"]
    assert fitting.count(FITS) == 1 and fitting.count("activations: ") == 1
    assert offloaded.count("the states go to ") == offloaded.count(COST) == 1
    assert offloaded.count("offloading costs") + offloaded.count("offloading is hidden") == 1


@pytest.mark.slow
def test_who_takes_only_warnings_gets_only_costs(shown: dict[str, str]) -> None:
    assert not shown["basic-1GB"] and shown["basic-1KB"].count(COST) == 1


@pytest.mark.slow
@pytest.mark.parametrize("set_up", ["errors-only", "disabled"])
def test_who_silences_them_sees_none(set_up: str, shown: dict[str, str]) -> None:
    assert not shown[f"{set_up}-1GB"] and not shown[f"{set_up}-1KB"]


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with caplog.at_level("INFO", "hapi.offload"):
        notice("it costs", is_cost=True)
    assert [record.levelname for record in caplog.records] == ["INFO"]
