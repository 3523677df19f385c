"""The sending side of ``benchmarks wire``: the same bytes by a plain socket, by plain aiohttp and by Hapi.

A process of its own, pinned to a core, that ends when its standard input closes. Hapi's way is the real
application (admission, streaming, frames, checksums); only its features are there already instead of being
computed, since the wire is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping

import numpy as np
from aiohttp import web

from hapi.server.context import RequestContext
from hapi.server.frame_stream import Frames, FrameStream
from hapi.server.http.app import Application
from hapi.server.scheduling.costs import Request
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.wire import messages
from hapi.wire.frames import (
    END_BYTES,
    SLICE_BYTES,
    FrameHeader,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    frame_bytes,
)
from hapi.wire.labels import LabelForm

FEATURE_SHAPE = (256, 14, 14)
"""Shape of one sample's features: ResNet18 after layer3; 200,704 bytes in float32."""
FEATURE_BYTES = 256 * 14 * 14 * 4
COS_BATCH = 16
"""Samples of one frame; the server's default."""


class ResidentFeatures(Service):
    """A service whose answer to every POST is the same prepared features, a frame for each COS batch."""

    def __init__(self, samples: int, device: str = "cpu") -> None:
        store = "memory://bench-wire"
        super().__init__(ServerSettings(store=store, device=device), open_store(store))
        self.features = np.random.default_rng(0).standard_normal((samples, *FEATURE_SHAPE), dtype=np.float32)
        self.labels = np.arange(samples, dtype=np.int64)
        self.chunks = [slice(i, min(i + COS_BATCH, samples)) for i in range(0, samples, COS_BATCH)]
        self.headers = [_header(chunk) for chunk in self.chunks]

    def request(self, path: str, body: bytes) -> Request:
        """The same, whatever ``path`` and ``body``."""
        return messages.TensorsRequest(name="features", digest="0" * 64, names=("features",))

    def stream(self, request: Request, context: RequestContext | None = None) -> FrameStream:
        """The prepared features."""
        context = context or RequestContext(clock=self.clock(request))
        length = sum(frame_bytes(header) for header in self.headers) + END_BYTES
        return FrameStream(context, length, self._frames(context), samples=len(self.labels))

    def _frames(self, context: RequestContext) -> Frames:
        for chunk, header in zip(self.chunks, self.headers, strict=True):
            yield data_frame(header, [byte_view(self.features[chunk]), byte_view(self.labels[chunk])])
        yield [end_frame(StreamEnd(len(self.chunks), len(self.labels)))]


def _header(chunk: slice) -> FrameHeader:
    count = chunk.stop - chunk.start
    features = TensorSpec(messages.FEATURES, "float32", (count, *FEATURE_SHAPE))
    labels = LabelForm().spec(count)
    return FrameHeader(np.arange(chunk.start, chunk.stop, dtype=np.int64), (features, labels))


def serve_socket(listening: socket.socket, payload: memoryview) -> None:
    """Send ``payload`` for every byte received, one connection after the other, for ever."""
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while connection.recv(1):
                    connection.sendall(payload)
            except ConnectionError:
                continue


def plain_application(payload: memoryview) -> web.Application:
    """aiohttp as it is fastest: the length known, slices of 1 MiB, no copy."""

    async def download(request: web.Request) -> web.StreamResponse:
        """Send the bytes as a plain body."""
        response = web.StreamResponse()
        response.content_length = len(payload)
        await response.prepare(request)
        for start in range(0, len(payload), SLICE_BYTES):
            await response.write(payload[start : start + SLICE_BYTES])
        await response.write_eof()
        return response

    application = web.Application()
    application.router.add_get("/", download)
    return application


async def _serve(samples: int) -> None:
    service = ResidentFeatures(samples)
    payload = byte_view(service.features)
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_socket, args=(listening, payload), daemon=True).start()
    applications = {"aiohttp": plain_application(payload), "hapi": Application(service).web}
    await serve_all(applications, {"socket": listening.getsockname()[1]})


async def serve_all(applications: Mapping[str, web.Application], ports: Mapping[str, int]) -> None:
    """Serve each application on a port of its own, print these and ``ports`` by name, and end with standard input."""
    found = dict(ports)
    for name, application in applications.items():
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found[name] = runner.addresses[0][1]
    print(json.dumps(found), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    # Nothing is to be saved, and the socket's thread waits for connections for ever.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
