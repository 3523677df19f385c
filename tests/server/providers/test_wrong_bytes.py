"""A provider that sends other bytes than were stored: what is loaded is right, or it is an error."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from support.http_tools import (
    TENSORS,
    Known,
    check_problem,
    exchange,
    make_store,
    metric,
    pushed_model,
    served,
)
from support.stores import flip
from support.tiny_http import serving

from hapi.models.tensors import tensor_bytes
from hapi.repository.opening import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("wrong"))


def lying(connection: socket.socket, request: bytes) -> bool:
    """Answer with as many zeros as were asked for."""
    match = re.search(rb"bytes=(\d+)-(\d+)", request)
    if match is None:
        return False
    start, stop = int(match[1]), int(match[2]) + 1
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {stop - start}\r\n"
    head += f"Content-Range: bytes {start}-{stop - 1}/{1 << 40}\r\n\r\n"
    connection.sendall(head.encode() + bytes(stop - start))
    return True


@pytest.mark.parametrize("piece", [8 << 20, 64 << 10], ids=["whole", "in pieces"])
def test_tensors_are_right_all_the_same(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.server.stored_bytes.FRAME_BYTES", piece)
    known = Known(folder)
    model = pushed_model()
    request = {**known.tensors(), "names": model.tensor_names(0, len(model))}
    with serving(lying) as liar, served(folder, providers=(liar.url,)) as server:
        answer = exchange(server.port, "POST", TENSORS, request)
        assert answer.status == 200
        for name in request["names"]:
            assert bytes(tensor_bytes(model.tensors.get(name).detach())) in answer.body
        assert liar.requests
        assert metric(server.port, "hapi_provider_failures_total") >= 1
        before = len(liar.requests)
        exchange(server.port, "POST", TENSORS, request)
        assert len(liar.requests) == before


def test_damage_of_the_store_itself_is_an_error(tmp_path: Path) -> None:
    """Neither the liar nor the store has the right bytes: it ends, and names the tensor."""
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    request = known.tensors()
    entry = open_model(known.store, "pushed").manifest.tensors[request["names"][0]]
    flip(known.store, entry.pack, entry.start)
    with serving(lying) as liar, served(folder, providers=(liar.url,)) as server:
        answer = exchange(server.port, "POST", TENSORS, request)
        check_problem(answer, 500, entry.name)
