"""A server in a few lines for the client's tests: features that tell which sample they are, and faults on order."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from hapi.errors import HapiError
from hapi.wire.frames import (
    Buffer,
    FrameHeader,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    error_frame,
)
from hapi.wire.messages import ExtractRequest
from hapi.wire.report import STAGES
from support.reports import report_with

SHAPE = (3, 2)


def features_of(ids: np.ndarray) -> np.ndarray:
    """[n, 3, 2] float32; every element names the sample."""
    return (
        np.broadcast_to(ids.astype(np.float32)[:, None, None], (len(ids), *SHAPE))
        + np.arange(6, dtype=np.float32).reshape(SHAPE) / 8
    )


class FakeServer:
    """Counts what it is asked; ``fault`` may raise before a frame, ``cos_batch`` is the frame size."""

    def __init__(self, cos_batch: int = 5, delay: float = 0.0, seed: int = 0) -> None:
        self.cos_batch = cos_batch
        self.delay = delay
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.asked: list[int] = []
        self.requests = 0
        self.under_way = 0
        self.most_under_way = 0
        self.fault: Callable[[int, int], HapiError | str | None] = lambda request, frame: None
        self.features: Callable[[np.ndarray], np.ndarray] = features_of
        self.tamper: Callable[[bytes], bytes] = lambda stream: stream

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, str], Iterator[Buffer]]:
        request = ExtractRequest.from_json(json.loads(body))
        with self.lock:
            self.requests += 1
            number = self.requests
            self.asked += request.ids.tolist()
        refusal = self.fault(number, -1)
        if isinstance(refusal, HapiError):
            return refusal.status, {}, iter([json.dumps(refusal.to_problem()).encode()])
        return 200, {}, self._frames(number, request.ids)

    def _frames(self, number: int, ids: np.ndarray) -> Iterator[Buffer]:
        with self.lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            chunks = [ids[i : i + self.cos_batch] for i in range(0, len(ids), self.cos_batch)]
            for index, chunk in enumerate(chunks):
                if self.delay:
                    time.sleep(self.random.uniform(0, self.delay))
                fault = self.fault(number, index)
                if fault == "cut":
                    return
                if isinstance(fault, HapiError):
                    yield error_frame(fault)
                    return
                header = FrameHeader(
                    chunk,
                    (
                        TensorSpec("features", "float32", (len(chunk), *SHAPE)),
                        TensorSpec("labels", "int64", (len(chunk),)),
                    ),
                )
                stream = b"".join(
                    bytes(p)
                    for p in data_frame(
                        header, [byte_view(np.ascontiguousarray(self.features(chunk))), byte_view(chunk % 7)]
                    )
                )
                yield self.tamper(stream)
            report = report_with(server="fake", seconds=dict.fromkeys(STAGES, 0.01), cos_batch=5)
            yield end_frame(StreamEnd(len(chunks), len(ids), report.to_json()))
        finally:
            with self.lock:
                self.under_way -= 1
