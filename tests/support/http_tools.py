"""What the hostile-input tests share: a small store, a served application, raw requests, and what is right."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hapi.data.dataset import find_dataset
from hapi.data.transforms.pipeline import input_batch
from hapi.errors import PROBLEM_MEDIA_TYPE
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.prefix import zoo_reference
from hapi.repository.push import push
from hapi.server.http.app import Application
from hapi.server.http.listening import listen
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.server.tenants.by_token import Tenants
from hapi.store.open import open_store
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.references import TransformSpec
from support.waiting import PATIENCE
from support.waiting import until as until

COUNT, SIDE, SPLIT = 40, 32, 4
SPEC = ModelSpec(architecture="resnet18", weights="random:0", input_shape=(3, SIDE, SIDE))
PUSHED_SPEC = ModelSpec(architecture="squeezenet1_1", weights="random:1", input_shape=(3, 64, 64))
TRANSFORM = TransformSpec.for_image_size(SIDE)
EXTRACT, SAMPLES, TENSORS = "/v1/extract", "/v1/samples", "/v1/tensors"


@cache
def resnet() -> Any:
    """The model of the good requests, built once."""
    return build(SPEC)


@cache
def pushed_model() -> Any:
    """The model in every store, built once."""
    return build(PUSHED_SPEC)


def make_store(folder: Path) -> Path:
    """A store with 40 real digits and a small pushed model."""
    store = open_store(str(folder))
    options = PackOptions(limit=COUNT, transform=TRANSFORM, shard_bytes=2000)
    pack(open_source("sklearn:digits"), store, "digits", options)
    push(store, "pushed", pushed_model(), PUSHED_SPEC)
    return folder


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Known:
    """Good requests against a store, and what the right answers hold."""

    def __init__(self, folder: Path, name: str = "digits") -> None:
        self.store = open_store(str(folder))
        self.dataset = find_dataset(self.store, name)
        self._features: dict[tuple[int, ...], torch.Tensor] = {}

    def extract(self, ids: list[int] | None = None, split: int = SPLIT, **changes: Any) -> dict[str, Any]:
        """A good request for features."""
        model = resnet()
        document = {
            "dataset": self.dataset.reference.to_json(),
            "model": zoo_reference(SPEC, model, split).to_json(),
            "split": split,
            "split_name": model.layers[split - 1].name,
            "ids": [3, 39, 0, 17] if ids is None else ids,
            "transform": TRANSFORM.to_json(),
        }
        return {**document, **changes}

    def model_at(self, side: int) -> dict[str, Any]:
        """The reference of the same layers for inputs of another size."""
        spec = replace(SPEC, input_shape=(3, side, side))
        return zoo_reference(spec, build(spec), SPLIT).to_json()

    def samples(self, ids: list[int] | None = None) -> dict[str, Any]:
        """A good request for stored bytes."""
        return {"dataset": self.dataset.reference.to_json(), "ids": [5, 0, 5] if ids is None else ids}

    def tensors(self) -> dict[str, Any]:
        """A good request for two tensors of the pushed model."""
        pushed = pushed_model()
        digest = pushed.prefix_digest(len(pushed.layers))
        return {"name": "pushed", "digest": digest, "names": pushed.tensor_names(0, 1)}

    def features(self, ids: list[int], split: int = SPLIT) -> torch.Tensor:
        """What a right answer to :meth:`extract` holds; the first few are kept, since most tests ask for the same."""
        if (found := self._features.get((split, *ids))) is None:
            inputs = input_batch(self.dataset.read(np.array(ids)), self.dataset.layout, TRANSFORM)
            with torch.inference_mode():
                found = resnet().segment(0, split, frozen=True)(inputs)
            if len(self._features) < 16 and len(ids) <= COUNT:  # some tests count this process's memory
                self._features[split, *ids] = found
        return found

    def check_features(self, body: bytes, ids: list[int], split: int = SPLIT) -> None:
        """``body`` is a whole answer with the right features, labels and ids."""
        got_ids, (features, labels) = received(body, 2)
        assert got_ids == ids
        assert labels.view(np.int64).tolist() == self.dataset.labels(np.array(ids)).tolist()
        expected = self.features(ids, split)
        got = torch.from_numpy(features.view(np.float32)).reshape(expected.shape)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def received(body: bytes, tensors: int) -> tuple[list[int], list[np.ndarray]]:
    """Ids and the bytes of each of ``tensors`` tensors, over all frames of a body."""
    reader = FrameReader(BufferSource(iter([body])))
    ids: list[int] = []
    parts: list[list[np.ndarray]] = [[] for _ in range(tensors)]

    def sink(header: Any) -> list[memoryview]:
        arrays = [np.empty(t.nbytes, np.uint8) for t in header.tensors]
        for known, array in zip(parts, arrays, strict=True):
            known.append(array)
        return [a.data for a in arrays]

    while not isinstance(header := reader.next(sink), StreamEnd):
        ids += header.ids.tolist()
    return ids, [np.concatenate(p) for p in parts]


def exchange(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    seconds: float = PATIENCE,
) -> Answer:
    """One request on a connection of its own; a dict or list as ``body`` is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body=data, headers=headers or {})
        response = connection.getresponse()
        try:
            received_body = response.read()
        except http.client.IncompleteRead as cut_off:  # an error frame in place of the rest
            received_body = cut_off.partial
        return Answer(response.status, dict(response.getheaders()), received_body)
    finally:
        connection.close()


