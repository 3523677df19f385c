"""Frames: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import io
import json
import random
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import BadRequestError, DataError, HapiError, WireError
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import (
    ALIGNMENT,
    DTYPE_BYTES,
    END_BYTES,
    MAX_ID,
    NO_IDS,
    OLDEST_VERSION,
    SLICE_BYTES,
    SMALL_BYTES,
    UNNAMED_VERSION,
    WIRE_VERSION,
    FrameHeader,
    FrameLimits,
    StreamedBytes,
    StreamEnd,
    TensorSpec,
    agreed_version,
    byte_view,
    data_frame,
    end_frame,
    error_frame,
    frame_bytes,
    joined,
)


def encode(header: FrameHeader, buffers: list[bytes]) -> bytes:
    return b"".join(bytes(p) for p in data_frame(header, buffers))


def read(
    stream: bytes, limits: FrameLimits | None = None
) -> tuple[list[FrameHeader], list[list[bytes]], StreamEnd]:
    reader = FrameReader(io.BytesIO(stream), limits)
    headers, contents = [], []
    received: list[bytearray] = []

    def sink(header: FrameHeader) -> list[memoryview]:
        received[:] = [bytearray(t.nbytes) for t in header.tensors]
        return [memoryview(b) for b in received]

    while True:
        item = reader.next(sink)
        if isinstance(item, StreamEnd):
            return headers, contents, item
        headers.append(item)
        contents.append([bytes(b) for b in received])


tensors = st.builds(
    TensorSpec,
    st.text(min_size=1, max_size=30),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
)
headers = st.builds(
    FrameHeader,
    st.lists(st.integers(0, 2**62 - 1), max_size=20).map(lambda ids: np.array(ids, np.int64)),
    st.lists(tensors, min_size=1, max_size=4).map(tuple),
)


@given(st.lists(headers, max_size=4), st.integers(0, 2**32))
def test_round_trip_and_exact_length(frames: list[FrameHeader], seed: int) -> None:
    rng = random.Random(seed)
    buffers = [[rng.randbytes(t.nbytes) for t in h.tensors] for h in frames]
    encoded = [encode(h, b) for h, b in zip(frames, buffers, strict=True)]
    assert [len(e) for e in encoded] == [frame_bytes(h) for h in frames]
    end = end_frame(StreamEnd(len(frames), sum(len(h.ids) for h in frames), {"seconds": {"forward": 0.5}}))
    assert len(end) == END_BYTES
    got_headers, got, got_end = read(b"".join(encoded) + end)
    assert [(h.ids.tolist(), h.tensors) for h in got_headers] == [(h.ids.tolist(), h.tensors) for h in frames]
    assert got == buffers
    assert got_end.report == {"seconds": {"forward": 0.5}}


def test_payload_starts_aligned() -> None:
    header = FrameHeader(np.arange(1, 4), (TensorSpec("features", "float32", (3, 5)),))
    payload = np.arange(15, dtype=np.float32)
    frame = encode(header, [payload.tobytes()])
    assert frame.index(payload.tobytes()) % ALIGNMENT == 0


STREAM_HEADER = FrameHeader(
    np.array([4, 9]), (TensorSpec("features", "float32", (2, 33)), TensorSpec("labels", "int64", (2,)))
)


def small_stream() -> bytes:
    buffers = [np.arange(66, dtype=np.float32).tobytes(), np.array([1, 0]).tobytes()]
    return encode(STREAM_HEADER, buffers) + end_frame(StreamEnd(1, 2, {}))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("nbytes", [SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES + 5])
def test_tensors_longer_than_a_slice_are_whole(nbytes: int, pieces: int) -> None:
    header = FrameHeader(ids=NO_IDS, tensors=(TensorSpec("weights", "uint8", (nbytes,)),))
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    parts = [data[n * nbytes // pieces : (n + 1) * nbytes // pieces] for n in range(pieces)]
    buffers: list[bytes | StreamedBytes] = [data if pieces == 1 else StreamedBytes(nbytes, parts)]
    stream = b"".join(bytes(p) for p in data_frame(header, buffers)) + bytes(end_frame(StreamEnd(1, 0, {})))
    assert len(stream) == frame_bytes(header) + END_BYTES
    _, contents, _ = read(stream)
    assert contents == [[data]]


def test_every_flipped_bit_is_noticed() -> None:
    stream = small_stream()
    for position in range(len(stream)):
        damaged = bytearray(stream)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(WireError):
            read(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    stream = small_stream()
    for length in range(len(stream)):
        with pytest.raises(WireError):
            read(stream[:length])


@given(st.binary(max_size=400))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["ids", "tensors", "name", "dtype", "shape", "codec"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    ),
    st.integers(0, 3),
    st.integers(0, 1 << 63),
)
def test_any_json_header_with_a_good_checksum_is_an_error_or_consistent(
    document: object, kind: int, payload: int
) -> None:
    text = json.dumps(document).encode()
    head = struct.pack("<4sBBHIQ", b"HAPF", WIRE_VERSION, kind, 0, len(text), payload) + text
    stream = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    with pytest.raises(HapiError):
        read(stream)


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    allocated = []
    limits = FrameLimits(header=1 << 12, payload=1 << 10)
    header = FrameHeader(NO_IDS, (TensorSpec("x", "uint8", (2000,)),))
    reader = FrameReader(io.BytesIO(encode(header, [bytes(2000)])), limits)
    with pytest.raises(WireError, match="exceeds the limit"):
        reader.next(lambda h: allocated.append(h) or [])
    assert not allocated
    huge_header = struct.pack("<4sBBHIQ", b"HAPF", WIRE_VERSION, 1, 0, 0xFFFFFFFF, 0)
    with pytest.raises(WireError, match="exceeds the limit"):
        FrameReader(io.BytesIO(huge_header)).next(lambda h: [])


@pytest.mark.parametrize("wrong", [-1, MAX_ID + 1])
def test_ids_are_checked_before_anything_else_is_received(wrong: int) -> None:
    frame = encode(FrameHeader(np.array([MAX_ID, wrong]), (TensorSpec("x", "uint8", (5,)),)), [bytes(5)])
    received: list[FrameHeader] = []
    with pytest.raises(WireError, match="a sample id is negative or too large"):
        FrameReader(io.BytesIO(frame)).next(lambda h: received.append(h) or [])
    assert not received


def test_error_frame_carries_the_error() -> None:
    error = DataError("dataset 'x': sample 3 is damaged")
    stream = encode(STREAM_HEADER, [bytes(264), bytes(16)]) + error_frame(error)
    with pytest.raises(DataError, match="sample 3 is damaged"):
        read(stream)


@pytest.mark.parametrize(("frames", "samples"), [(2, 2), (1, 3)])
def test_end_frame_must_count_what_came(frames: int, samples: int) -> None:
    with pytest.raises(WireError, match=f"counts {frames} frames and {samples} samples, but 1 and 2 came"):
        read(encode(STREAM_HEADER, [bytes(264), bytes(16)]) + end_frame(StreamEnd(frames, samples, {})))


def test_another_version_is_named() -> None:
    stream = bytearray(small_stream())
    stream[4] = 9
    with pytest.raises(WireError, match="version 9"):
        read(bytes(stream))


@pytest.mark.parametrize("version", [OLDEST_VERSION, WIRE_VERSION])
def test_this_version_and_the_one_before_are_read(version: int) -> None:
    frame = b"".join(map(bytes, data_frame(STREAM_HEADER, [bytes(264), bytes(16)], version)))
    assert frame[4] == version and len(frame) == frame_bytes(STREAM_HEADER)
    headers, _, end = read(frame + end_frame(StreamEnd(1, len(STREAM_HEADER.ids)), version=version))
    assert len(headers) == end.frames == 1
    with pytest.raises(HapiError, match="no"):
        read(error_frame(HapiError("no"), version))


def test_the_newest_version_that_both_know_is_agreed_on() -> None:
    assert agreed_version(str(WIRE_VERSION)) == agreed_version("99") == WIRE_VERSION
    assert agreed_version(str(OLDEST_VERSION)) == OLDEST_VERSION
    assert agreed_version(None) == UNNAMED_VERSION, "of clients from before the header"
    with pytest.raises(BadRequestError, match=r"the client reads wire version 1, .*; update the client"):
        agreed_version("1")
    for wrong in ("", "-4", "4.0", "four", "٤", "1000"):
        with pytest.raises(BadRequestError, match="expected a number"):
            agreed_version(wrong)


def test_wrong_buffers_are_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="lengths"):
        list(data_frame(STREAM_HEADER, [bytes(3), bytes(16)]))
    with pytest.raises(ValueError, match="does not fit"):
        end_frame(StreamEnd(1, 1, {"x": "y" * 5000}))
    with pytest.raises(ValueError, match="sink"):
        FrameReader(io.BytesIO(small_stream())).next(lambda h: [memoryview(bytearray(1))])


def test_buffer_source_joins_pieces_of_any_size() -> None:
    stream = small_stream()
    pieces = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    reader = FrameReader(BufferSource(iter([b"", *pieces])))
    got = bytearray(264), bytearray(16)
    reader.next(lambda h: [memoryview(g) for g in got])
    assert np.frombuffer(got[0], np.float32)[65] == 65


def test_byte_view_writes_through() -> None:
    array = np.zeros((2, 3), dtype=np.float32)
    view = byte_view(array)
    assert len(view) == 24
    view[:4] = np.float32(2.5).tobytes()
    assert array[0, 0] == 2.5
    assert len(byte_view(np.empty((0, 4)))) == 0


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_joined_keeps_the_bytes_and_copies_only_small_pieces(sizes: list[int]) -> None:
    pieces = [bytes([i % 251]) * n for i, n in enumerate(sizes)]
    out = list(joined(pieces))
    assert b"".join(out) == b"".join(pieces)
    large = [p for p in pieces if len(p) > SMALL_BYTES]
    assert [p for p in out if any(p is q for q in large)] == large
    assert len(out) <= 2 * len(large) + 1
