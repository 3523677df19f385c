"""Sources, which ``hapi pack`` reads from: labels for all samples, and bytes for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import xxhash

from hapi.arrays import IntArray
from hapi.data.manifest import SampleLayout
from hapi.errors import UsageError
from hapi.wire.references import TransformSpec

ENCODED = SampleLayout(kind="encoded")


class Source(ABC):
    """Samples to be packed. ``sample`` may be called from several threads when ``thread_safe``."""

    description: str
    labels: IntArray
    classes: tuple[str, ...]
    layout: SampleLayout = ENCODED
    transform: TransformSpec | None = None
    """The transform that suits the source; None: the packer's default for images, none for tensors."""
    thread_safe: bool = True
    note: str = ""
    """A word to the user about what was found, for example files that were left out."""

    @property
    def count(self) -> int:
        return len(self.labels)

    @abstractmethod
    def sample(self, number: int) -> bytes | memoryview:
        """Bytes of a sample: an encoded image, or a tensor in C order."""

    def describe(self, number: int) -> str:
        """A sample's name in messages."""
        return f"{self.description}, sample {number}"

    @abstractmethod
    def content_key(self) -> bytes:
        """What tells this content from another (names, sizes, times of files; or the bytes themselves)."""

    def fingerprint(self) -> str:
        """Digest of labels, classes and content: an unfinished packing goes on only from the same source."""
        state = xxhash.xxh3_128()
        state.update(repr((self.description, self.count, self.classes, self.layout)).encode())
        state.update(np.ascontiguousarray(self.labels).data)
        state.update(self.content_key())
        return state.hexdigest()


def numbered_classes(labels: IntArray) -> tuple[str, ...]:
    """Class names "0", "1", ... for labels without names; bounded, lest a wrong label makes millions."""
    highest = int(labels.max(initial=0))
    if highest >= 1_000_000:
        raise UsageError(f"label {highest} is too large for a class number; labels count classes from 0")
    return tuple(str(number) for number in range(highest + 1))


def integer_labels(values: Sequence[object] | np.ndarray, what: str) -> IntArray:
    """``values`` as int64 [n]; :class:`UsageError` when they are no integers, one per sample."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise UsageError(
            f"{what}: expected one integer label per sample, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)
