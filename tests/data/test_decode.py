"""Whatever decodes an image, pixels and errors are Pillow's."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_sample_images

from hapi.data.transforms import decode
from hapi.data.transforms.decode import check_image, decode_image
from hapi.errors import DataError

FORMS = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "GIF"), ("RGB", "TIFF")]


def encode(width: int, height: int, mode: str, form: str, seed: int = 0, **options: Any) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def of_pillow(data: bytes) -> torch.Tensor | None:
    """What Pillow alone makes of it; None for an error, and for as many pixels as it warns of: we refuse those."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=decode.FORMATS) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception:
        return None


def ours(data: bytes) -> torch.Tensor | None:
    try:
        return decode_image(data)
    except DataError:
        return None


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@given(
    st.integers(1, 130),
    st.integers(1, 130),
    st.sampled_from(("RGB", "L", "CMYK")),
    st.integers(1, 100),
    st.sampled_from((0, 1, 2)),
    st.booleans(),
    st.sampled_from((0, 1, 3)),
)
def test_jpegs_are_those_of_pillow(
    width: int, height: int, mode: str, quality: int, subsampling: int, progressive: bool, restarts: int
) -> None:
    options = {"quality": quality, "progressive": progressive, "restart_marker_rows": restarts}
    if mode != "L":
        options["subsampling"] = subsampling
    data = encode(width, height, mode, "JPEG", **options)
    assert same(decode_image(data), of_pillow(data))
    assert decode._plain_jpeg(data) == (None if mode == "CMYK" else (width, height))


def test_photos_and_colour_spaces() -> None:
    for photo in load_sample_images().images:
        image = Image.fromarray(photo)
        for options in (
            {},
            {"keep_rgb": True},
            {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"},
            {"comment": "x" * 60000},
        ):
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=90, **options)
            assert decode._plain_jpeg(buffer.getvalue()) == image.size
            assert same(decode_image(buffer.getvalue()), of_pillow(buffer.getvalue()))


@pytest.mark.parametrize("progressive", [False, True])
def test_cut_off_anywhere(progressive: bool) -> None:
    data = encode(24, 17, "RGB", "JPEG", progressive=progressive)
    for length in range(len(data) + 1):
        assert same(ours(data[:length]), of_pillow(data[:length])), length
    assert same(decode_image(data + b"rest"), decode_image(data))


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.data())
def test_damaged_images_are_those_of_pillow(data: st.DataObject) -> None:
    mode, form = data.draw(st.sampled_from(FORMS))
    content = bytearray(encode(20, 17, mode, form))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(content)
    assert same(ours(damaged), of_pillow(damaged))
    try:
        check_image(damaged)
    except DataError as error:
        assert "image" in str(error)


def test_a_marker_that_only_libjpeg_passes_over_makes_no_plain_jpeg() -> None:
    # TEM has no length: libjpeg goes on after it, Pillow gives up. Instead of each marker of the header.
    content = encode(20, 17, "RGB", "JPEG")
    places = [
        at
        for at in range(2, content.index(b"\xff\xda") + 1)
        if content[at] == 0xFF and content[at + 1] >= 0xC0
    ]
    assert len(places) == 9
    for at in places:
        damaged = content[: at + 1] + b"\x01" + content[at + 2 :]
        assert of_pillow(damaged) is None and ours(damaged) is None


@given(st.binary(max_size=60), st.booleans())
def test_the_frame_header_is_found_in_anything(data: bytes, jpeg: bool) -> None:
    size = decode._plain_jpeg(decode._START + data if jpeg else data)
    assert size is None or min(size) > 0


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = io.BytesIO()
    Image.new("1", (10_000, 9_000)).save(bomb, "PNG")
    # Its header says 65,000 x 65,000; so refused before anything is decoded.
    jpeg = bytearray(encode(16, 16, "RGB", "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = (65_000).to_bytes(2, "big") * 2
    for check in (check_image, decode_image):
        for data in (bomb.getvalue(), bytes(jpeg)):
            with pytest.raises(DataError, match=r"too large|decompression bomb"):
                check(data)
    monkeypatch.setattr(decode, "MAX_PIXELS", 100)
    for form in ("PNG", "JPEG"):
        with pytest.raises(DataError, match="too large"):
            decode_image(encode(11, 10, "RGB", form))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_what_would_become_white_is_refused(kind: str, dtype: str) -> None:
    """Pillow cuts at 255 what has more than 8 bits."""
    if (kind, dtype) in (("PNG", "int32"), ("PNG", "float32"), ("PPM", "int32"), ("PPM", "float32")):
        pytest.skip("the format has none of these")
    buffer = io.BytesIO()
    Image.fromarray(np.arange(0, 60_000, 1_000).reshape(6, 10).astype(dtype)).save(buffer, kind)
    for look in (check_image, decode_image):
        with pytest.raises(DataError, match="scale it to 8 bits"):
            look(buffer.getvalue())


def test_without_torchvisions_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise RuntimeError("decode_jpeg: torchvision not compiled with libjpeg support")

    data = encode(30, 20, "RGB", "JPEG")
    expected = decode_image(data)
    monkeypatch.setattr(decode._io, "decode_jpeg", missing)
    assert same(decode_image(data), expected)
