"""The transform is bit-identical to a plain torchvision pipeline, sample by sample."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.errors import DataError, UnprocessableError
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples, offsets_of

ENCODED = SampleLayout(kind="encoded")


def make_samples(parts: list[bytes], first_id: int = 100) -> Samples:
    offsets = offsets_of(np.array([len(p) for p in parts], dtype=np.int64))
    ids = np.arange(first_id, first_id + len(parts), dtype=np.int64)
    return Samples(ids=ids, data=np.frombuffer(b"".join(parts), dtype=np.uint8), offsets=offsets, labels=ids)


def encode(width: int, height: int, mode: str, form: str, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    rgb = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    rgb.convert(mode).save(buffer, form)
    return buffer.getvalue()


def plain(data: bytes, spec: TransformSpec) -> torch.Tensor:
    """What a user would write, with none of our code: only torchvision's."""
    pipeline = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(spec.resize, antialias=True),
            v2.CenterCrop(spec.crop),
            v2.Lambda(lambda image: image.float() / 255),
            v2.Normalize(spec.mean, spec.std),
        ]
    )
    with Image.open(io.BytesIO(data)) as image:
        return pipeline(image.convert("RGB"))


_MODES = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("1", "PNG"), ("L", "PNG"),
          ("RGB", "WEBP"), ("RGB", "BMP"), ("P", "GIF"), ("RGB", "TIFF"), ("RGB", "PPM"), ("LA", "PNG")]  # fmt: skip


@given(
    st.integers(1, 300), st.integers(1, 300), st.sampled_from(_MODES), st.integers(1, 120), st.integers(0, 40)
)
def test_bit_identical_to_torchvision(
    width: int, height: int, mode: tuple[str, str], crop: int, more: int
) -> None:
    spec = TransformSpec(resize=crop + more, crop=crop)
    data = encode(width, height, *mode)
    got = input_batch(make_samples([data]), ENCODED, spec)
    assert got.dtype == torch.float32 and torch.equal(got[0], plain(data, spec))


def test_default_transform_on_a_large_jpeg() -> None:
    data = encode(500, 375, "RGB", "JPEG")
    assert torch.equal(
        input_batch(make_samples([data]), ENCODED, TransformSpec())[0], plain(data, TransformSpec())
    )


def test_neighbours_and_threads_have_no_influence() -> None:
    parts = [encode(40 + 7 * i, 90 - 5 * i, "RGB", "JPEG", seed=i) for i in range(11)]
    spec = TransformSpec.for_image_size(32)
    alone = torch.stack([input_batch(make_samples([p]), ENCODED, spec)[0] for p in parts])
    for threads in (1, 2, 5):
        assert torch.equal(input_batch(make_samples(parts), ENCODED, spec, threads), alone)
    assert input_batch(make_samples([]), ENCODED, spec, 4).shape == (0, 3, 32, 32)


def _damaged() -> dict[str, bytes]:
    good = encode(50, 50, "RGB", "JPEG")
    return {
        "empty": b"",
        "text": b"hello",
        "cut": good[: len(good) // 2],
        "png cut": encode(50, 50, "RGB", "PNG")[:60],
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }


@pytest.mark.parametrize("name", list(_damaged()))
@pytest.mark.parametrize("threads", [1, 3])
def test_undecodable_sample_is_named(name: str, threads: int) -> None:
    parts = [encode(20, 20, "RGB", "PNG"), _damaged()[name], encode(20, 20, "RGB", "PNG")]
    with pytest.raises(DataError, match="sample 101"):
        input_batch(make_samples(parts), ENCODED, TransformSpec.for_image_size(16), threads)


def test_long_images_are_refused() -> None:
    thin = encode(1, 3000, "L", "PNG")
    with pytest.raises(DataError, match=r"sample 100.*too long"):
        input_batch(make_samples([thin]), ENCODED, TransformSpec())


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8"])
def test_tensors_without_transform(dtype: str) -> None:
    values = (np.random.default_rng(0).random((4, 2, 3, 5)) * 255).astype(dtype)
    layout = SampleLayout(kind="tensor", sample_shape=(2, 3, 5), sample_dtype=dtype)
    got = input_batch(make_samples([v.tobytes() for v in values]), layout, None).numpy()
    wanted = values.astype(np.float32)
    assert np.array_equal(got, wanted / np.float32(255) if dtype == "uint8" else wanted)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [16, 10])
def test_uint8_tensors_are_scaled_and_normalised(channels: int, crop: int) -> None:
    values = np.random.default_rng(0).integers(0, 256, (3, channels, 16, 16), dtype=np.uint8)
    layout = SampleLayout(kind="tensor", sample_shape=(channels, 16, 16), sample_dtype="uint8")
    spec = TransformSpec(resize=max(crop, 12) if crop < 16 else 16, crop=crop)
    got = input_batch(make_samples([v.tobytes() for v in values]), layout, spec, threads=2)
    for value, batch in zip(values, got, strict=True):
        picture = Image.fromarray(value[0] if channels == 1 else value.transpose(1, 2, 0))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        assert torch.equal(batch, plain(buffer.getvalue(), spec))


def test_layouts_that_do_not_fit() -> None:
    spec = TransformSpec()
    two = SampleLayout(kind="tensor", sample_shape=(2, 8, 8), sample_dtype="float32")
    flat = SampleLayout(kind="tensor", sample_shape=(8,), sample_dtype="float32")
    assert input_shape(flat, None) == (8,)
    for layout, transform in ((two, spec), (flat, spec), (ENCODED, None)):
        with pytest.raises(UnprocessableError):
            input_shape(layout, transform)
    with pytest.raises(DataError, match="sample 100: 5 bytes"):
        input_batch(make_samples([b"12345"]), flat, None)
