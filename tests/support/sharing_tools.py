"""Requests to a service in this process, for the tests of shared features."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi.server.context import RequestContext
from hapi.server.frame_stream import FrameStream
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.waiting import Interest
from hapi.wire import messages
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.report import RequestReport
from support.http_tools import Known, received

COS_BATCH = 16


@contextmanager
def sharing_service(folder: Path, **settings: Any) -> Iterator[Service]:
    """A service on one CPU with COS batches of 16 samples."""
    options = {"device": "cpu", "cos_batch": COS_BATCH, "threads": 1, **settings}
    service = Service(ServerSettings(store=str(folder), **options), open_store(str(folder)))
    try:
        yield service
    finally:
        service.close()


@dataclass(frozen=True)
class Extracted:
    """An answer's features and labels, as bytes, and the server's report."""

    features: bytes
    labels: bytes
    report: RequestReport


def opened(service: Service, known: Known, ids: list[int], **changes: Any) -> FrameStream:
    """The answer to a request for ``ids``, which has not begun."""
    request = service.request(messages.EXTRACT_PATH, json.dumps(known.extract(ids, **changes)).encode())
    return service.stream(request, RequestContext(clock=service.clock(request), interest=Interest("test")))


def body_of(stream: FrameStream) -> bytes:
    """All frames of an answer."""
    try:
        return b"".join(bytes(part) for frame in stream.frames for part in frame)
    finally:
        stream.close()


def parsed(body: bytes, ids: list[int]) -> Extracted:
    """A whole answer for ``ids``."""
    got, (features, labels) = received(body, 2)
    assert got == ids
    reader = FrameReader(BufferSource(iter([body])))
    while not hasattr(
        end := reader.next(lambda header: [memoryview(bytearray(t.nbytes)) for t in header.tensors]), "report"
    ):
        pass
    return Extracted(features.tobytes(), labels.tobytes(), RequestReport.from_json(end.report))  # type: ignore[union-attr]


def extracted(service: Service, known: Known, ids: list[int], **changes: Any) -> Extracted:
    """The whole answer to a request for ``ids``."""
    return parsed(body_of(opened(service, known, ids, **changes)), ids)
