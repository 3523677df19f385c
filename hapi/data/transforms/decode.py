"""Decoding of image files into pixels.

Plain JPEGs go to torchvision's decoder: one call into libjpeg, 1.3 (photos) to 2.5 times (small images) as
fast as Pillow's file object, plugin and picture around the same library, and the same pixels to the bit.
Everything else, and every JPEG that it refuses, goes to Pillow, so Pillow decides which files are accepted
and how errors read.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from hapi.errors import DataError, HapiError
from hapi.lazy_torchvision import vision
from hapi.process.memory_errors import is_out_of_memory

MAX_PIXELS = 89_478_485
"""Largest image that is decoded, and largest result of a resize: Pillow's own limit, 256 MiB of RGB."""

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP", "GIF")
"""Formats that are decoded. Pillow knows more, some of which start other programs (EPS)."""

_START = b"\xff\xd8\xff"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Frame headers of JPEGs with Huffman codes: baseline, extended, progressive."""
_SEGMENTS = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
"""Other segments of a plain header: tables, the interval of restarts, comments, and data of applications."""
_SCAN = 0xDA

F = vision("torchvision.transforms.v2.functional")
_io = vision("torchvision.io")


def check_image(data: bytes | memoryview) -> None:
    """Raise :class:`DataError` when the bytes do not begin like an image; cheap, as no pixel is decoded."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # As in decode_image: Pillow raises nearly anything on a damaged file.
    except Exception as error:
        raise _undecodable(error) from error
    check_size(image.width, image.height)
    _check_depth(image.mode)


def check_size(width: int, height: int, coder: str = "") -> None:
    """Raise :class:`DataError` for an image of more than :data:`MAX_PIXELS`; ``coder`` names its format."""
    if width * height > MAX_PIXELS:
        raise DataError(f"an image of {width} x {height} is too large (limit {MAX_PIXELS} pixels)")


Sized = Callable[[int, int, str], object]
"""Told an image's width, height and what decodes it (``plain``, or Pillow's name of the format) before its pixels are
made, and raises if they must not be; told again when another library tries."""


def decode_image(data: bytes | npt.NDArray[np.uint8], sized: Sized = check_size) -> torch.Tensor:
    """Decode an image to uint8 RGB [3, H, W]; :class:`DataError` when it is none, and the errors of
    ``sized``.
    """
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    size = _plain_jpeg(view)
    if size is not None:
        sized(*size, "plain")
        try:
            return _decode_jpeg(data)
        except RuntimeError as error:  # damaged, or torchvision was built without libjpeg
            if is_out_of_memory(error):
                raise MemoryError(f"an image of {size[0]} x {size[1]} found no memory") from None
    try:
        image = Image.open(io.BytesIO(view), formats=FORMATS)
        sized(image.width, image.height, image.format or "")
        _check_depth(image.mode)
        rgb = image.convert("RGB")
    except HapiError:
        raise
    # A damaged file makes Pillow raise nearly anything (SyntaxError, struct.error, IndexError ...).
    except Exception as error:
        raise _undecodable(error) from error
    tensor: torch.Tensor = F.pil_to_tensor(rgb)
    return tensor


def _decode_jpeg(data: bytes | npt.NDArray[np.uint8]) -> torch.Tensor:
    if isinstance(data, np.ndarray) and data.flags.writeable:  # torch takes no other
        encoded = torch.from_numpy(data)
    else:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    tensor: torch.Tensor = _io.decode_jpeg(encoded, mode=_io.ImageReadMode.RGB)
    return tensor


def _plain_jpeg(data: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height of a JPEG of 8 bits in grey or three colours with a usual header; None for anything else."""
    if data[:3] != _START:
        return None
    at, size = 2, None
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a byte of filling
            at += 1
            continue
        if marker == _SCAN:
            return size
        if marker in _FRAMES and size is None:
            frame = data[at + 4 : at + 10]
            if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3):
                return None
            height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
            if not width or not height:
                return None
            size = width, height
        elif marker not in _SEGMENTS:
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _undecodable(error: Exception) -> DataError:
    """The damage in Pillow's words, which may name an object in memory; MemoryError is no damage, and raised."""
    if is_out_of_memory(error):
        raise MemoryError("an image found no memory") from error
    return DataError(f"cannot be decoded as an image: {str(error).partition(' <_io.BytesIO')[0][:200]}")


def _check_depth(mode: str) -> None:
    """Pillow would make everything above 255 white: grey of 16 or 32 bits, and of floats."""
    if mode[0] in "IF":
        raise DataError(f"its pixels are numbers beyond 255 (Pillow's mode {mode}); scale it to 8 bits")
