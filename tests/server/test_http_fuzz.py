"""Random bodies against the served application: always a problem document or a right answer, never a defect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http_tools import (
    EXTRACT,
    SAMPLES,
    TENSORS,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    paths_of,
    raw,
    served,
    with_field,
)

SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
REFUSED = (400, 404, 409, 413, 422)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
near_values = st.sampled_from(
    ["resnet18", "random:0", "random:7", "pushed", "store", "zoo", "DEFAULT.pth", "digits", "0" * 16, "f" * 32,
     "conv1", "maxpool", 0, 1, 4, 32, 39, 40, 4096, [0], [39, 40], [3, 32, 32], [1, 1, 1], [3, 1, 1], ["layer1"],
     [0.5, 0.5, 0.5]]
)  # fmt: skip


@pytest.fixture(scope="module")
def goods(known: Known) -> dict[str, dict[str, Any]]:
    return {EXTRACT: known.extract(), SAMPLES: known.samples(), TENSORS: known.tensors()}


@pytest.fixture(scope="module")
def server(folder: Path, known: Known) -> Iterator[ServedApplication]:
    with served(folder) as application:
        yield application
        known.check_features(
            exchange(application.port, "POST", EXTRACT, known.extract()).body, [3, 39, 0, 17]
        )
        application.idle()


def check(server: ServedApplication, path: str, body: Any) -> None:
    answer = exchange(server.port, "POST", path, body)
    if answer.status == 200:
        assert int(answer.headers["Content-Length"]) == len(answer.body)
        assert answer.body.startswith(b"HAPF") and b'"report"' in answer.body[-2056:]
    else:
        check_problem(answer, REFUSED)


paths = st.sampled_from([EXTRACT, SAMPLES, TENSORS])


@SETTINGS
@given(path=paths, body=st.binary(max_size=400))
def test_any_bytes(server: ServedApplication, path: str, body: bytes) -> None:
    check_problem(exchange(server.port, "POST", path, body), 400)


@SETTINGS
@given(path=paths, document=json_values)
def test_any_json(server: ServedApplication, path: str, document: Any) -> None:
    check_problem(exchange(server.port, "POST", path, json.dumps(document).encode()), 400)


@SETTINGS
@given(path=paths, data=st.data())
def test_good_requests_with_a_few_other_fields(
    server: ServedApplication, goods: dict[str, dict[str, Any]], path: str, data: st.DataObject
) -> None:
    document = goods[path]
    for place in data.draw(
        st.lists(st.sampled_from(paths_of(document)), min_size=1, max_size=3, unique=True)
    ):
        try:
            document = with_field(document, place, data.draw(near_values | json_values))
        except (KeyError, TypeError, IndexError):
            continue  # its parent was replaced before
    check(server, path, document)


@SETTINGS
@given(path=paths, data=st.data())
def test_good_requests_with_damaged_bytes(
    server: ServedApplication, goods: dict[str, dict[str, Any]], path: str, data: st.DataObject
) -> None:
    body = bytearray(json.dumps(goods[path]).encode())
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=3)):
        body[position] = data.draw(st.integers(0, 255))
    check(server, path, bytes(body))


@SETTINGS
@given(head=st.binary(max_size=60), tail=st.binary(max_size=60))
def test_any_bytes_around_http(server: ServedApplication, head: bytes, tail: bytes) -> None:
    answer = raw(
        server.port, head + b"POST /v1/extract HTTP/1.1\r\n" + tail + b"\r\n\r\n", 5, half_close=True
    )
    assert b"Traceback" not in answer
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
