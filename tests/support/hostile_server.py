"""A server over raw sockets that is honest but for one thing: each of :data:`KINDS` breaks one answer in one way.

What it breaks are the answers to one path; all others are those of a real service in this process. ``DOCUMENT`` kinds
break the description of the dataset, before anything is trained; ``STREAM`` kinds break features or stored samples.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import (
    PREFIX,
    WIRE_VERSION,
    FrameHeader,
    StreamEnd,
    TensorSpec,
    data_frame,
    end_frame,
)
from hapi.wire.transport.http import Handler
from support import lying
from support.tiny_http import Reply

DATASET, EXTRACT, SAMPLES, MODEL = "/v1/datasets/blobs", "/v1/extract", "/v1/samples", "/v1/models/mine"
FAREWELL = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\u202eevil \ud800"
FOREVER = 600.0
"""Seconds for which a server goes on with what has no end; the client leaves long before."""

Act = Callable[[socket.socket, bytes], object]
"""Answers on a connection; given what an honest server would answer as the body."""


@dataclass(frozen=True)
class Kind:
    """One misbehaviour."""

    act: Act
    says: str
    """What the trainer's one line must match."""
    path: str = DATASET
    flags: tuple[str, ...] = ()
    """Of ``hapi-train``, beside the common ones."""
    code: int = 1
    """Its exit code; 0 for what does no harm."""


def hostile(honest: Handler, kind: Kind | None) -> Reply:
    """Answer as ``honest`` does, and at the path of ``kind`` as that wants."""

    def reply(connection: socket.socket, request: bytes) -> bool:
        head, _, body = request.partition(b"\r\n\r\n")
        if request[:1] == b"\x16":  # a greeting of TLS: whether it is spoken here
            return False
        method, path, _ = head.decode().split(" ", 2)
        if body:  # the run's own id, by which answers would not be remembered
            body = json.dumps({k: v for k, v in json.loads(body).items() if k != "job"}).encode()
        status, _, buffers = honest(method, path, body)
        answer = b"".join(bytes(b) for b in buffers)
        if kind is not None and path.startswith(kind.path):
            connection.settimeout(FOREVER)
            with contextlib.suppress(OSError):
                kind.act(connection, answer)
            return False
        connection.sendall(_head(status, len(answer)) + answer)
        return True

    return reply


