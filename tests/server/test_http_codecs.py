"""Encoded features over HTTP: exact where they are to be, in fewer bytes, within the server's limits."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.http_tools import (
    EXTRACT,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    raw,
    received,
    request_bytes,
    served,
)

from hapi.codecs.names import EXACT, LOSSY
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.report import RequestReport

IDS = list(range(40))


def features_of(body: bytes) -> torch.Tensor:
    ids, (features, _) = received(body, 2)
    assert ids == IDS
    return torch.from_numpy(features.view(np.float32).copy())


def asked(known: Known, codec: str | None, split: int = 3) -> dict[str, Any]:
    return known.extract(IDS, split, **({} if codec is None else {"codec": codec}))


@pytest.mark.parametrize("codec", EXACT)
def test_exact_codecs(server: ServedApplication, known: Known, codec: str) -> None:
    raw_answer = exchange(server.port, "POST", EXTRACT, asked(known, None))
    assert int(raw_answer.headers["Content-Length"]) == len(raw_answer.body)
    answer = exchange(server.port, "POST", EXTRACT, asked(known, codec))
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert len(answer.body) < 0.95 * len(raw_answer.body)
    assert torch.equal(features_of(answer.body), features_of(raw_answer.body))


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codecs(server: ServedApplication, known: Known, codec: str) -> None:
    exact = features_of(exchange(server.port, "POST", EXTRACT, asked(known, None)).body)
    answer = exchange(server.port, "POST", EXTRACT, asked(known, codec))
    assert len(answer.body) < 0.6 * 4 * len(exact)
    found = features_of(answer.body)
    assert not torch.equal(found, exact)
    assert (found - exact).abs().max() <= exact.abs().max() / 200


def test_none_is_raw(server: ServedApplication, known: Known) -> None:
    assert "Content-Length" in exchange(server.port, "POST", EXTRACT, asked(known, "none")).headers


@pytest.mark.parametrize("codec", ["gzip", "", 1, None, ["zeros"]])
def test_unknown_codecs_are_refused(server: ServedApplication, known: Known, codec: Any) -> None:
    check_problem(exchange(server.port, "POST", EXTRACT, known.extract(codec=codec)), 400, "codec", "zeros")


def test_encoding_counts_as_the_server_s_work(server: ServedApplication, known: Known) -> None:
    def sending(codec: str) -> float:
        body = exchange(server.port, "POST", EXTRACT, asked(known, codec)).body
        reader = FrameReader(BufferSource(iter([body])))
        while not isinstance(
            found := reader.next(lambda h: [memoryview(bytearray(t.nbytes)) for t in h.tensors]), StreamEnd
        ):
            pass
        return RequestReport.from_json(found.report).cpu["send"]

    assert sending("zeros+planes") > 0


def test_a_connection_goes_on_after_an_encoded_answer(server: ServedApplication, known: Known) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
    try:
        bodies = []
        for codec in ("zeros", "none", "planes"):
            connection.request("POST", EXTRACT, body=json.dumps(asked(known, codec)).encode())
            bodies.append(features_of(connection.getresponse().read()))
        assert torch.equal(bodies[0], bodies[1]) and torch.equal(bodies[1], bodies[2])
    finally:
        connection.close()


def test_an_old_proxy_s_request_ends_with_the_connection(server: ServedApplication, known: Known) -> None:
    body = json.dumps(asked(known, "zeros")).encode()
    answer = raw(server.port, request_bytes(EXTRACT, body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, frames = answer.partition(b"\r\n\r\n")
    assert b"Content-Length" not in head and b"chunked" not in head
    expected = features_of(exchange(server.port, "POST", EXTRACT, asked(known, None)).body)
    assert torch.equal(features_of(frames), expected)


def test_the_limit_of_an_answer_is_on_raw_bytes(tmp_path: Path, known: Known, folder: Path) -> None:
    with served(folder, max_response_bytes=100_000) as server:
        check_problem(
            exchange(server.port, "POST", EXTRACT, asked(known, "zeros")), 413, "--max-response-bytes"
        )


@pytest.mark.slow
def test_several_at_once(server: ServedApplication, known: Known) -> None:
    expected = features_of(exchange(server.port, "POST", EXTRACT, asked(known, None)).body)
    found: list[bool] = []

    def one(codec: str) -> None:
        found.append(
            torch.equal(
                features_of(exchange(server.port, "POST", EXTRACT, asked(known, codec)).body), expected
            )
        )

    threads = [threading.Thread(target=one, args=(codec,)) for codec in EXACT * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert found == [True] * 6
