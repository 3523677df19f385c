"""Codecs on tensors of every type that may cross, of odd shapes, strides and values: on the wire and at rest."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from hapi.codecs import exact
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.names import CODECS, EXACT, LOSSY
from hapi.codecs.rows import decode_row, encode_rows
from hapi.errors import UnprocessableError, WireError
from hapi.models.tensors import tensor_bytes
from hapi.wire.encoding import encode_tensor
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import DTYPE_BYTES, NO_IDS, FrameHeader, TensorSpec, codec_fits, data_frame, frame_bytes

ONES: dict[str, int] = {
    "float64": 0x3FF0000000000000,
    "float32": 0x3F800000,
    "float16": 0x3C00,
    "bfloat16": 0x3F80,
}
"""The bits of 1.0; those of whole numbers are 1."""
KINDS = ["zeros", "no zeros", "no numbers", "smallest", "negative zeros", "noise", "half zeros", "one value"]
LAYOUTS = ["as it is", "transposed", "expanded", "every second", "channels last"]
SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    st.lists(st.sampled_from([1, 7, 8, 9, 15, 16, 17, 31, 33]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(1,), (0,), (3, 0), (1023,), (2, 4097), (5, 13, 7)]),
)  # fmt: skip


def words_of(kind: str, dtype: str, count: int, seed: int) -> np.ndarray:
    """Elements of ``dtype`` as their bits, unsigned."""
    size, random = DTYPE_BYTES[dtype], np.random.default_rng(seed)
    noise = np.frombuffer(random.bytes(count * size), dtype=f"<u{size}").copy()
    if dtype == "bool":
        noise &= 1
    top, one = 1 << (8 * size - 1), ONES.get(dtype, 1)
    floats = dtype in ONES
    if kind == "zeros":
        noise[:] = 0
    elif kind == "no zeros":
        noise |= 1
    elif kind == "no numbers" and floats:  # with payloads and signs, infinities among them
        infinity = {8: 0x7FF0000000000000, 4: 0x7F800000, 2: 0x7C00 if dtype == "float16" else 0x7F80}[size]
        noise |= np.asarray(infinity, dtype=noise.dtype)
        noise[::5] = infinity
    elif kind == "smallest" and floats:  # of few bits only
        noise %= 97
        noise[::3] |= np.asarray(top, dtype=noise.dtype)
    elif kind == "negative zeros" and floats:
        noise[:] = 0
        noise[::2] = top
    elif kind == "half zeros":
        noise[random.random(count) < 0.5] = 0
    elif kind == "one value":
        noise[:] = one
    return noise


def tensor_of(kind: str, dtype: str, shape: tuple[int, ...], layout: str, seed: int) -> torch.Tensor:
    """A tensor of this shape; its memory is not in the order of its elements, but for the first layout."""
    count = int(np.prod(shape, dtype=np.int64))

    def of(*sides: int) -> torch.Tensor:
        """Elements in a contiguous tensor."""
        words = words_of(kind, dtype, int(np.prod(sides, dtype=np.int64)), seed)
        return torch.from_numpy(words.view(np.uint8)).view(getattr(torch, dtype)).reshape(sides)

    if layout == "transposed" and len(shape) > 1:
        return of(*shape[::-1]).permute(*range(len(shape))[::-1])
    if layout == "expanded" and shape and count:
        return of(1, *shape[1:]).expand(shape)
    if layout == "every second" and shape and count:
        return of(2 * shape[0], *shape[1:])[::2]
    if layout == "channels last" and len(shape) == 4 and count:
        return of(*shape).contiguous(memory_format=torch.channels_last)
    return of(*shape)


def sent(spec: TensorSpec, data: Any, codec: str) -> tuple[TensorSpec, bytes]:
    """A frame of one tensor, and the tensor's form in it."""
    on_wire, buffer = encode_tensor(spec, data, codec)
    header = FrameHeader(NO_IDS, (on_wire,))
    frame = b"".join(bytes(part) for part in data_frame(header, [buffer]))
    assert len(frame) == frame_bytes(header) <= frame_bytes(FrameHeader(NO_IDS, (spec,)))
    return on_wire, frame


def received(frame: bytes, spec: TensorSpec) -> bytes:
    out = bytearray(b"\xa5" * spec.nbytes)  # whatever was there before
    found = FrameReader(io.BytesIO(frame)).next(lambda header: [memoryview(out)])
    assert isinstance(found, FrameHeader) and found.tensors[0].raw == spec
    return bytes(out)


@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=SHAPES,
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
@example("zeros+planes", "float32", (), "no numbers", "as it is", 0)
@example("planes", "float64", (3, 0), "zeros", "transposed", 0)
@example("zeros", "bool", (1,), "one value", "as it is", 0)
@example("zeros+planes", "float16", (2, 3, 3, 3), "half zeros", "channels last", 0)
def test_any_tensor_crosses(
    codec: str, dtype: str, shape: tuple[int, ...], kind: str, layout: str, seed: int
) -> None:
    tensor = tensor_of(kind, dtype, shape, layout, seed)
    raw, spec = bytes(tensor_bytes(tensor)), TensorSpec("features", dtype, shape)
    assert len(raw) == spec.nbytes and tuple(tensor.shape) == shape
    try:
        on_wire, frame = sent(spec, raw, codec)
    except UnprocessableError as error:
        assert codec in LOSSY and "does not fit the codec" in str(error)
        return
    out = received(frame, spec)
    if on_wire.codec in LOSSY:
        assert dtype == "float32" and codec_fits(codec, dtype)
        rows = shape[0] if shape else 1
        check_rounded(codec, np.frombuffer(raw, "<f4"), np.frombuffer(out, "<f4"), rows)
    else:
        assert out == raw


