"""Codecs: every bit back, never larger, and nothing but a clear error for damaged bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hapi.codecs import exact
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.names import EXACT, ITEM_BYTES, LOSSY
from hapi.errors import UnprocessableError, WireError

CODEC = st.sampled_from(EXACT)
ITEM = st.sampled_from(ITEM_BYTES)


def rebuilt(codec: str, data: bytes, itemsize: int) -> bytes:
    """``data`` after a round trip; what is not smaller encoded crosses raw."""
    buffers = encode(codec, data, itemsize)
    if buffers is None:
        return data
    encoded = b"".join(buffers)
    assert len(encoded) < len(data)
    out = bytearray(len(data))
    decode_into(codec, encoded, memoryview(out), itemsize)
    return bytes(out)


@st.composite
def raw_bytes(draw: st.DrawFn) -> bytes:
    """Bytes with runs, zeros and noise, of any length."""
    parts = draw(
        st.lists(
            st.one_of(
                st.binary(max_size=300),
                st.builds(lambda n: bytes(n), st.integers(0, 3000)),
                st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=9), st.integers(0, 400)),
            ),
            max_size=8,
        )
    )
    return b"".join(parts)


@given(codec=CODEC, itemsize=ITEM, data=raw_bytes())
def test_every_bit_comes_back(codec: str, itemsize: int, data: bytes) -> None:
    assert rebuilt(codec, data, itemsize) == data


SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0x007FFFFF],
    dtype="<u4",
)
"""Bit patterns: both zeros, denormals, infinities, and what is no number with and without payload."""


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "<i1", "?"])
def test_all_types_of_several_blocks(codec: str, dtype: str) -> None:
    values = np.random.default_rng(3).standard_normal(700_000) * 3
    values[values < 0.5] = 0
    data = values.astype(dtype).tobytes()
    assert rebuilt(codec, data, np.dtype(dtype).itemsize) == data


@pytest.mark.parametrize("codec", EXACT)
def test_bit_patterns_survive(codec: str) -> None:
    words = np.random.default_rng(1).choice(SPECIAL, 300_001)
    assert rebuilt(codec, words.tobytes(), 4) == words.tobytes()


@pytest.mark.parametrize("codec", EXACT)
def test_a_negative_zero_is_not_zero(codec: str) -> None:
    values = np.zeros(4096, np.float32)
    values[::7] = -0.0
    assert rebuilt(codec, values.tobytes(), 4) == values.tobytes()


@pytest.mark.parametrize("codec", [*EXACT, *LOSSY])
def test_nothing_has_no_encoding(codec: str) -> None:
    assert encode(codec, b"", 4) is None


@pytest.mark.parametrize("codec", EXACT)
def test_noise_crosses_raw(codec: str) -> None:
    assert encode(codec, np.random.default_rng(0).bytes(3 << 20), 4) is None


def ratio(codec: str, data: bytes, itemsize: int) -> float:
    buffers = encode(codec, data, itemsize)
    return 1.0 if buffers is None else len(data) / sum(map(len, buffers))


def features(zero_share: float) -> np.ndarray:
    random = np.random.default_rng(7)
    values = random.standard_normal(1 << 20).astype(np.float32)
    values[random.random(values.size) < zero_share] = 0
    return values


def test_ratios_of_random_features() -> None:
    dense = features(0)
    assert ratio("planes", dense.tobytes(), 4) > 1.2
    assert ratio("planes", (dense.view("<u4") >> 16).astype("<u2").tobytes(), 2) > 1.5
    assert ratio("zeros", np.abs(features(0.5)).tobytes(), 4) > 1.85
    assert ratio("zeros+planes", np.abs(features(0.5)).tobytes(), 4) > 2.1
    assert ratio("zeros+planes", np.abs(features(0.9)).tobytes(), 4) > 8
    assert ratio("zeros", dense.tobytes(), 4) == 1


def test_features_that_repeat_shrink_by_their_repeats() -> None:
    repeated = np.tile(features(0)[:2000], 128)
    assert ratio("planes", repeated.tobytes(), 4) > 20
    copied = np.repeat(features(0)[:4000], 36)  # as pooling to a larger side does
    assert ratio("planes", copied.tobytes(), 4) > 20


@given(
    codec=CODEC,
    itemsize=ITEM,
    data=raw_bytes().filter(bool),
    where=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
    cut=st.booleans(),
)
def test_damaged_bytes_are_refused_or_decoded(
    codec: str, itemsize: int, data: bytes, where: float, change: int, cut: bool
) -> None:
    """A checksum guards what is sent: decoding need not notice, but neither crash nor take more than the raw bytes."""
    encoded = bytearray(b"".join(exact.encode(codec, data, itemsize)))
    spot = int(where * len(encoded))
    if cut:
        del encoded[spot:]
    else:
        encoded[spot] ^= change
    out = memoryview(bytearray(len(data)))
    try:
        decode_into(codec, encoded, out, itemsize)
    except WireError:
        return
    assert not cut


@given(codec=CODEC, itemsize=ITEM, junk=st.binary(max_size=500), size=st.integers(0, 2000))
def test_junk_is_refused(codec: str, itemsize: int, junk: bytes, size: int) -> None:
    out = memoryview(bytearray(size))
    for kind in range(8):
        framed = exact._HEAD.pack(kind, len(junk)) + junk
        try:
            decode_into(codec, framed, out, itemsize)
        except WireError:
            continue
        assert len(junk) <= size


def test_a_plane_that_claims_to_be_huge_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    body = exact.planes.LENGTH.pack(len(bomb)) + bomb
    framed = exact._HEAD.pack(exact.PLANES, len(body)) + body
    out = memoryview(bytearray(1 << 20))
    tracemalloc.start()
    with pytest.raises(WireError, match="encoded plane"):
        decode_into("planes", framed, out, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_memory_is_bounded_by_blocks() -> None:
    data = features(0.5).repeat(4).tobytes()
    encoded = b"".join(encode("zeros+planes", data, 4) or [])
    out = memoryview(bytearray(len(data)))
    tracemalloc.start()
    decode_into("zeros+planes", encoded, out, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * exact.BLOCK_BYTES
    assert out == data


def lossy(codec: str, values: np.ndarray, rows: int = 1) -> np.ndarray:
    buffers = encode(codec, values.tobytes(), 4, rows)
    assert buffers is not None
    out = bytearray(values.nbytes)
    decode_into(codec, b"".join(buffers), memoryview(out), 4, rows)
    return np.frombuffer(out, np.float32).reshape(values.shape)


def test_fp16_rounds_as_numpy_does() -> None:
    values = features(0.3)
    assert np.array_equal(lossy("fp16", values), values.astype(np.float16).astype(np.float32))


def test_bf16_rounds_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.concatenate(
        [features(0.3)[:100_000], np.array([1.00390625, 1.01171875, -0.0, 1e-40], np.float32)]
    )
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert lossy("bf16", values).tobytes() == expected.tobytes()


def test_int8_has_a_scale_for_each_sample() -> None:
    values = features(0)[: 6 * 50_000].reshape(6, 50_000) * np.array(
        [[1e-30], [1], [1e4], [0], [1e30], [1e-3]], np.float32
    )
    found = lossy("int8", values, 6)
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - values) <= step * 0.5001).all()
    alone = [lossy("int8", row) for row in values]
    assert np.array_equal(found, np.stack(alone))


def test_int8_of_samples_longer_than_a_piece() -> None:
    values = features(0)[: 2 * 300_000].reshape(2, 300_000)
    assert np.abs(lossy("int8", values, 2) - values).max() < np.abs(values).max() / 250


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_no_number_stays_none(codec: str) -> None:
    values = np.ones((3, 400), np.float32)
    values[1, 3] = np.nan
    values[2, 5] = np.inf
    found = lossy(codec, values, 3)
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).all()
    assert not np.isfinite(found[2]).all()


@pytest.mark.parametrize(("codec", "value"), [("fp16", 70_000.0), ("bf16", 3.4e38)])
def test_a_value_that_would_become_infinite_is_refused(codec: str, value: float) -> None:
    with pytest.raises(UnprocessableError, match=codec):
        encode(codec, np.full(9, value, np.float32).tobytes(), 4)


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codecs_refuse_another_length(codec: str) -> None:
    encoded = b"".join(encode(codec, features(0)[:100].tobytes(), 4) or [])
    for wrong in (encoded[:-1], encoded + b"\0"):
        with pytest.raises(WireError, match=codec):
            decode_into(codec, wrong, memoryview(bytearray(400)), 4)


def test_wrong_elements_are_a_defect_of_the_caller() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        encode("planes", b"abc", 3)
    with pytest.raises(ValueError, match="equal samples"):
        encode("int8", bytes(16), 4, rows=3)