def raw(port: int, data: bytes, seconds: float = PATIENCE, *, half_close: bool = False) -> bytes:
    """Send these bytes on a connection of its own, return all that comes until it closes or stays silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as sock:
        try:
            sock.sendall(data)
            if half_close:
                with contextlib.suppress(OSError):  # the server is gone already
                    sock.shutdown(socket.SHUT_WR)
            return _drained(sock)
        except ConnectionError:
            return b""


def _drained(sock: socket.socket) -> bytes:
    parts = []
    try:
        while part := sock.recv(1 << 16):
            parts.append(part)
    except (TimeoutError, ConnectionError):
        pass
    return b"".join(parts)


def request_bytes(path: str, body: bytes, method: str = "POST", **headers: str) -> bytes:
    """A request as it goes over the socket."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def check_problem(answer: Answer, status: int | tuple[int, ...], *words: str) -> str:
    """A problem document with this status and a one-line detail that has these words; returns the detail."""
    allowed = (status,) if isinstance(status, int) else status
    assert answer.status in allowed, (answer.status, answer.body[:500])
    assert answer.headers["Content-Type"].split(";")[0] == PROBLEM_MEDIA_TYPE
    problem = answer.json()
    assert set(problem) - {"retry_after", "expected_wait"} == {"type", "title", "status", "detail"}
    assert problem["status"] == answer.status
    assert problem["type"].startswith("urn:hapi:problem:")
    detail = problem["detail"]
    assert isinstance(detail, str)
    assert 0 < len(detail) < 1000 and "\n" not in detail and "Traceback" not in detail
    for word in words:
        assert word in detail, (word, detail)
    return detail


def metric(port: int, name: str) -> float:
    """One metric's value, summed over its labels."""
    text = exchange(port, "GET", "/metrics").body.decode()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(name) and line[len(name)] in " {"
    )


def paths_of(document: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of a document, nested ones included."""
    found = [prefix] if prefix else []
    if isinstance(document, dict):
        for key, value in document.items():
            found += paths_of(value, (*prefix, key))
    return found


MISSING = object()


def with_field(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with the field at ``path`` replaced, or removed for ``MISSING``."""
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


class ServedApplication:
    """The real application on a loopback port, its event loop in a thread of this process."""

    def __init__(
        self,
        folder: Path,
        *,
        token: str | None = None,
        tenants: Tenants | None = None,
        tls: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> None:
        self._tls = tls
        self.settings = ServerSettings(store=str(folder), **{"device": "cpu", "share_memory": 0, **settings})
        self.service = Service(self.settings, open_store(str(folder)))
        self.application = Application(self.service, tenants or Tenants(token=token))
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="served-application")
        self._thread.start()
        if not self._ready.wait(PATIENCE):
            raise AssertionError("the application did not start")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        runner = self.application.runner()
        await runner.setup()
        await listen(runner, self.application.connections, "127.0.0.1", 0, self._tls)
        self.port = runner.addresses[0][1]
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def close(self) -> None:
        """Stop serving and end every thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        self.application.close()
        self.service.close()

    def tasks(self) -> int:
        """Tasks on its event loop."""
        return len(asyncio.all_tasks(self._loop))

    def idle(self, seconds: float = 20) -> None:
        """Wait until nothing is under way."""
        until(lambda: self.application.admission.running == 0, seconds, "the end of all requests")


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[ServedApplication]:
    """A :class:`ServedApplication` that is ended whatever happens."""
    application = ServedApplication(folder, **settings)
    try:
        yield application
    finally:
        application.close()