def _head(status: int, length: int, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {length}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


# -- ways to answer ------------------------------------------------------------------------------------------------


def once(data: bytes) -> Act:
    """These bytes, and the end of the connection."""
    return lambda connection, honest: connection.sendall(data)


def without_end(first: bytes, again: bytes, pause: float = 0.0) -> Act:
    """``first``, and then ``again`` for as long as anybody takes it."""

    def act(connection: socket.socket, honest: bytes) -> None:
        connection.sendall(first)
        piece = again if pause else again * max(1, 65536 // len(again))
        until = time.monotonic() + FOREVER
        while time.monotonic() < until:
            connection.sendall(piece)
            time.sleep(pause)

    return act


def dripping(whole: Callable[[bytes], bytes], pause: float = 0.2) -> Act:
    """``whole`` of the honest answer, byte by byte."""

    def act(connection: socket.socket, honest: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in whole(honest):
            connection.sendall(bytes([byte]))
            time.sleep(pause)

    return act


def silent(first: bytes = b"") -> Act:
    """``first``, and then nothing more."""

    def act(connection: socket.socket, honest: bytes) -> None:
        connection.sendall(first)
        connection.recv(1)

    return act


def document(change: Callable[[dict[str, Any]], object]) -> Act:
    """The honest description with something changed in place."""

    def act(connection: socket.socket, honest: bytes) -> None:
        described = json.loads(honest)
        change(described)
        body = json.dumps(described).encode("utf-8", "surrogatepass")
        connection.sendall(_head(200, len(body)) + body)

    return act


def body(data: Callable[[], bytes], *headers: str, status: int = 200) -> Act:
    """This body, of whatever status."""

    def act(connection: socket.socket, honest: bytes) -> None:
        made = data()
        connection.sendall(_head(status, len(made), *headers) + made)

    return act


def stream(change: Callable[[bytes], bytes]) -> Act:
    """The honest stream of frames after ``change``."""

    def act(connection: socket.socket, honest: bytes) -> None:
        changed = change(honest)
        connection.sendall(_head(200, len(changed)) + changed)

    return act


def problem(status: int, slug: str, **fields: Any) -> Act:
    """Problem details."""
    document = {
        "type": f"urn:hapi:problem:{slug}",
        "title": "x",
        "status": status,
        "detail": ESCAPES,
        **fields,
    }
    return body(lambda: json.dumps(document).encode(), status=status)


# -- ways to change a stream -----------------------------------------------------------------------------------------


def frames(honest: bytes) -> Iterator[tuple[FrameHeader, list[np.ndarray]]]:
    """The data frames of a stream, with their tensors."""
    reader, held = FrameReader(BufferSource(iter([honest]))), []

    def sink(header: FrameHeader) -> list[memoryview]:
        held[:] = [np.empty(t.shape, t.dtype) for t in header.tensors]
        return [memoryview(a.reshape(-1).view(np.uint8)) for a in held]

    while not isinstance(item := reader.next(sink), StreamEnd):
        yield item, list(held)


def packed(header: FrameHeader, tensors: list[np.ndarray]) -> bytes:
    return b"".join(
        bytes(b) for b in data_frame(header, [t.reshape(-1).view(np.uint8).data for t in tensors])
    )


def end_of(honest: bytes, **changes: Any) -> bytes:
    """Its end frame, with other counts or another report."""
    reader = FrameReader(BufferSource(iter([honest])))
    while not isinstance(
        item := reader.next(lambda h: [memoryview(bytearray(t.nbytes)) for t in h.tensors]), StreamEnd
    ):
        pass
    fields: Mapping[str, Any] = {
        "frames": item.frames,
        "samples": item.samples,
        "report": item.report,
        **changes,
    }
    return end_frame(StreamEnd(**fields))


def first_frame(honest: bytes) -> bytes:
    return packed(*next(frames(honest)))


def other_ids(honest: bytes) -> bytes:
    """The answer to somebody else's request."""
    out = [packed(FrameHeader(h.ids + 1, h.tensors), t) for h, t in frames(honest)]
    return b"".join(out) + end_of(honest)


def another_shape(honest: bytes) -> bytes:
    header, tensors = next(frames(honest))
    flat = TensorSpec("features", "float32", (len(header.ids), tensors[0][0].size))
    return packed(FrameHeader(header.ids, (flat, *header.tensors[1:])), tensors) + end_of(honest)


def flipped(honest: bytes) -> bytes:
    middle = len(honest) // 2
    return honest[:middle] + bytes([honest[middle] ^ 1]) + honest[middle + 1 :]


def no_numbers(tensors: dict[str, np.ndarray], ids: np.ndarray) -> None:
    tensors["features"][:, 0] = np.nan


def no_class(tensors: dict[str, np.ndarray], ids: np.ndarray) -> None:
    tensors["labels"][:] = 1 << 40


def wrong_offsets(tensors: dict[str, np.ndarray], ids: np.ndarray) -> None:
    tensors["offsets"][1] = 1 << 50


def lies(lie: lying.Lie) -> Act:
    """Well-formed frames that do not tell the truth."""
    return stream(lambda honest: lying.changed(honest, lie))


def prefix(header: int, payload: int, kind: int = 1) -> bytes:
    return PREFIX.pack(b"HAPF", WIRE_VERSION, kind, 0, header, payload)


def frame_of(document: Mapping[str, Any], payload: int) -> bytes:
    """The beginning of a frame that announces ``payload`` bytes."""
    text = json.dumps(document).encode().ljust(108)
    return prefix(len(text), payload) + text


def gigabytes(connection: socket.socket, honest: bytes) -> None:
    """Stored samples of three gigabytes, as they would be announced and then sent."""
    header, _ = next(frames(honest))
    count, size = len(header.ids), 3 << 30
    tensors = [
        TensorSpec("stored", "uint8", (size,)),
        TensorSpec("offsets", "int64", (count + 1,)),
        TensorSpec("labels", "int64", (count,)),
    ]
    whole = FrameHeader(header.ids, tuple(tensors)).payload_bytes
    ids = header.ids.astype("<i8").tobytes().ljust(-(-count * 8 // 64) * 64, b"\0")
    start = frame_of({"ids": count, "tensors": [t.to_json() for t in tensors]}, whole)
    connection.sendall(_head(200, whole + len(start)) + start + ids)
    without_end(b"", b"\0")(connection, honest)


def millions_of_ids(connection: socket.socket, honest: bytes) -> None:
    """A frame of half a billion sample ids."""
    count = (4 << 30) // 8 - 8
    tensor = TensorSpec("features", "uint8", (0,))
    connection.sendall(FAREWELL + frame_of({"ids": count, "tensors": [tensor.to_json()]}, count * 8))
    without_end(b"", b"\0")(connection, honest)


def reset(connection: socket.socket, honest: bytes) -> None:
    """Nothing but a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def in_chunks(extension: bytes, trailer: Act) -> Act:
    """The honest stream by chunks of one byte that carry much beside it, and an end that is none."""

    def act(connection: socket.socket, honest: bytes) -> None:
        connection.sendall(CHUNKED)
        if extension:
            for byte in honest:
                connection.sendall(b"1;%b\r\n%c\r\n" % (extension, byte))
        else:
            connection.sendall(b"%x\r\n%b\r\n" % (len(honest), honest))
        connection.sendall(b"0\r\n")
        trailer(connection, honest)

    return act


def error_with_escapes(honest: bytes) -> bytes:
    """An error frame that is whole, whose text would steer a terminal."""
    text = json.dumps({"type": "urn:hapi:problem:not-found", "status": 404, "detail": ESCAPES}).encode()
    text = text.ljust(-(-(len(text) + PREFIX.size) // 64) * 64 - PREFIX.size)
    whole = prefix(len(text), 0, kind=3) + text
    return whole + xxhash.xxh3_64_digest(whole)[::-1]


def before_the_end(honest: bytes, more: bytes, **changes: Any) -> bytes:
    """The data frames, ``more``, and an end frame with other counts or another report."""
    return honest[: -len(end_of(honest))] + more + end_of(honest, **changes)


# -- the kinds -------------------------------------------------------------------------------------------------------

NO_HTTP = "does not speak HTTP/1.1.*is this a hapi-server"
NO_JSON = "the answer is not JSON.*is this a hapi-server"
SLOW = "--slow-server-rate|the head of an answer|--answer-timeout|no answer in time"
"""Which of the bounds ends it first is a question of how busy the machine is."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n"


def names(count: int, length: int = 1) -> Act:
    """A description of so many classes, whose bytes take no time to make."""

    def act(connection: socket.socket, honest: bytes) -> None:
        before, after = json.dumps({**json.loads(honest), "classes": ["HERE"]}).encode().split(b'"HERE"')
        name = b'"' + b"x" * length + b'"'
        whole = before + (name + b",") * (count - 1) + name + after
        connection.sendall(_head(200, len(whole)) + whole)

    return act


DOCUMENT: dict[str, Kind] = {
    "endless 100-continue": Kind(without_end(b"", CONTINUE), NO_HTTP),
    "dripping 100-continue": Kind(dripping(lambda honest: CONTINUE * 999), SLOW),
    "early hints for ever": Kind(without_end(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), "answered 103"),
    "switching protocols": Kind(once(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"), "answered 101"),
    "dripping head": Kind(dripping(lambda honest: HEAD + b"X-Y: " + b"z" * 9999), SLOW),
    "endless headers": Kind(without_end(HEAD, b"X: y\r\n"), NO_HTTP),
    "endless header line": Kind(without_end(HEAD + b"X: ", b"y"), NO_HTTP),
    "http/0.9": Kind(once(b"<html>hello</html>" * 100), NO_HTTP),
    "another protocol": Kind(once(b"SSH-2.0-OpenSSH_9.6\x1b[2J\r\n"), NO_HTTP),
    "silence": Kind(silent(), "no answer in time"),
    "silence after the head": Kind(silent(_head(200, 1000)), "no answer in time"),
    "reset": Kind(reset, "is the server running and reachable"),
    "redirect to itself": Kind(
        body(lambda: b"", f"Location: {DATASET}\x1b[2J", status=302), "redirected to .*not followed", code=2
    ),
    "dripping document": Kind(dripping(lambda honest: _head(200, len(honest)) + honest, 0.02), SLOW),
    "document without end": Kind(without_end(FAREWELL, b" "), NO_JSON),
    "content length too long": Kind(
        lambda connection, honest: silent(_head(200, 10**15) + honest)(connection, honest), "no answer in time"
    ),
    "content length too short": Kind(
        lambda connection, honest: connection.sendall(_head(200, len(honest) // 2) + honest), NO_JSON
    ),
    "cut off": Kind(
        lambda connection, honest: connection.sendall(_head(200, len(honest)) + honest[:50]), "broke in the middle"
    ),
    "compressed": Kind(body(lambda: b"\x1f\x8b" + bytes(1000), "Content-Encoding: gzip"), "encoding 'gzip'"),
    "nested deeply": Kind(body(lambda: b"[" * 5_000_000), NO_JSON),
    "nested just so": Kind(body(lambda: b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    "millions of values": Kind(body(lambda: b"[" + b"[]," * 5_000_000 + b"[]]"), "more than 2000000 values"),
    "number without end": Kind(body(lambda: b'{"count": ' + b"9" * 5_000_000 + b"}"), "digits"),
    "no number": Kind(body(lambda: b'{"count": NaN}'), "NaN is not a number"),
    "infinite number": Kind(body(lambda: b'{"count": 1e999}'), "too large a number"),
    "field given twice": Kind(body(lambda: b'{"count": 1, "count": 2}'), "given twice"),
    "no utf-8": Kind(body(lambda: b'{"count": "\xff\xfe"}'), NO_JSON),
    "2^48 samples": Kind(document(lambda d: d.update(count=1 << 48)), "281474976710656 samples", code=2),
    "negative count": Kind(document(lambda d: d.update(count=-5)), "count: expected an integer"),
    "3 million classes": Kind(names(3_000_000, 15), "longer than 33554432 bytes", flags=("--timeout", "20")),
    "3 million short classes": Kind(names(3_000_000), "more than 2000000 values|longer than"),
    "many classes": Kind(names(1_050_000), "more than 1048576 classes"),
    "endless name of a class": Kind(names(1, 8 << 20), "4096 characters"),
    "inputs of 800 terabytes": Kind(
        document(lambda d: d["layout"].update(sample_shape=[3, 1 << 23, 1 << 23])), "one takes .* are free", code=2
    ),
    "escapes in a field": Kind(document(lambda d: d.update(group=ESCAPES)), "group: expected an integer"),
    "escapes in an error": Kind(problem(404, "not-found"), r"\\x1b\[2J.*\\u202eevil"),
    "escapes in a refusal": Kind(body(lambda: b"", status=418), "answered 418"),
    "come back in 31 years": Kind(problem(429, "busy", retry_after=1e9), "evil"),
    "come back never": Kind(problem(503, "draining", retry_after=-1e308, expected_wait="x"), "evil"),
}  # fmt: skip
PAGE = b"<html>" + b"x" * (50 << 20)
OTHERS = "other samples than were asked for"
STREAM: dict[str, Kind] = {
    "dripping frame": Kind(dripping(lambda honest: FAREWELL + honest, 0.05), SLOW, EXTRACT),
    "silence in a frame": Kind(
        lambda connection, honest: silent(_head(200, len(honest)) + honest[:3000])(connection, honest),
        "no answer in time", EXTRACT,
    ),
    "much between chunks": Kind(in_chunks(b"x" * 60_000, once(b"\r\n")), NO_HTTP, EXTRACT),
    "another's answer": Kind(stream(other_ids), OTHERS, EXTRACT),
    "fewer frames": Kind(stream(lambda honest: end_of(honest, frames=0, samples=0)), "samples early", EXTRACT),
    "flipped bit": Kind(stream(lambda honest: flipped(first_frame(honest))), "checksum|is not", EXTRACT),
    "another shape": Kind(stream(another_shape), "expected", EXTRACT),
    "frame of 16 exabytes": Kind(stream(lambda honest: prefix(100, (1 << 64) - 1)), "exceeds the limit", EXTRACT),
    "header of 4 gigabytes": Kind(stream(lambda honest: prefix((1 << 32) - 1, 0)), "exceeds the limit", EXTRACT),
    "half a billion ids": Kind(millions_of_ids, "not a number of samples", EXTRACT),
    "a balancer's own page": Kind(body(lambda: PAGE, status=404), "answered 404 .*is this a hapi-server", EXTRACT),
    "endless page of an error": Kind(
        without_end(b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n", b"x"), "answered 500 No.*a hapi-server", EXTRACT
    ),
    "no frames at all": Kind(stream(lambda honest: b"<html>" * 1000), "out of step", EXTRACT),
    "error frame with escapes": Kind(stream(error_with_escapes), r"\\x1b\[2J", EXTRACT),
    "features that are no numbers": Kind(lies(no_numbers), "infinite or no numbers.*--check-features", EXTRACT),
    "labels of no class": Kind(lies(no_class), "labels that are not the number of a class, 0 to 3", EXTRACT),
    "false features": Kind(lies(lying.features), "--recheck: .* false at split", EXTRACT, ("--recheck", "40")),
    "false labels": Kind(lies(lying.labels), "--recheck: .* false at split", EXTRACT, ("--recheck", "40")),
    "gigabytes of stored samples": Kind(gigabytes, "more than the whole dataset has", SAMPLES, ("--split", "0")),
    "offsets that do not fit": Kind(lies(wrong_offsets), "offsets of stored samples", SAMPLES, ("--split", "0")),
}  # fmt: skip
HARMLESS: dict[str, Kind] = {
    "more after the end": Kind(stream(lambda honest: honest + honest), "", EXTRACT, code=0),
    "trailers without end": Kind(in_chunks(b"", without_end(b"", b"X: y\r\n")), "", EXTRACT, code=0),
    "trailers that drip": Kind(
        in_chunks(b"", dripping(lambda honest: b"X: y\r\n" * 999)), "", EXTRACT, code=0
    ),
    "frames beyond the last": Kind(
        stream(lambda honest: before_the_end(honest, first_frame(honest))), "", EXTRACT, code=0
    ),
    "frames twice": Kind(stream(lambda honest: first_frame(honest) * 2 + honest), "", EXTRACT, code=0),
    "end that counts otherwise": Kind(
        stream(lambda honest: before_the_end(honest, b"", samples=10**9)), "", EXTRACT, code=0
    ),
    "no report": Kind(stream(lambda honest: before_the_end(honest, b"", report={})), "", EXTRACT, code=0),
}
"""What comes beside whole frames is not waited for, and what is wrong after them costs no more than another request."""
KINDS = {**DOCUMENT, **STREAM, **HARMLESS}
