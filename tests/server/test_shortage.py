"""What the system lacks for a moment is an error that passes, wherever it is met."""

from __future__ import annotations

import errno
import os
import urllib.error
from pathlib import Path

import pytest
from support.http_tools import SAMPLES, Known, check_problem, exchange, make_store, served

from hapi.errors import SHORT_OF, ModelError, ShortageError, TransportError, from_problem, shortage
from hapi.repository.sources.open import open_source
from hapi.server.http.problems import as_hapi_error
from hapi.store.open import open_store

FOREIGN = [
    *(OSError(number, os.strerror(number)) for number in SHORT_OF if number != errno.ENOMEM),
    OSError("Too many open files (os error 24)"),
    urllib.error.URLError(OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
    RuntimeError("unable to open shared memory: Too many open files (24)"),
]


@pytest.mark.parametrize("error", FOREIGN, ids=repr)
def test_it_is_retryable(error: Exception) -> None:
    problem = as_hapi_error(error)
    assert type(problem) is ShortageError and problem.status == 503 and problem.retryable
    assert problem.retry_after == 1.0
    received = from_problem(problem.to_problem(), 503)
    assert type(received) is ShortageError and isinstance(received, TransportError)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "x"), RuntimeError("x"), ValueError("Too many open files")]
)
def test_nothing_else_is(error: Exception) -> None:
    assert shortage(error) is None
    assert as_hapi_error(error).slug == "internal"


def too_many(*args: object, **options: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_store_that_cannot_be_opened_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(make_store(tmp_path / "store")))
    monkeypatch.setattr("os.open", too_many)
    with pytest.raises(ShortageError):
        store.get("datasets/digits/manifest.json")


def test_weights_that_cannot_be_read_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    monkeypatch.setattr("os.open", too_many)
    with pytest.raises(ModelError) as raised:
        open_source(tmp_path / "weights.safetensors")
    assert type(as_hapi_error(raised.value)) is ShortageError


def test_an_answer_without_a_descriptor_for_it(
    folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes through the event loop."""
    with served(folder) as server:
        whole = exchange(server.port, "POST", SAMPLES, known.samples())
        asked = []
        monkeypatch.setattr(
            "hapi.server.http.response_stream.os.dup", lambda number: asked.append(number) or too_many()
        )
        again = exchange(server.port, "POST", SAMPLES, known.samples())
        assert asked and again.status == 200 and len(again.body) == len(whole.body)


def test_a_server_without_descriptors(folder: Path, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as server:
        with monkeypatch.context() as patch:
            patch.setattr("hapi.store.local.os.open", too_many)
            answer = exchange(server.port, "POST", SAMPLES, known.samples())
            check_problem(answer, 503, "descriptors")
            assert answer.headers["Retry-After"] == "1"
        assert exchange(server.port, "POST", SAMPLES, known.samples()).status == 200
