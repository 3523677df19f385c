"""Files of a store that are shortened in place under a running server: an error of what lies there, not its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.harness import ServerProcess, hapi, server
from support.http_tools import (
    EXTRACT,
    PUSHED_SPEC,
    SAMPLES,
    SPEC,
    SPLIT,
    TENSORS,
    Answer,
    Known,
    check_problem,
    exchange,
    make_store,
    pushed_model,
    resnet,
)

from hapi.repository.prefix import zoo_reference
from hapi.repository.push import push

pytestmark = pytest.mark.slow
EVERYTHING = list(range(40))
IDS = [3, 39, 0, 17]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_store(tmp_path / "store")
    pack(made, "other")
    return made


@pytest.fixture
def running(folder: Path) -> Iterator[ServerProcess]:
    with server(folder, "--chunk-cache", "0", "--model-cache", "0") as process:
        yield process
        assert process.process.poll() is None, "the server died"


def pack(folder: Path, name: str, *arguments: str) -> None:
    hapi("pack", "sklearn:digits", f"{folder}/{name}", "--limit", "40", "--image-size", "32", "--shard-size", "2000",
         "--quiet", *arguments)  # fmt: skip


def shorten(folder: Path, pattern: str, size: int = 100) -> None:
    """Every file of this pattern, in place: maps of it end there."""
    paths = list(folder.glob(pattern))
    assert paths
    for path in paths:
        os.truncate(path, size)


def ask(running: ServerProcess, path: str, document: dict[str, Any]) -> Answer:
    return exchange(running.port, "POST", path, document)


def others_go_on(running: ServerProcess, known: Known) -> None:
    reference = {**known.dataset.reference.to_json(), "name": "other"}
    answer = ask(running, EXTRACT, known.extract(IDS, dataset=reference))
    known.check_features(answer.body, IDS)
    assert exchange(running.port, "GET", "/healthz").status == 200


def test_the_index(folder: Path, running: ServerProcess) -> None:
    """A server that has it open goes on with its copy; one that has not says what is wrong, and is healed."""
    known = Known(folder)
    whole = ask(running, SAMPLES, known.samples(EVERYTHING)).body
    shorten(folder, "datasets/digits/*/index.safetensors")
    assert len(ask(running, SAMPLES, known.samples(EVERYTHING)).body) == len(whole)
    known.check_features(ask(running, EXTRACT, known.extract(IDS)).body, IDS)
    others_go_on(running, known)
    with server(folder) as fresh:
        for _ in range(2):
            check_problem(
                ask(fresh, SAMPLES, known.samples()), 500, "index.safetensors", "pack the dataset again"
            )
            check_problem(exchange(fresh.port, "GET", "/v1/datasets/digits"), 500, "100 bytes instead of")
            others_go_on(fresh, known)
        pack(folder, "digits", "--replace")
        for process in (fresh, running):
            known.check_features(ask(process, EXTRACT, known.extract(IDS)).body, IDS)


def test_shards(folder: Path, running: ServerProcess) -> None:
    known = Known(folder)
    known.check_features(ask(running, EXTRACT, known.extract(IDS)).body, IDS)
    shorten(folder, "datasets/digits/*/shard-*.bin")
    for path, document in ((SAMPLES, known.samples(EVERYTHING)), (EXTRACT, known.extract(IDS))):
        check_problem(
            ask(running, path, document), 500, "'digits'", "has 100 bytes", "pack the dataset again"
        )
    others_go_on(running, known)
    pack(folder, "digits", "--replace")
    known.check_features(ask(running, EXTRACT, known.extract(IDS)).body, IDS)


def test_weights(folder: Path, running: ServerProcess) -> None:
    """Of a pushed model whose weights are read for each request."""
    known, model = Known(folder), resnet()
    store = known.store
    push(store, "net", model, SPEC)
    reference = replace(zoo_reference(SPEC, model, SPLIT), source="store", name="net", weights="pushed")
    document = known.extract(IDS, model=reference.to_json())
    assert ask(running, TENSORS, known.tensors()).status == 200
    shorten(folder, "repository/packs/*.safetensors")
    check_problem(
        ask(running, TENSORS, known.tensors()), 500, "'pushed@1'", "push the model again with --repair"
    )
    check_problem(ask(running, EXTRACT, document), 500, "'net@1'", "push the model again with --repair")
    others_go_on(running, known)
    push(store, "net", model, SPEC, repair=True)
    push(store, "pushed", pushed_model(), PUSHED_SPEC, repair=True)
    assert ask(running, TENSORS, known.tensors()).status == 200
    known.check_features(ask(running, EXTRACT, document).body, IDS)
