"""Layers loaded ahead: named before they are asked for, loaded beside requests, refused when there is other work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.http_tools import (
    SPLIT,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    make_store,
    paths_of,
    served,
    until,
    with_field,
)

from hapi.server.device.prefix_loader import PrefixLoader
from hapi.wire.warm_up import WARM_PATH, WarmUpRequest

IDS = [3, 1, 20]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(make_store(tmp_path_factory.mktemp("warm")))


@pytest.fixture
def application(known: Known) -> Iterator[ServedApplication]:
    with served(Path(known.store.url)) as running:
        yield running


def ahead(known: Known, split: int = SPLIT) -> dict[str, Any]:
    document = known.extract(IDS, split)
    return {name: document[name] for name in ("model", "split", "split_name")}


def asked(application: ServedApplication, document: Any) -> Any:
    return exchange(application.port, "POST", WARM_PATH, json.dumps(document).encode())


def misses(application: ServedApplication) -> int:
    return application.service.workers.all[0].cache.misses


def test_layers_named_ahead_are_there_when_they_are_asked_for(
    known: Known, application: ServedApplication
) -> None:
    assert asked(application, ahead(known)).json() == {"state": "loading"}
    until(lambda: misses(application) == 1, 30, "that the layers are loaded")
    worker = application.service.workers.all[0]
    until(lambda: not worker.memory.kinds()["weights"], 30, "that nobody uses them")
    assert worker.memory.kinds()["idle_weights"] == worker.cache.resident_bytes > 0
    answer = exchange(application.port, "POST", "/v1/extract", json.dumps(known.extract(IDS)).encode())
    known.check_features(answer.body, IDS)
    assert (misses(application), worker.cache.hits) == (1, 1)


def test_one_load_ahead_at_a_time(known: Known, application: ServedApplication) -> None:
    go_on, load = threading.Event(), PrefixLoader.load

    def slow(*arguments: Any) -> Any:
        go_on.wait(240)
        return load(*arguments)

    with mock.patch.object(PrefixLoader, "load", slow):
        assert asked(application, ahead(known)).json() == {"state": "loading"}
        assert asked(application, ahead(known)).json() == {"state": "busy"}
        go_on.set()
        until(lambda: misses(application) == 1, 30, "that the layers are loaded")
    until(lambda: asked(application, ahead(known)).json() == {"state": "loading"}, 30, "the end of the load")


def test_what_cannot_be_loaded_is_told_to_the_request_for_features(
    known: Known, application: ServedApplication
) -> None:
    wrong = ahead(known)
    wrong["model"] = {**wrong["model"], "digest": "0" * 32}
    assert asked(application, wrong).json() == {"state": "loading"}
    until(lambda: asked(application, ahead(known)).json() == {"state": "loading"}, 30, "the end of the load")
    until(lambda: misses(application) == 1, 30, "that the layers are loaded")


def test_without_room_nothing_is_loaded_and_nothing_is_dropped(known: Known) -> None:
    with served(Path(known.store.url), device_memory=30_000) as application:
        assert asked(application, ahead(known)).json() == {"state": "loading"}
        until(lambda: asked(application, ahead(known)).json() == {"state": "loading"}, 30, "the end of it")
        assert application.service.workers.all[0].cache.resident_bytes == 0


def test_a_server_that_keeps_no_layers_loads_none(known: Known) -> None:
    with served(Path(known.store.url), model_reuse=False) as application:
        assert asked(application, ahead(known)).json() == {"state": "busy"}


def test_requests_are_parsed_strictly(known: Known, application: ServedApplication) -> None:
    good = ahead(known)
    assert WarmUpRequest.from_json(good).to_json() == good
    rounded = {**good, "precision": "bf16"}
    assert WarmUpRequest.from_json(rounded).to_json() == rounded
    for path in paths_of(good):
        check_problem(asked(application, with_field(good, path, {"no": "such"})), 400)
    check_problem(asked(application, {**good, "ids": [1]}), 400, "ids")
    assert misses(application) == 0
