"""Data that is damaged, deleted or replaced under a running server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    SPEC,
    SPLIT,
    TENSORS,
    TRANSFORM,
    Known,
    check_problem,
    exchange,
    make_store,
    received,
    resnet,
    served,
)

from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.repository.built import prefix_bytes
from hapi.repository.prefix import zoo_reference
from hapi.repository.push import push
from hapi.repository.versions import version_key
from hapi.store.open import open_store
from hapi.wire.messages import ExtractRequest


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.slow
def test_a_damaged_data_set(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    everything = list(range(40))
    with served(folder, cos_batch=1, chunk_cache=0) as server:  # what is cached was checked before
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        shards = sorted(folder.glob("datasets/digits/*/shard-*.bin"))
        assert len(shards) > 1
        whole = shards[0].read_bytes()

        shards[0].write_bytes(flip(whole))
        check_problem(
            exchange(server.port, "POST", SAMPLES, known.samples(everything)), 500, "checksum", "digits"
        )
        answer = exchange(server.port, "POST", EXTRACT, known.extract([39, *everything]))
        assert answer.status == 200  # the first frame is good
        assert int(answer.headers["Content-Length"]) > len(answer.body)
        assert b"urn:hapi:problem:data" in answer.body[-2000:]

        shards[0].write_bytes(whole[:-10])
        check_problem(exchange(server.port, "POST", SAMPLES, known.samples(everything)), 500, "bytes")
        shards[0].unlink()
        check_problem(exchange(server.port, "POST", SAMPLES, known.samples(everything)), 500, "gone")
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract([39, 38])).body, [39, 38])

        shards[0].write_bytes(whole)
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        server.idle()


def test_a_damaged_model(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    with served(folder) as server:
        weights = next(folder.glob("repository/packs/*.safetensors"))
        whole = weights.read_bytes()
        last = {**known.tensors(), "names": ["features.3.squeeze.weight"]}
        assert exchange(server.port, "POST", TENSORS, last).status == 200
        weights.write_bytes(bytes(len(whole)))
        check_problem(exchange(server.port, "POST", TENSORS, last), 500, "features.3.squeeze.weight")
        weights.write_bytes(whole[:100])
        check_problem(exchange(server.port, "POST", TENSORS, last), (500, 502), "pushed")
        weights.write_bytes(whole)
        assert exchange(server.port, "POST", TENSORS, last).status == 200
        manifest = folder / version_key("pushed", 1)
        manifest.write_bytes(flip(manifest.read_bytes())[:500])
        check_problem(exchange(server.port, "GET", "/v1/models/pushed"), 500, "00000001.json")
        listed = exchange(server.port, "GET", "/v1/models").json()["models"]
        assert listed[0]["name"] == "pushed" and "it is damaged" in listed[0]["problem"]


def test_a_replaced_data_set(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    with served(folder, chunk_cache=0) as server:  # what is cached may still be asked for
        assert exchange(server.port, "POST", EXTRACT, known.extract()).status == 200
        options = PackOptions(limit=30, transform=TRANSFORM, shard_bytes=2000)
        source, store = open_source("sklearn:digits"), open_store(str(folder))
        pack(source, store, "digits", options, replace=True)
        known.check_features(exchange(server.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17])
        pack(source, store, "digits", options, replace=True, keep_old=0)
        for path, document in ((EXTRACT, known.extract()), (SAMPLES, known.samples())):
            check_problem(exchange(server.port, "POST", path, document), 409, "digits")
        again = Known(folder)
        again.check_features(exchange(server.port, "POST", EXTRACT, again.extract([3, 29])).body, [3, 29])
        check_problem(exchange(server.port, "POST", EXTRACT, again.extract([39])), 404, "39")
        assert received(exchange(server.port, "POST", SAMPLES, again.samples()).body, 3)[0] == [5, 0, 5]
        check_problem(exchange(server.port, "POST", SAMPLES, known.samples()), 409, "digits")


@pytest.mark.slow
def test_a_model_that_is_replaced_and_comes_back(tmp_path: Path) -> None:
    """Its sizes are its own: a digest never stands for what lay in the store for a while."""
    folder = make_store(tmp_path / "store")
    known, model = Known(folder), resnet()
    reference = replace(zoo_reference(SPEC, model, SPLIT), source="store", name="pushed", weights="pushed")
    document = known.extract(model=reference.to_json())
    with served(folder) as server:
        check_problem(exchange(server.port, "POST", EXTRACT, document), 409, "pushed", "digest")
        push(known.store, "pushed", model, SPEC)
        known.check_features(exchange(server.port, "POST", EXTRACT, document).body, [3, 39, 0, 17])
        sizes = server.service.workers.sizing.of(ExtractRequest.from_json(document))
        assert sizes.weights[0].nbytes == prefix_bytes(model, SPLIT)
