"""Sources of ``hapi pack``: labels of all samples, and bytes of each.

``open_source`` chooses one by the user's text: a folder of images, an array file,
``torchvision:NAME[:option=value]...`` or ``sklearn:digits`` / ``sklearn:photos``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import xxhash

from hapi.arrays import IntArray, LabelArray
from hapi.data.manifest import SampleLayout
from hapi.errors import UsageError
from hapi.ingest.skipped import Skipped
from hapi.wire.labels import LabelKind
from hapi.wire.references import TransformSpec

ENCODED = SampleLayout(kind="encoded")


class Source(ABC):
    """Samples to be packed. ``sample`` may be called from several threads when ``thread_safe``."""

    description: str
    labels: LabelArray
    """int64 [n], or float32 [n, k]."""
    classes: tuple[str, ...]
    """Names of the classes, or of the outputs of a regression."""
    label_kind: LabelKind = "single"
    layout: SampleLayout = ENCODED
    transform: TransformSpec | None = None
    """The transform that suits the source; None: the packer's default for images, none for tensors."""
    thread_safe: bool = True
    unmatched: Skipped = Skipped()
    """Samples that were left out because a table has no labels for them."""
    note: str = ""
    """A note for the user, for example about files that were left out."""

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.labels)

    @abstractmethod
    def sample(self, number: int) -> bytes | memoryview:
        """Return the bytes of a sample: an encoded image, or a tensor in C order."""

    def describe(self, number: int) -> str:
        """Return a sample's name for messages."""
        return f"{self.description}, sample {number}"

    @abstractmethod
    def content_key(self) -> bytes:
        """Return text that differs for other content (names, sizes, times of files; or the bytes themselves)."""

    def fingerprint(self) -> str:
        """Return the digest of labels, classes and content; an unfinished packing goes on only from the same
        source.
        """
        state = xxhash.xxh3_128()
        kind = () if self.label_kind == "single" else (self.label_kind,)
        state.update(repr((self.description, self.count, self.classes, self.layout, *kind)).encode())
        state.update(np.ascontiguousarray(self.labels).data)
        state.update(self.content_key())
        return state.hexdigest()


def numbered_classes(labels: IntArray) -> tuple[str, ...]:
    """Return class names "0", "1", ... for labels without names; bounded, so that a wrong label does not make
    millions.
    """
    highest = int(labels.max(initial=0))
    if highest >= 1_000_000:
        raise UsageError(f"label {highest} is too large for a class number; labels count classes from 0")
    return tuple(str(number) for number in range(highest + 1))


def integer_labels(values: Sequence[object] | np.ndarray, what: str) -> IntArray:
    """Return ``values`` as int64 [n]; :class:`UsageError` unless they are integers, one per sample."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise UsageError(
            f"{what}: expected one integer label per sample, got {array.dtype} of shape {array.shape}; "
            "for numbers or several labels a sample give --label-kind regression or multi"
        )
    return array.astype(np.int64)
