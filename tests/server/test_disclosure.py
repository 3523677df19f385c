"""What errors tell clients of the store, and what they do not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.http_tools import EXTRACT, SAMPLES, TENSORS, Known, check_problem, exchange, make_store, served

from hapi.errors import HapiError, NotFoundError, StoreError
from hapi.server.http.disclosure import Disclosure
from hapi.store.connect import connect
from hapi.store.error_mapping import store_error

STORE = "/srv/data of all/store"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (f"{STORE}/datasets/a/manifest.json: damaged; pack it again",
         "the store/datasets/a/manifest.json: damaged; pack it again"),
        ("see /v1/datasets and /v1/models", "see /v1/datasets and /v1/models"),
        ("weights '/root/.cache/torch/x.pth' cannot be read", "weights '(a path)' cannot be read"),
        ("no such file: '/mnt/team of all/x y/z.jpg', nor \"/data\"", "no such file: '(a path)', nor \"(a path)\""),
        ("a name without '/', asked for as '/v1/x y'", "a name without '/', asked for as '/v1/x y'"),
        ("the store at http://10.0.0.5:9000/bucket answered 503", "the store at (an address) answered 503"),
        ("keys of ~/.aws/credentials, or ~root/x/y", "keys of (a path), or (a path)"),
        ("split 4 is layer 'a' here and '<b>x</b>' there", "split 4 is layer 'a' here and '<b>x</b>' there"),
        ("GET /v1extra/x and/or 25 MB/s, 1/2, HTTP/1.1", "GET (a path) and/or 25 MB/s, 1/2, HTTP/1.1"),
    ],
)  # fmt: skip
def test_paths_and_addresses_are_left_out(message: str, told: str) -> None:
    error = StoreError(message, retry_after=3.0)
    shown = Disclosure(STORE).of(error)
    assert str(shown) == told and type(shown) is StoreError and shown.retry_after == 3.0
    assert str(error) == message
    assert Disclosure(STORE).of(error, everything=True) is error


def test_a_message_of_its_own() -> None:
    error = NotFoundError("it has: a, b, c", outside="there is no such thing")
    assert str(Disclosure(STORE).of(error)) == "there is no such thing"


@pytest.mark.parametrize(
    "said",
    ["<Code>NoSuchBucket</Code>", "status code: 403", "HTTP error: error sending request Debug source: dns error",
     "anything at all of s3://secret-bucket"],
)  # fmt: skip
def test_nothing_of_a_remote_store(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("AWS_ACCESS_KEY_ID", "secret-key"), ("AWS_SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(name, value)
    url = "s3://secret-bucket/prefix"
    error = store_error(OSError(said), url, "datasets/a/manifest.json", connect(url))
    assert "secret" in str(error)
    told = str(Disclosure(url).of(error))
    assert "secret" not in told and "datasets/a/manifest.json" in told


def requests(known: Known) -> list[tuple[str, Any]]:
    """Requests for what is not there, by all ways."""
    dataset = {"name": "nosuch", "version": known.dataset.version}
    other = {"name": "digits", "version": "0" * len(known.dataset.version)}
    return [
        ("/v1/datasets/nosuch", None),
        ("/v1/models/nosuch", None),
        ("/v1/datasets/unfinished", None),
        ("/v1/datasets/damaged", None),
        (EXTRACT, known.extract(dataset=dataset)),
        (EXTRACT, known.extract(dataset=other)),
        (SAMPLES, known.samples() | {"dataset": dataset}),
        (SAMPLES, known.samples([10**6])),
        (TENSORS, known.tensors() | {"name": "nosuch"}),
        (TENSORS, known.tensors() | {"names": ["nosuch"]}),
        (TENSORS, known.tensors() | {"digest": "0" * 32}),
    ]


def test_tenants_do_not_learn_of_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its folder nor what else is in it; the log keeps all of that."""
    caplog.set_level(logging.INFO)
    folder = make_store(tmp_path / "store")
    known = Known(folder)
    (folder / "datasets" / "unfinished").mkdir()
    (folder / "datasets" / "damaged").mkdir()
    (folder / "datasets" / "damaged" / "manifest.json").write_text("{}")
    with served(folder, token="a-long-secret-token") as server:
        headers = {"Authorization": "Bearer a-long-secret-token"}
        for path, document in requests(known):
            method = "GET" if document is None else "POST"
            answer = exchange(server.port, method, path, document, headers)
            detail = check_problem(answer, (404, 409, 500))
            assert str(tmp_path) not in detail, (path, detail)
            asked = path + json.dumps(document)
            for name in ("digits", "pushed", "unfinished", "damaged"):
                assert name not in detail or name in asked, (path, detail)
        status = exchange(server.port, "GET", "/v1/status", headers=headers)
        assert str(tmp_path) not in status.body.decode()
        assert len(status.json()["errors"]) == len(requests(known))
    logged = " ".join(str(vars(record).get("detail", "")) for record in caplog.records)
    assert str(folder) in logged and "digits" in logged


def test_errors_keep_what_else_they_say() -> None:
    for kind in (HapiError, NotFoundError):
        error = kind("x", retry_after=1.0, expected_wait=2.0)
        assert Disclosure("s").of(error).to_problem() == error.to_problem()


def test_an_owner_is_told_all(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    with served(folder, token="a-long-secret-token", tell_store=True) as server:
        headers = {"Authorization": "Bearer a-long-secret-token"}
        answer = exchange(server.port, "GET", "/v1/datasets/nosuch", headers=headers)
        check_problem(answer, 404, str(folder), "digits")
