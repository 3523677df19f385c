"""Encoded tensors in frames: exact where they are to be, never longer than raw, damage noticed."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from hapi.codecs.names import CODECS, EXACT, LOSSY
from hapi.errors import WireError
from hapi.wire.encoding import encode_tensor
from hapi.wire.frame_reader import HEAD_BYTES, FrameReader
from hapi.wire.frames import (
    DTYPE_BYTES,
    FrameHeader,
    FrameLimits,
    StreamEnd,
    TensorSpec,
    data_frame,
    end_frame,
    frame_bytes,
)

ROWS = 4
FEATURES = np.maximum(np.random.default_rng(0).standard_normal((ROWS, 90_000)), 0).astype(np.float32)
SPEC = TensorSpec("features", "float32", FEATURES.shape)
IDS = np.arange(ROWS)


def frame_of(
    codec: str, spec: TensorSpec = SPEC, data: bytes = FEATURES.tobytes()
) -> tuple[FrameHeader, bytes]:
    on_wire, buffer = encode_tensor(spec, data, codec)
    header = FrameHeader(IDS, (on_wire,))
    return header, b"".join(bytes(p) for p in data_frame(header, [buffer]))


def read(
    frame: bytes, limits: FrameLimits | None = None, spec: TensorSpec = SPEC
) -> tuple[FrameReader, bytes, int]:
    """The reader at the stream's end, the tensor's raw bytes, and how often bytes were said to flow."""
    reader = FrameReader(
        io.BytesIO(frame + end_frame(StreamEnd(1, ROWS, {}))), limits or FrameLimits(payload=1 << 22)
    )
    out: list[bytearray] = []
    flowed: list[int] = []

    def flowing() -> None:
        flowed.append(reader.bytes_read)

    def sink(header: FrameHeader) -> list[memoryview]:
        out[:] = [bytearray(t.nbytes) for t in header.tensors]
        return [memoryview(b) for b in out]

    header = reader.next(sink, flowing)
    assert isinstance(header, FrameHeader)
    assert header.tensors[0].raw == spec
    assert isinstance(reader.next(lambda header: []), StreamEnd)
    return reader, bytes(out[0]), len(flowed)


@pytest.mark.parametrize("codec", EXACT)
def test_exact_codecs_give_every_bit_back_in_fewer_bytes(codec: str) -> None:
    header, frame = frame_of(codec)
    assert header.tensors[0].codec == codec
    assert len(frame) == frame_bytes(header) < frame_bytes(FrameHeader(IDS, (SPEC,)))
    reader, data, flowed = read(frame)
    assert data == FEATURES.tobytes()
    assert reader.bytes_read > len(frame) > HEAD_BYTES
    assert flowed == 1


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codecs_come_close(codec: str) -> None:
    _, frame = frame_of(codec)
    _, data, _ = read(frame)
    found = np.frombuffer(data, np.float32).reshape(FEATURES.shape)
    assert np.abs(found - FEATURES).max() <= FEATURES.max() / 250


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_never_longer_than_raw(codec: str, dtype: str) -> None:
    for count in (0, 1, 3, 16, 17, 40, 5000):
        spec = TensorSpec("features", dtype, (ROWS, count))
        for data in (np.random.default_rng(count).bytes(spec.nbytes), bytes(spec.nbytes)):
            if codec in LOSSY and dtype == "float32":
                data = np.frombuffer(data, "<u4").astype(np.float32).tobytes()
                if codec == "fp16":
                    data = bytes(len(data))
            _, frame = frame_of(codec, spec, data)
            assert len(frame) <= frame_bytes(FrameHeader(IDS, (spec,)))
            if codec not in LOSSY:
                assert read(frame, spec=spec)[1] == data


@pytest.mark.parametrize("codec", ["zeros", "zeros+planes", "int8"])
def test_every_flipped_bit_and_cut_is_noticed(codec: str) -> None:
    spec = TensorSpec("features", "float32", (ROWS, 60))
    _, frame = frame_of(codec, spec, np.maximum(FEATURES[:, :60], 0.5).tobytes())
    assert len(frame) < frame_bytes(FrameHeader(IDS, (spec,))) or codec != "int8"
    for position in range(len(frame)):
        damaged = bytearray(frame)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(WireError):
            read(bytes(damaged), spec=spec)
        with pytest.raises(WireError):
            FrameReader(io.BytesIO(frame[:position])).next(
                lambda header: [memoryview(bytearray(spec.nbytes))]
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": 0}, "how few"),
        ({"bytes": -1}, "how few"),
        ({"bytes": 10**9}, "how few"),
        ({"bytes": 4 * 9 * 4}, "how few"),  # as many as raw
        ({"bytes": True}, "how few"),
        ({"bytes": None}, "how few"),
        ({"bytes": "9"}, "how few"),
        ({"codec": "none"}, "encoded tensors"),
        ({"codec": "gzip"}, "codec"),
        ({"codec": ["zeros"]}, "codec"),
        ({"codec": "int8", "dtype": "float64"}, "int8 of float64"),
    ],
)
def test_headers_that_cannot_be(change: dict[str, object], message: str) -> None:
    entry = {**TensorSpec("f", "float32", (4, 9), "zeros", 100).to_json(), **change}
    assert TensorSpec.from_json(TensorSpec("f", "float32", (4, 9), "zeros", 100).to_json()).wire_bytes == 100
    with pytest.raises(WireError, match=message):
        TensorSpec.from_json(entry)


def test_a_raw_entry_is_as_before() -> None:
    assert set(SPEC.to_json()) == {"name", "dtype", "shape", "codec"}
    assert json.loads(json.dumps(SPEC.to_json()))["codec"] == "none"


def test_what_would_be_too_long_once_decoded_is_refused() -> None:
    spec = TensorSpec("features", "float32", (ROWS, 90_000))
    header, frame = frame_of("zeros", spec, bytes(spec.nbytes))
    assert header.tensors[0].wire_bytes < 100_000
    with pytest.raises(WireError, match="once decoded"):
        read(frame, FrameLimits(payload=1 << 20))