def check_rounded(codec: str, values: np.ndarray, found: np.ndarray, rows: int) -> None:
    """What is no number stays none, zeros stay zero, and others come as near as the codec can tell."""
    largest = np.abs(np.where(np.isfinite(values), values, 0)).reshape(rows, -1).max(axis=1, initial=0)
    lost = ~np.isfinite(values)
    if codec == "int8":  # a sample that holds no number has none
        lost = np.repeat(lost.reshape(rows, -1).any(axis=1), len(values) // rows)
    assert (np.isfinite(found) == ~lost).all()
    steps = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.0}[codec] * np.abs(values) + {"fp16": 2.0**-24}.get(
        codec, 1e-37
    )
    if codec == "int8":
        steps = steps + np.repeat(largest / 250, len(values) // rows)
    assert (np.abs(found - values)[~lost] <= steps[~lost]).all()
    if codec != "int8":
        assert (found[values == 0] == 0).all()


@given(
    codec=st.sampled_from(EXACT),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=SHAPES,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_rows_are_kept(
    codec: Any, dtype: str, shape: tuple[int, ...], kinds: list[str], seed: int
) -> None:
    size, count = DTYPE_BYTES[dtype], int(np.prod(shape, dtype=np.int64))
    rows = [words_of(kind, dtype, count, seed + n).view(np.uint8) for n, kind in enumerate(kinds)]
    encoded = encode_rows(codec, [row.data for row in rows], size)
    ends = np.cumsum(encoded.lengths)
    for row, stop, length, number in zip(rows, ends, encoded.lengths, encoded.codecs, strict=True):
        stored = encoded.data[stop - length : stop]
        assert length <= row.nbytes
        if number:
            out = np.full(row.nbytes, 0xA5, np.uint8)
            assert decode_row(int(number), stored, out, size) and (out == row).all()
        else:
            assert (stored == row).all()


# -- damage ------------------------------------------------------------------------------------------------------


@given(
    codec=st.sampled_from(EXACT),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    shape=st.sampled_from([(1, 65), (3, 333), (5, 13, 7)]),
    kind=st.sampled_from(["zeros", "half zeros", "smallest"]),
    where=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
    kind_of_damage=st.sampled_from(["cut", "flip", "longer"]),
)
def test_damaged_frames_are_one_error(
    codec: str, dtype: str, shape: tuple[int, ...], kind: str, where: float, change: int, kind_of_damage: str
) -> None:
    spec = TensorSpec("features", dtype, shape)
    _, frame = sent(spec, bytes(tensor_bytes(tensor_of(kind, dtype, shape, "as it is", 1))), codec)
    damaged, spot = bytearray(frame), int(where * len(frame))
    if kind_of_damage == "cut":
        del damaged[spot:]
    elif kind_of_damage == "flip":
        damaged[spot] ^= change
    else:
        damaged[spot:spot] = bytes([change])
    assume(not damaged.startswith(frame))  # what follows a frame is the next one's affair
    out = bytearray(spec.nbytes)

    def sink(header: FrameHeader) -> list[memoryview]:
        if [one.raw for one in header.tensors] != [spec]:  # as a reader of features does
            raise WireError("another form")
        return [memoryview(out)]

    with pytest.raises(WireError) as found:
        FrameReader(io.BytesIO(bytes(damaged))).next(sink)
    assert "\n" not in str(found.value)


HUGE = (1 << 32) - 1


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", range(8))
def test_lengths_that_lie_take_no_memory(kind: int, itemsize: int) -> None:
    """A block that says it is longer than it can be; planes and a bitmap that are longer than their block."""
    length = exact.planes.LENGTH.pack
    bodies = [b"", length(HUGE), length(HUGE) + bytes(40), length(4) + bytes(4) + length(HUGE), bytes(60)]
    out = memoryview(bytearray(1 << 12))
    tracemalloc.start()
    try:
        for body in bodies:
            for claimed in (len(body), HUGE, len(out) + 1):
                framed = exact._HEAD.pack(kind, claimed) + body
                with pytest.raises(WireError) as found:
                    decode_into("zeros+planes", framed, out, itemsize)
                assert "\n" not in str(found.value)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", LOSSY)
def test_rounded_bytes_of_another_length_are_refused(codec: str) -> None:
    values = np.linspace(-1, 1, 3 * 21, dtype=np.float32)
    encoded = b"".join(encode(codec, values.tobytes(), 4, 3) or [])
    out = memoryview(bytearray(values.nbytes))
    decode_into(codec, encoded, out, 4, 3)
    for wrong in (b"", encoded[:-1], encoded + b"\0", encoded * 2):
        with pytest.raises(WireError, match=codec):
            decode_into(codec, wrong, out, 4, 3)
