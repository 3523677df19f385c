"""Limits of decoding an image, checked when its header has told its size and before memory of that size is
taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hapi.data.transforms import decode
from hapi.errors import DataError
from hapi.wire.references import TransformSpec

SMALL_BYTES = 1 << 20
"""Images that take up to this are decoded without asking: what they take together is little."""
_PIXEL_BYTES = {"plain": 7, "WEBP": 26}
_OTHER_PIXEL_BYTES = 18
"""Most bytes alive at once for each pixel, measured: 3 for the colours; libjpeg keeps 3 for a progressive file, Pillow
two copies of 4 beside two of 3, and libwebp as much again."""


class Room(Protocol):
    """Memory for images during decoding; thread-safe."""

    def enter(self, nbytes: int, width: int, height: int) -> None:
        """Wait until ``nbytes`` are free for an image of this size; raise an error if they never can be."""

    def leave(self, nbytes: int) -> None:
        """Give ``nbytes`` back."""


@dataclass(frozen=True)
class DecodeLimits:
    """Bounds of every image that is decoded."""

    pixels: int | None = None
    """Most of one image; None for :data:`hapi.data.transforms.decode.MAX_PIXELS`."""
    flag: str = ""
    """The setting that says so."""
    room: Room | None = None
    """None: memory is not bounded."""


NO_LIMITS = DecodeLimits()
"""The usual bound of pixels only."""


class Held:
    """One image's part of the room: taken when its size is known (:data:`hapi.data.transforms.decode.Sized`)."""

    __slots__ = ("_limits", "_transform", "nbytes")

    def __init__(self, limits: DecodeLimits, transform: TransformSpec | None) -> None:
        """Prepare for one image within ``limits``, whose pixels ``transform``, if any, uses."""
        self._limits = limits
        self._transform = transform
        self.nbytes = 0

    def __call__(self, width: int, height: int, coder: str) -> None:
        """Hold memory for an image of this size, made by ``coder``; :class:`DataError` when it is too large."""
        limits = self._limits
        self.leave()  # what one library refused, another one tries
        if limits.pixels is not None and width * height > limits.pixels:
            raise DataError(
                f"an image of {width} x {height} is too large (limit {limits.pixels} pixels, {limits.flag})"
            )
        decode.check_size(width, height, coder)
        if limits.room is None:
            return
        nbytes = image_bytes(width, height, coder, self._transform)
        if nbytes > SMALL_BYTES:
            limits.room.enter(nbytes, width, height)
            self.nbytes = nbytes

    def leave(self) -> None:
        """Give held memory back."""
        if self.nbytes and self._limits.room is not None:
            self._limits.room.leave(self.nbytes)
            self.nbytes = 0


def image_bytes(width: int, height: int, coder: str, transform: TransformSpec | None) -> int:
    """Return the most bytes alive at once while an image is decoded, resized and cropped.

    Its file and its output do not count.

    Args:
        width: in pixels.
        height: in pixels.
        coder: name of the decoder.
        transform: use of the pixels; None for none.
    """
    pixels = width * height * _PIXEL_BYTES.get(coder, _OTHER_PIXEL_BYTES)
    if transform is None:
        return pixels
    short, long = sorted((max(1, width), max(1, height)))
    resized = transform.resize * (transform.resize * long // short)
    between = long * transform.resize  # of one side resized, the other not yet
    return pixels + 9 * resized + 3 * between
