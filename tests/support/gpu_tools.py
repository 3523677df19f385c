"""What several GPU tests need: raw requests, a bounded GPU memory, layers that are slow or hungry."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from hapi.client.loading.job import ExtractionJob
from hapi.server.service import Service
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.messages import EXTRACT_PATH
from hapi.wire.report import RequestReport

MIB = 1 << 20


def extract(service: Service, job: ExtractionJob, ids: Sequence[int]) -> tuple[torch.Tensor, RequestReport]:
    """The features of ``ids`` as the frames carry them, and the server's report."""
    document = job.request(np.array(ids, dtype=np.int64))
    stream = service.stream(service.request(EXTRACT_PATH, json.dumps(document).encode()))
    reader = FrameReader(BufferSource(piece for frame in stream.frames for piece in frame))
    output = torch.empty((len(ids), *job.shape), dtype=job.dtype)
    raw = memoryview(output.view(-1).view(torch.uint8).numpy())
    filled = 0

    def sink(header: FrameHeader) -> list[memoryview]:
        nonlocal filled
        features, labels = header.tensors
        filled += features.nbytes
        return [raw[filled - features.nbytes : filled], memoryview(bytearray(labels.nbytes))]

    while not isinstance(end := reader.next(sink), StreamEnd):
        pass
    stream.close()
    return output, RequestReport.from_json(end.report)


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """At most about ``more`` bytes of GPU memory beyond what tensors hold now (MiBs that torch keeps are extra)."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):  # else the limit is not what is meant here
            torch.empty(more + 64 * MIB, dtype=torch.uint8, device="cuda")
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def full_memory() -> Iterator[None]:
    """No GPU memory for anything of half a MiB or more."""
    with memory_limit(0):
        held = []
        # torch keeps pools for blocks above and up to one MiB: each is filled in its own size.
        for size in (2 * MIB, MIB + MIB // 8, MIB // 2):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        yield
        held.clear()


class Hungry(nn.Module):
    """Doubles its input [n, ...]; takes 64 MiB of scratch memory for every sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scratch = torch.ones((len(x), 16 * MIB), device=x.device)
        return x * 2 * scratch[:, :1]


def cycles_of(seconds: float) -> int:
    """Clock cycles for ``torch.cuda._sleep`` to keep the GPU's stream busy for about ``seconds``."""
    probe = 50_000_000
    deadline = time.monotonic() + 0.3  # an idle GPU has lowered its clock
    while time.monotonic() < deadline:
        torch.cuda._sleep(probe)
        torch.cuda.synchronize()
    start = time.monotonic()
    torch.cuda._sleep(probe)
    torch.cuda.synchronize()
    return int(probe * seconds / (time.monotonic() - start))
