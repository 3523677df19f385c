"""No needless misses: what does not change features leaves their key as it is, through real settings and sessions."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import open_session, pack_pictures, service_of

from hapi.cache.feature_key import FeatureKey
from hapi.client.caching.keys import codes_of, feature_key, server_codes
from hapi.client.session import Session
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.wire.transport.http import LoopbackTransport

BASE: dict[str, Any] = {"dataset": "pictures", "image_size": 32, "weights": "random:3", "freeze": 11}
CUT = 11
JOB: list[dict[str, Any]] = [
    {"bs": 4}, {"bs": 23}, {"epochs": 30}, {"seed": 99}, {"drop_last": True},
    {"shuffle": "full"}, {"shuffle": "chunks:4:2"}, {"trainers": 2, "trainer": 1},
    {"request_size": 1}, {"request_size": 512}, {"in_flight": 16}, {"prefetch_bytes": 0},
    {"micro_batch": 1}, {"threads": 2}, {"memory": 1 << 34}, {"device": "cpu"},
    {"split": 1}, {"split": "none"}, {"split": "auto"}, {"split": "nsg"}, {"freeze": 12},
    {"replan": "off"}, {"profile_epoch": (1,)}, {"profile_batches": 2},
    {"validation": 0.25}, {"validation": 0.5}, {"validation": "other"}, {"check_features": "off"}, {"recheck": 2},
    {"timeout": 5.0}, {"patience": 1.0}, {"answer_timeout": 900.0}, {"slow_server_rate": 0},
    {"lr": 1.0}, {"head_lr": 0.1}, {"optimizer": "adamw"}, {"momentum": 0.5}, {"weight_decay": 0.1},
    {"schedule": "cosine"}, {"warmup": 2}, {"clip_norm": 1.0}, {"accumulate": 2}, {"ema": 0.9}, {"precision": "bf16"},
    {"label_smoothing": 0.1}, {"early_stopping": 3}, {"feature_mixup": 0.2},
    {"wire_codec": "none"}, {"wire_codec": "planes"}, {"cache_codec": "zeros"}, {"wire_codec": "int8", "split": 0},
    {"output": "elsewhere"}, {"log": ("csv",)}, {"checkpoint": "c.pt"}, {"report": "r.json"}, {"progress": "off"},
]  # fmt: skip
"""Settings of a training."""
SERVER: list[dict[str, Any]] = [
    {"cos_batch": 16}, {"cos_batch": 32}, {"cos_batch": 256}, {"batching": "auto"}, {"merge": 0}, {"threads": 2},
    {"decode_threads": 2}, {"max_running": 1}, {"max_queued": 2}, {"model_reuse": False}, {"chunk_cache": 0},
    {"device_memory": 1 << 33}, {"host_memory": 1 << 33}, {"max_response_bytes": 1 << 30}, {"drain_seconds": 1.0},
    {"port": 9000}, {"log_level": "debug"}, {"tell_store": True}, {"scrub_rate": 0},
]  # fmt: skip
"""Settings of a server."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hits") / "store"
    pack_pictures(folder, count=24)
    pack_pictures(folder, "other", count=24)
    return folder


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[Service]:
    with service_of(store) as running:
        yield running


def key_of(session: Session) -> str:
    job_context = session.job_context
    key = feature_key(job_context, CUT, codes=codes_of(job_context))
    assert isinstance(key, FeatureKey)
    return key.digest


def digest(service: Any, **changes: Any) -> str:
    with open_session(service, **{**BASE, **changes}) as session:
        return key_of(session)


@pytest.fixture(scope="module")
def base(service: Service) -> str:
    return digest(service)


@pytest.mark.parametrize("changes", JOB, ids=json.dumps)
def test_settings_of_a_training(service: Service, base: str, changes: dict[str, Any], tmp_path: Path) -> None:
    files = {"output", "checkpoint", "report"} & set(changes)
    changes = {**changes, **{name: str(tmp_path / changes[name]) for name in files}}
    assert digest(service, **changes) == base


@pytest.mark.parametrize("changes", SERVER, ids=json.dumps)
def test_settings_of_a_server(store: Path, base: str, changes: dict[str, Any]) -> None:
    settings = ServerSettings(store=str(store), **{"threads": 1, **changes})
    running = Service(settings, open_store(str(store)))
    try:
        assert digest(running) == base
    finally:
        running.close()


def test_another_folder_of_the_same_store(store: Path, base: str, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy")
    with service_of(tmp_path / "copy") as running:
        assert digest(running) == base


def test_the_same_samples_under_another_name(service: Service, base: str) -> None:
    assert digest(service, dataset="other") == base


def test_several_servers_of_one_code(service: Service, base: str) -> None:
    handle = loopback_handler(service)
    transports = [LoopbackTransport(handle, f"http://server{n}:80{n}") for n in range(3)]
    with open_session(handle, **BASE) as session:
        job_context = session.job_context
        pool = type(job_context.servers)(transports)
        key = feature_key(job_context, CUT, codes=server_codes(pool))
        assert isinstance(key, FeatureKey) and key.digest == base


def test_weights_after_the_cut(service: Service, base: str) -> None:
    with open_session(service, **BASE) as session:
        with torch.no_grad():
            for parameter in session.trained.parameters():
                parameter.add_(1.0)
        assert key_of(session) == base


@pytest.mark.parametrize("split", [0, 5])
def test_weights_before_the_cut_that_were_changed_in_an_open_session(
    service: Service, base: str, split: int
) -> None:
    """Those after the split are in memory here; only the server has the others."""
    with open_session(service, **{**BASE, "split": split}) as session:
        assert key_of(session) == base
        model = session.job_context.model
        with torch.no_grad():
            model.tensors.get(model.tensor_names(split, CUT)[0]).mul_(1.5)
        assert key_of(session) != base


def test_other_machines_places_and_times(
    service: Service, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        for name in ("LC_ALL", "LANG", "HOSTNAME", "HOME", "XDG_CACHE_HOME", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, os.environ.get("TMPDIR", "/tmp") if "HOME" in name else "3")
        assert digest(service) == base
    finally:
        monkeypatch.undo()
        time.tzset()


_ALONE = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.local_job import service_of
from test_key_hits import digest
with service_of(Path(sys.argv[1])) as running:
    print(digest(running))
"""


@pytest.mark.slow
def test_another_process_with_other_hashes(store: Path, base: str) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(store), str(here)],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == base


def test_there_are_enough_kinds() -> None:
    assert len({next(iter(changes)) for changes in (*JOB, *SERVER)}) >= 30
