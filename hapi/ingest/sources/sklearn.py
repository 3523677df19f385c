"""Real images that come with scikit-learn, so that a first run needs no download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from hapi.arrays import IntArray
from hapi.errors import UsageError
from hapi.ingest.sources.base import Source
from hapi.ingest.sources.images import png_bytes

PATCH = 64
STRIDE = 32


class ImageArraySource(Source):
    """Images held in memory, uint8 [N, H, W] or [N, H, W, 3], packed as PNG."""

    def __init__(
        self, description: str, images: np.ndarray, labels: IntArray, classes: tuple[str, ...]
    ) -> None:
        self.description = description
        self.labels = labels
        self.classes = classes
        self._images = images

    def sample(self, number: int) -> bytes:
        """Return the image as PNG."""
        return png_bytes(Image.fromarray(self._images[number]))

    def content_key(self) -> bytes:
        """Return the digest of the pixels."""
        return bytes(xxhash.xxh3_128(np.ascontiguousarray(self._images).data).digest())


def sklearn_source(text: str) -> Source:
    """``sklearn:digits``: 1,797 handwritten digits of 8 x 8; ``sklearn:photos``: patches of photographs."""
    kinds: dict[str, Callable[[Any], Source]] = {"digits": _digits, "photos": _photos}
    name = text.partition(":")[2]
    if name not in kinds:
        raise UsageError(f"source {text[:100]!r} is not known; there are sklearn:digits and sklearn:photos")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UsageError(
            f"{text} needs scikit-learn: pip install 'hapi-split[quickstart]' ({error})"
        ) from error
    return kinds[name](datasets)


def _digits(datasets: Any) -> Source:
    digits = datasets.load_digits()
    # Stored as counts 0..16 of set pixels in 4 x 4 blocks; stretched to the whole range of a byte.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return ImageArraySource(
        "sklearn:digits", images, digits.target.astype(np.int64), tuple(str(n) for n in digits.target_names)
    )


def _photos(datasets: Any) -> Source:
    photos = datasets.load_sample_images()
    patches: list[np.ndarray] = []
    labels: list[int] = []
    for label, photo in enumerate(photos.images):
        height, width = photo.shape[:2]
        for top in range(0, height - PATCH + 1, STRIDE):
            for left in range(0, width - PATCH + 1, STRIDE):
                patches.append(photo[top : top + PATCH, left : left + PATCH])
                labels.append(label)
    names = tuple(str(name).rpartition("/")[2].rpartition(".")[0] for name in photos.filenames)
    return ImageArraySource("sklearn:photos", np.stack(patches), np.array(labels, dtype=np.int64), names)
