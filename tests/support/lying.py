"""Servers that tell untruths: a real service's answers, of which one thing is changed in well-formed frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import Buffer, FrameHeader, StreamEnd, data_frame, end_frame
from hapi.wire.transport.http import Handler

Lie = Callable[[dict[str, np.ndarray], np.ndarray], object]
"""Changes a frame's tensors in place; called with them by name, and with the samples' ids."""


def lying(handler: Handler, lie: Lie, paths: Sequence[str] = ("/v1/extract",)) -> Handler:
    """``handler``, of whose answers to ``paths`` every frame passes through ``lie``."""

    def handle(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        status, headers, buffers = handler(method, path, body)
        if path not in paths or status != 200:
            return status, headers, buffers
        return status, headers, iter([changed(b"".join(bytes(b) for b in buffers), lie)])

    return handle


def reporting(handler: Handler, report: Callable[[dict[str, Any]], dict[str, Any]]) -> Handler:
    """``handler``, whose reports of requests are what ``report`` makes of them."""

    def handle(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        status, headers, buffers = handler(method, path, body)
        if path not in ("/v1/extract", "/v1/samples") or status != 200:
            return status, headers, buffers
        return status, headers, iter([changed(b"".join(bytes(b) for b in buffers), lambda *_: None, report)])

    return handle


def changed(
    stream: bytes, lie: Lie, report: Callable[[dict[str, Any]], dict[str, Any]] = lambda report: report
) -> bytes:
    """A stream of frames after ``lie``, with checksums that fit."""
    reader = FrameReader(BufferSource(iter([stream])))
    out, held = [], []

    def sink(header: FrameHeader) -> list[memoryview]:
        held[:] = [np.empty(t.shape, t.dtype) for t in header.tensors]
        return [
            memoryview(a.reshape(-1).view(np.uint8)) if a.nbytes else memoryview(bytearray()) for a in held
        ]

    while not isinstance(item := reader.next(sink), StreamEnd):
        lie(dict(zip([t.name for t in item.tensors], held, strict=True)), item.ids)
        out += [bytes(b) for b in data_frame(item, [a.reshape(-1).view(np.uint8).data for a in held])]
    # Of numbers that take more room than honest ones.
    end = StreamEnd(item.frames, item.samples, report(item.report))
    return b"".join([*out, end_frame(end, 64 + len(item.report.get("layers", ())))])


def features(tensors: dict[str, Any], ids: np.ndarray) -> None:
    """Every feature a little larger: nobody would see it in a loss."""
    tensors["features"] *= 1.01


def labels(tensors: dict[str, Any], ids: np.ndarray) -> None:
    """The next class each."""
    tensors["labels"][:] = (tensors["labels"] + 1) % 4


def stored(tensors: dict[str, Any], ids: np.ndarray) -> None:
    """The stored samples are others."""
    tensors["stored"][::4] ^= 1
