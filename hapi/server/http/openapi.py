"""The interface as an OpenAPI 3.1 document, for ``GET /v1/openapi.json``.

It is made from the server's own definitions: paths and bounds from :mod:`hapi.wire.messages`, bodies from the
classes that parse and write them, problems from the error tree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

from hapi import __version__
from hapi.data.manifest import SampleLayout
from hapi.errors import (
    PROBLEM_MEDIA_TYPE,
    URN,
    BadRequestError,
    BusyError,
    ConflictError,
    DataError,
    DeadlineError,
    DeviceMemoryError,
    DrainingError,
    ForbiddenError,
    HapiError,
    HostMemoryError,
    NotFoundError,
    RangeError,
    ShortageError,
    StoreError,
    StuckError,
    TooLargeError,
    UnauthorizedError,
    UnprocessableError,
    by_slug,
)
from hapi.server.device.host_memory import HOST_KINDS
from hapi.server.http.overview import SECRET
from hapi.server.http.problems import HttpError
from hapi.server.packs import descriptions
from hapi.server.scheduling.admission import REASONS
from hapi.server.settings import ServiceSettings
from hapi.server.status import DeviceStatus, Failure
from hapi.wire import messages, schemas
from hapi.wire.cache_room import MOST_BYTES, MOST_RATE, CacheRoom
from hapi.wire.frames import MEDIA_TYPE, OLDEST_VERSION, UNNAMED_VERSION, VERSION_HEADER, WIRE_VERSION
from hapi.wire.held_out import PART
from hapi.wire.references import MAX_SEED
from hapi.wire.schemas import (
    COUNT,
    DIGEST,
    MODEL,
    NAME,
    SECONDS,
    TEXT,
    Schema,
    extended,
    listed,
    of_class,
    of_type,
    record,
    whole,
)
from hapi.wire.sequences import MOST_PLACE
from hapi.wire.warm_up import WARM_PATH, WarmUpState

JSON_MEDIA_TYPE, BYTES_MEDIA_TYPE = "application/json", "application/octet-stream"

_EVERYWHERE: tuple[type[HapiError], ...] = (
    BadRequestError,
    HapiError,
    DrainingError,
    HostMemoryError,
    ShortageError,
)
"""Possible answers to any request: it is malformed, the server has a defect or cannot take it."""
_PAGE = (*_EVERYWHERE, ForbiddenError)
_READY = (*_EVERYWHERE, StuckError)
_AUTHORISED = (*_PAGE, UnauthorizedError)
_READING = (*_AUTHORISED, NotFoundError, BusyError, DeadlineError, StoreError, DataError)
_WARM = (*_AUTHORISED, BusyError, TooLargeError)
_PACK = (*_READING, RangeError, TooLargeError)
_STREAM = (*_READING, ConflictError, TooLargeError, UnprocessableError, DeviceMemoryError)
METHOD_STATUS = HTTPStatus.METHOD_NOT_ALLOWED.value
"""The status of :class:`HttpError` that the interface tells of: the path takes other methods."""
_IN_ALL = (messages.REQUEST_ID_HEADER, messages.TRACE_HEADER)
"""Headers of all answers."""
_IN_PATHS: Mapping[str, Schema] = {
    "name": NAME,
    "model": MODEL,
    "pack": DIGEST,
    "digest": DIGEST,
    "seed": whole(0, MAX_SEED),
    "count": whole(1, MOST_PLACE),
}
"""Parameters that stand in paths."""


@dataclass(frozen=True)
class Operation:
    """One request that the server answers."""

    method: str
    path: str
    summary: str
    answer: tuple[str, Schema]
    """Media type and schema of the answer with status 200."""
    errors: tuple[type[HapiError], ...]
    body: Schema | None = None
    ranges: bool = False
    """True when a range of the answer may be asked for."""

    @property
    def open(self) -> bool:
        """True when it needs no token."""
        return UnauthorizedError not in self.errors


def operations() -> list[Operation]:
    """Return all requests that the server answers, one for each route."""
    get, post = "get", "post"
    frames: tuple[str, Schema] = (MEDIA_TYPE, {})
    return [
        Operation(post, messages.EXTRACT_PATH, "Layers 1..split over some samples.", frames, _STREAM,
                  schemas.extract_request()),
        Operation(post, messages.SAMPLES_PATH, "The stored bytes of some samples.", frames, _STREAM,
                  schemas.samples_request()),
        Operation(post, messages.TENSORS_PATH, "Tensors of a pushed model by name.", frames, _STREAM,
                  schemas.tensors_request()),
        Operation(post, WARM_PATH, "Layers to be loaded ahead.", _json(record({"state": of_type(WarmUpState)})), _WARM,
                  schemas.warm_up_request()),
        Operation(get, messages.DATASETS_PATH, "The datasets that there are.", _json(_dataset_list()), _READING),
        Operation(get, messages.DATASETS_PATH + "/{name}", "One dataset's version, classes, layout, transform.",
                  _json(schemas.dataset_description(of_class(SampleLayout))), _READING),
        Operation(get, f"{messages.DATASETS_PATH}/{{name}}/{messages.CHANGED}",
                  "Files of a dataset that changed since they were indexed.",
                  _json(record({"version": DIGEST, "changed": COUNT})), _READING),
        Operation(get, f"{messages.DATASETS_PATH}/{{name}}/{PART}/{{seed}}/{{count}}",
                  "Samples of each class among those that a share holds out.",
                  _json(record({"version": DIGEST, "label_counts": listed(COUNT)})), _READING),
        Operation(get, messages.MODELS_PATH, "The pushed models that there are.", _json(descriptions.model_list()),
                  _READING),
        Operation(get, messages.MODELS_PATH + "/{model}", "One version of a pushed model: its tensors and digests. The "
                  "name may be NAME@VERSION, NAME@TAG or NAME@DIGEST.", _json(descriptions.model()), _READING),
        Operation(get, messages.STRUCTURES_PATH + "/{digest}", "Layers and tensors of a structure that models have.",
                  _json(descriptions.structure()), _READING),
        Operation(get, messages.PACKS_PATH + "/{pack}", "Bytes of stored tensors, or one range of them.",
                  (BYTES_MEDIA_TYPE, {}), _PACK, ranges=True),
        Operation(get, messages.VERSION_PATH, "Version of Hapi and of the wire.", _json(_version()), _AUTHORISED),
        Operation(get, messages.OPENAPI_PATH, "This document.", _json({"type": "object"}), _AUTHORISED),
        Operation(get, messages.STATUS_PATH, "Present state of the server.", _json(_status()), _AUTHORISED),
        Operation(get, messages.METRICS_PATH, "Metrics for Prometheus.", ("text/plain", TEXT), _AUTHORISED),
        Operation(get, messages.HEALTH_PATH, "The process lives.", _json(_state("alive")), _EVERYWHERE),
        Operation(get, messages.READY_PATH, "It takes work.", _json(_state("ready")), _READY),
        Operation(get, messages.PAGE_PATH, "A page that shows the server's present state.", ("text/html", TEXT), _PAGE),
    ]  # fmt: skip


@cache
def document() -> bytes:
    """Return the document, as JSON."""
    return json.dumps(_document()).encode()


def _document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations():
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hapi",
            "version": __version__,
            "description": f"Near-data transfer learning, wire version {WIRE_VERSION}. "
            "docs/protocol.md explains it and has the format of frames.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                f"Problem{status}": _problem(status, kinds) for status, kinds in _by_status().items()
            },
            "responses": {str(status): _problem_response(status) for status in _by_status()},
            "headers": _headers(),
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    media_type, schema = operation.answer
    answered = {"description": operation.summary, "content": {media_type: {"schema": schema}}}
    own_headers = (messages.CODE_HEADER,) if media_type == MEDIA_TYPE else ()
    statuses = sorted({error.status for error in operation.errors} | {METHOD_STATUS})
    named = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in _IN_PATHS.items()
        if f"{{{name}}}" in operation.path
    ]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            *named,
            *([_deadline()] if DeadlineError in operation.errors else []),
            *([_stall(), _reads()] if media_type == MEDIA_TYPE else []),
            _request_id(),
            _header(messages.TRACE_HEADER, TEXT, "W3C Trace Context: logged, and answered as it came."),
        ],
        "responses": {
            "200": {**answered, "headers": _header_links(*_IN_ALL, *own_headers)},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses},
        },
    }
    if operation.ranges:
        described["parameters"].append(_header("Range", TEXT, "One range of bytes (RFC 9110, section 14)."))
        described["responses"]["206"] = {**described["responses"]["200"], "description": "The range."}
        described["responses"]["304"] = {"description": "The asker has it: If-None-Match is its ETag."}
    if operation.open:
        described["security"] = []
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON_MEDIA_TYPE: {"schema": operation.body}},
        }
    return described


def _deadline() -> dict[str, Any]:
    described = f"at most {messages.MAX_DEADLINE:.0f}"
    text = f"Seconds from its arrival that the request may wait in the queue: above 0, {described}."
    return _header(messages.DEADLINE_HEADER, schemas.text(messages.DECIMAL_PATTERN), text)


def _stall() -> dict[str, Any]:
    text = "Share of its time, 0 to 1, in which the client's training loop waits for batches."
    return _header(messages.STALL_HEADER, schemas.text(messages.DECIMAL_PATTERN), text)


def _reads() -> dict[str, Any]:
    text = f"Newest wire version that the client reads, {OLDEST_VERSION} or later; none: {UNNAMED_VERSION}."
    return _header(VERSION_HEADER, schemas.text(re.compile("[0-9]{1,3}")), text)


def _request_id() -> dict[str, Any]:
    text = "Up to 64 ASCII letters and digits that name the request in the log; the server makes one for any other."
    return _header(messages.REQUEST_ID_HEADER, TEXT, text)


def _header(name: str, schema: Schema, text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": schema}


# -- problems --------------------------------------------------------------------------------------------


def _by_status() -> dict[int, list[type[HapiError]]]:
    """The error tree, by the status that carries each kind."""
    found: dict[int, list[type[HapiError]]] = {}
    for kind in by_slug().values():
        found.setdefault(METHOD_STATUS if kind is HttpError else kind.status, []).append(kind)
    return dict(sorted(found.items()))


def _problem(status: int, kinds: Iterable[type[HapiError]]) -> Schema:
    known = {
        "type": {"enum": [URN + kind.slug for kind in kinds]},
        "title": TEXT,
        "status": {"const": status},
        "detail": TEXT,
        "retry_after": SECONDS,
        "expected_wait": SECONDS,
    }
    return record(known, ("retry_after", "expected_wait"), closed=True)


def _problem_response(status: int) -> dict[str, Any]:
    kinds = _by_status()[status]
    own = {401: "WWW-Authenticate", METHOD_STATUS: "Allow", RangeError.status: "Content-Range"}
    names = (own.get(status, "Retry-After"),)
    return {
        "description": "; ".join(kind.title for kind in kinds),
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/Problem{status}"}}},
        "headers": _header_links(*_IN_ALL, *names),
    }


def _headers() -> dict[str, Any]:
    return {
        messages.REQUEST_ID_HEADER: {"schema": TEXT, "description": "The id that the server's log has."},
        messages.TRACE_HEADER: {"schema": TEXT, "description": "That of the request, if it had one."},
        messages.CODE_HEADER: {
            "schema": TEXT,
            "description": "The version of the code that computes the answer.",
        },
        "Retry-After": {
            "schema": COUNT,
            "description": "Seconds after which to ask again, where they are known.",
        },
        "WWW-Authenticate": {"schema": {"const": "Bearer"}},
        "Allow": {"schema": TEXT, "description": "The methods that the path takes."},
        "Content-Range": {"schema": TEXT, "description": "The size of the object, in bytes."},
    }


def _header_links(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


# -- answers ---------------------------------------------------------------------------------------------


def _json(schema: Schema) -> tuple[str, Schema]:
    return JSON_MEDIA_TYPE, schema


def _state(word: str) -> Schema:
    return record({"status": {"const": word}})


def _version() -> Schema:
    known = {"hapi": TEXT, "wire": {"const": WIRE_VERSION}, "server": TEXT, "code": DIGEST, "computes": TEXT}
    rate = whole(1, MOST_RATE)
    room = of_class(CacheRoom, {"bytes": whole(0, MOST_BYTES), "read": rate, "write": rate}, optional=True)
    return record({**known, "machine": TEXT, "wait": SECONDS, "cache": room}, ("cache",))


def _dataset_list() -> Schema:
    return record({"datasets": listed(record({"name": NAME, "version": DIGEST, "count": COUNT}))})


def _status() -> Schema:
    return record(
        {
            "hapi": TEXT,
            "wire": {"const": WIRE_VERSION},
            "server": TEXT,
            "state": {"enum": ["serving", "lame-duck", "draining"]},
            "time": SECONDS,
            "uptime": SECONDS,
            "settings": of_class(ServiceSettings, leave_out=SECRET),
            "devices": listed(of_class(DeviceStatus)),
            "host_memory": record(
                {"budget_bytes": of_type(int | None), "reserved": _counts(*HOST_KINDS), "waiting": COUNT}
            ),
            "queue": _counts("running", "slots", "queued", "max_queued"),
            "certificate": TEXT,
            "stuck": TEXT,
            "lost_threads": _counts("now", "ever", "most"),
            "scrub": extended(_counts("rate", "bytes", "damaged", "findings"), {"last_complete": SECONDS}),
            "trainers": extended(_counts("jobs"), {"stalled": SECONDS, "wait": SECONDS}),
            "tenants": listed(_tenant()),
            "tenants_in_all": COUNT,
            "running": listed(_running()),
            "running_in_all": COUNT,
            "errors": listed(of_class(Failure)),
        }
    )


def _tenant() -> Schema:
    counts = _counts("queued", "running", "served", "sent_bytes")
    return extended(
        counts,
        {
            "name": TEXT,
            "weight": SECONDS,
            "shed": _counts(*REASONS),
            "cost_seconds": SECONDS,
            "expected_wait": SECONDS,
            "trainer_wait": SECONDS,
        },
    )


def _running() -> Schema:
    words = dict.fromkeys(("id", "tenant", "model", "dataset", "split_name", "device"), TEXT)
    kind = {"kind": {"enum": ["extract", "samples", "tensors"]}}
    seconds = dict.fromkeys(("waited", "seconds"), SECONDS)
    stages = {"stages": listed(TEXT)}
    return extended(_counts("split", "cos_batch", "done", "total"), {**words, **kind, **seconds, **stages})


def _counts(*names: str) -> Schema:
    return record(dict.fromkeys(names, COUNT))
