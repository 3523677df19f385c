"""The wire with features that come from a GPU: copied out COS batch by COS batch while the one before is sent.

A sending process with the real application, once over features on the device and once over the same features
in host memory, and this process, which receives both into pinned memory in turns. Cores are not pinned.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import torch

from benchmarks.serving.wire import by_hapi
from benchmarks.serving.wire_server import (
    COS_BATCH,
    FEATURE_BYTES,
    FEATURE_SHAPE,
    ResidentFeatures,
    serve_all,
)
from benchmarks.testbed.conditions import Spread
from benchmarks.testbed.processes import sending_process
from hapi.client.loading.buffers import BufferPool
from hapi.server.context import RequestContext
from hapi.server.frame_stream import Frames
from hapi.server.http.app import Application
from hapi.wire.frames import StreamEnd, byte_view, data_frame, end_frame
from hapi.wire.transport.http import HttpTransport

FROM_DEVICE, FROM_HOST = "features from the device", "features from host memory"
SAMPLES = 20 * COS_BATCH
"""Samples of one transfer: 64 MB of features."""


class DeviceFeatures(ResidentFeatures):
    """:class:`ResidentFeatures` with the features on the device; every frame takes the way of a forward pass."""

    def __init__(self, samples: int, device: str) -> None:
        super().__init__(samples, device)
        self._device = self.workers.all[0].device
        self._resident = torch.from_numpy(self.features).to(self._device.device)

    def _pick(self, rows: torch.Tensor) -> torch.Tensor:
        return self._resident.index_select(0, rows)

    def _frames(self, context: RequestContext) -> Frames:
        for chunk, header in zip(self.chunks, self.headers, strict=True):
            rows = self._device.pinned(torch.arange(chunk.start, chunk.stop))
            output = self._device.host_buffer((len(rows), *FEATURE_SHAPE), torch.float32)
            self._device.begin(self._pick, rows, output, key="resident", clock=context.clock).result()
            yield data_frame(header, [byte_view(output.numpy()), byte_view(self.labels[chunk])])
        yield [end_frame(StreamEnd(len(self.chunks), len(self.labels)))]


def measure_features(device: str, seconds: float, rounds: int, samples: int = SAMPLES) -> dict[str, Spread]:
    """GB/s of features over loopback by where they were, in turns for about ``seconds``, at least ``rounds`` each."""
    pool = BufferPool(pinned=device != "cpu")
    buffer = byte_view(pool.tensor((samples * FEATURE_BYTES,), torch.uint8).numpy())
    rates: dict[str, list[float]] = {FROM_DEVICE: [], FROM_HOST: []}
    with sending_process(__name__, str(samples), device) as ports, contextlib.ExitStack() as stack:
        ways = {name: HttpTransport(f"http://127.0.0.1:{port}") for name, port in ports.items()}
        for transport in ways.values():
            stack.callback(transport.close)
            by_hapi(transport, buffer)  # warms connections and buffers
        deadline = time.perf_counter() + seconds
        while len(rates[FROM_HOST]) < rounds or time.perf_counter() < deadline:
            for name, transport in ways.items():
                start = time.perf_counter()
                by_hapi(transport, buffer)
                rates[name].append(len(buffer) / (time.perf_counter() - start) / 1e9)
    return {name: Spread.of(found) for name, found in rates.items()}


async def _serve(samples: int, device: str) -> None:
    services = {FROM_DEVICE: DeviceFeatures(samples, device), FROM_HOST: ResidentFeatures(samples)}
    await serve_all({name: Application(service).web for name, service in services.items()}, {})


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
