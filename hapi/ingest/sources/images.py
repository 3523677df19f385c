"""Images as PNG: the lossless form in which images without a file of their own are stored."""

from __future__ import annotations

import io

from PIL import Image

_KEPT_MODES = ("L", "RGB", "RGBA", "P", "1", "LA")


def png_bytes(image: Image.Image) -> bytes:
    """``image`` as PNG; modes that PNG does not have become RGB, as they would on reading."""
    if image.mode not in _KEPT_MODES:
        image = image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=False)
    return buffer.getvalue()
