"""The OpenAPI document is that of the server: each route and each kind of error, and answers as they are."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.http_tools import (
    EXTRACT,
    PUSHED_SPEC,
    SAMPLES,
    TENSORS,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    pushed_model,
    served,
)

from hapi.clocks import StageClock
from hapi.errors import URN, by_slug
from hapi.repository.packs.place import pack_key
from hapi.repository.push import push
from hapi.server.context import RequestClock, RequestContext
from hapi.server.http import openapi
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.status import RunningRequest
from hapi.store.open import open_store
from hapi.wire import messages, schemas
from hapi.wire.report import STAGES

DOCUMENT = json.loads(openapi.document())
PACK = "5" * 32


@pytest.fixture(scope="module")
def application(folder: Path) -> Iterator[ServedApplication]:
    open_store(str(folder)).put(pack_key(PACK), b"bytes of tensors")
    with served(folder) as application:
        yield application


def test_it_is_served_to_who_may_ask(folder: Path, application: ServedApplication) -> None:
    answer = exchange(application.port, "GET", messages.OPENAPI_PATH)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert answer.json() == DOCUMENT
    with served(folder, token="sixteen letters!") as guarded:
        check_problem(exchange(guarded.port, "GET", messages.OPENAPI_PATH), 401)


def test_it_has_every_route_and_no_other(application: ServedApplication) -> None:
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in application.application.web.router.routes()
    }
    told = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert {route for route in routes if route[0] != "head"} == told  # HEAD goes with GET


def test_every_kind_of_error_has_its_answer() -> None:
    for slug, kind in by_slug().items():
        status = openapi.METHOD_STATUS if slug == "http" else kind.status
        problem = DOCUMENT["components"]["schemas"][f"Problem{status}"]
        assert URN + slug in problem["properties"]["type"]["enum"]
    used = {
        status
        for methods in DOCUMENT["paths"].values()
        for o in methods.values()
        for status in o["responses"]
    }
    assert used == {"200", "206", "304", *DOCUMENT["components"]["responses"]}


def test_paths_without_a_token_are_those_that_tell_nothing(folder: Path) -> None:
    with served(folder, token="sixteen letters!") as guarded:
        for path, methods in DOCUMENT["paths"].items():
            for method, operation in methods.items():
                answer = exchange(guarded.port, method.upper(), filled(path))
                assert (answer.status == 401) == ("security" not in operation), (method, path)


@cache
def structure() -> str:
    """Digest of the structure of the pushed model."""
    model = pushed_model()
    store = open_store(f"memory://{uuid.uuid4().hex}")
    return push(store, "pushed", model, PUSHED_SPEC).model.manifest.structure.digest


def filled(path: str) -> str:
    """The path of a real request."""
    return path.format(name="digits", model="pushed@1", pack=PACK, digest=structure(), seed=0, count=3)


def content_of(path: str) -> Any:
    """The schema of the JSON answer to a GET of ``path``."""
    return DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]


def closed(schema: Any) -> Any:
    """The schema with no field allowed that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return (
        {"additionalProperties": False, **inner}
        if schema.get("type") == "object" and "properties" in schema
        else inner
    )


@pytest.mark.parametrize("path", [p for p, m in DOCUMENT["paths"].items() if "get" in m])
def test_answers_have_all_told_fields_and_no_other(application: ServedApplication, path: str) -> None:
    answer = exchange(application.port, "GET", filled(path))
    assert answer.status == 200
    ((media_type, content),) = DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"].items()
    assert answer.headers["Content-Type"].split(";")[0] == media_type
    if media_type == "application/json":
        jsonschema_rs.Draft202012Validator(closed(content["schema"])).validate(answer.json())


def test_status_tells_requests_and_errors_as_told(application: ServedApplication, known: Known) -> None:
    exchange(application.port, "POST", SAMPLES, known.samples([99]))
    status = exchange(application.port, "GET", messages.STATUS_PATH).json()
    assert status["errors"]
    jsonschema_rs.Draft202012Validator(closed(content_of(messages.STATUS_PATH))).validate(status)


def test_a_request_at_work_is_told_as_it_is(known: Known) -> None:
    asked = messages.ExtractRequest.from_json(known.extract())
    context = RequestContext(clock=RequestClock(StageClock(STAGES), None), tenant=Tenant(name="b"))
    at_work = RunningRequest(request_id="a", asked=asked, context=context, waited=0.5)
    schema = content_of(messages.STATUS_PATH)["properties"]["running"]["items"]
    jsonschema_rs.Draft202012Validator(closed(schema)).validate(at_work.to_json(at_work.began + 1))


AUGMENTED = {"resize": 73, "crop": 64, "mean": [0.5] * 3, "std": [0.5] * 3, "seed": 1, "epoch": 2,
             "augment": {"scale": [0.1, 1.0], "ratio": [0.75, 1.3], "flip": 0.5, "hue": 0.5}}  # fmt: skip
WINDOWS = {"seed": 0, "epoch": 3, "group": 512, "window": 64}
SEQUENCE = {"seed": 0, "epoch": 3, "shuffle": {"group": 512, "window": 64}}


def test_good_requests_fit_their_schemas(known: Known) -> None:
    extract = jsonschema_rs.Draft202012Validator(schemas.extract_request())
    for body in (known.extract(), known.extract(transform=None), known.extract(transform=AUGMENTED, windows=WINDOWS),
                 known.extract(job="6f1e", time_layers=True)):  # fmt: skip
        messages.ExtractRequest.from_json(body)
        extract.validate(body)
    stored = jsonschema_rs.Draft202012Validator(schemas.samples_request())
    by_range = {"dataset": known.samples()["dataset"], "sequence": SEQUENCE, "start": 0, "stop": 40}
    for body in (known.samples(), by_range, by_range | {"sequence": SEQUENCE | {"shuffle": "full"}}):
        messages.SamplesRequest.from_json(body)
        stored.validate(body)
    jsonschema_rs.Draft202012Validator(schemas.tensors_request()).validate(known.tensors())


def test_bodies_of_the_document_are_those_of_the_schemas() -> None:
    made = {
        EXTRACT: schemas.extract_request(),
        SAMPLES: schemas.samples_request(),
        TENSORS: schemas.tensors_request(),
    }
    for path, schema in made.items():
        body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == json.loads(json.dumps(schema))


def test_a_field_that_a_class_does_not_have_is_noticed() -> None:
    with pytest.raises(TypeError, match="DatasetReference has no colour"):
        schemas.of_class(schemas.DatasetReference, {"colour": schemas.NAME})
    with pytest.raises(TypeError, match="no JSON form"):
        schemas.of_type(bytes)
