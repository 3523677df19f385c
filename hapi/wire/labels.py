"""Labels of samples: one class, several classes at once, or numbers; their form in arrays and frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hapi.arrays import Flags, LabelArray
from hapi.errors import BadRequestError
from hapi.text import counted
from hapi.wire.frames import TensorSpec

LABELS = "labels"
"""Name of the labels' tensor in frames."""
LabelKind = Literal["single", "multi", "regression"]
LABEL_KINDS: tuple[LabelKind, ...] = get_args(LabelKind)
MAX_WIDTH = 4096
"""Most values of one sample's label."""
_WORD = 8


def check_label_kind(kind: Any, what: str) -> LabelKind:
    """Return ``kind`` if there is such a kind of labels; raise :class:`BadRequestError` naming ``what``."""
    if kind not in LABEL_KINDS:
        raise BadRequestError(f"{what}: expected one of {', '.join(LABEL_KINDS)}")
    return kind  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LabelForm:
    """Form of a dataset's labels."""

    kind: LabelKind = "single"
    """``single``: the number of one class, int64 [n]. ``multi``: 1 for each class that applies, otherwise 0,
    float32 [n, classes]. ``regression``: numbers, float32 [n, outputs]."""
    classes: int = 1
    """Number of classes, or of outputs of a regression."""

    def checked(self, what: str) -> LabelForm:
        """Return this form; :class:`BadRequestError` naming ``what`` when a label has too many values."""
        if self.kind != "single" and self.classes > MAX_WIDTH:
            raise BadRequestError(
                f"{what}: {self.classes} values for one sample's label, at most {MAX_WIDTH} are allowed"
            )
        return self

    @property
    def dtype(self) -> Any:
        """Element type of the array."""
        return np.dtype(np.int64 if self.kind == "single" else np.float32)

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of the labels of ``count`` samples."""
        return (count,) if self.kind == "single" else (count, self.classes)

    def empty(self, count: int) -> LabelArray:
        """Return room for the labels of ``count`` samples."""
        room: LabelArray = np.empty(self.shape(count), dtype=self.dtype)
        return room

    def spec(self, count: int) -> TensorSpec:
        """Return the tensor of a frame with the labels of ``count`` samples."""
        return TensorSpec(LABELS, self.dtype.name, self.shape(count))

    @property
    def width(self) -> int:
        """Number of values of one sample's label."""
        return 1 if self.kind == "single" else self.classes

    @property
    def nbytes(self) -> int:
        """Bytes of one sample's label."""
        size: int = self.width * self.dtype.itemsize
        return size

    @property
    def words(self) -> int:
        """Number of 8-byte words that hold one sample's label."""
        return -(-self.nbytes // _WORD)

    def to_words(self, labels: LabelArray) -> npt.NDArray[np.uint64]:
        """Return the labels of n samples as uint64 [n, words], padded with zeros."""
        packed = np.zeros((len(labels), self.words * _WORD // self.dtype.itemsize), dtype=self.dtype)
        packed[:, : self.width] = labels.reshape(len(labels), self.width)
        return packed.view(np.uint64)

    def from_words(self, words: npt.NDArray[np.uint64]) -> LabelArray:
        """Return the labels that :meth:`to_words` made uint64 [n, words] of."""
        flat = np.ascontiguousarray(words).view(self.dtype)[:, : self.width]
        labels: LabelArray = np.ascontiguousarray(flat).reshape(self.shape(len(words)))
        return labels

    def first_wrong(self, labels: LabelArray) -> int | None:
        """Return the first row of ``labels``, an array of this form, that is no label; None when all are.

        A class is one of the classes, an entry of several labels is 0 to 1, and a number is finite.
        """
        if self.kind == "single":
            sound: Flags = np.logical_and(labels >= 0, labels < self.classes)
        elif self.kind == "multi":
            sound = np.logical_and.reduce((labels >= 0) & (labels <= 1), axis=1)
        else:
            sound = np.logical_and.reduce(np.isfinite(labels), axis=1)
        return None if sound.all() else int(np.argmin(sound))

    @property
    def summary(self) -> str:
        """Number of classes or outputs, for people."""
        if self.kind == "single":
            return counted(self.classes, "class")
        if self.kind == "multi":
            return f"several of {self.classes} labels each" if self.classes > 1 else "0 or 1 as label"
        return f"{counted(self.classes, 'number')} as label"

    @property
    def bounds(self) -> str:
        """Words for the labels that are possible, for messages."""
        if self.kind == "single":
            return f"the number of a class, 0 to {self.classes - 1}"
        return "0 to 1 for each class" if self.kind == "multi" else "a finite number for each output"


SINGLE = LabelForm()
"""Form of single labels in arrays, which does not depend on the number of classes."""


def equal_labels(one: LabelArray, other: LabelArray) -> Flags:
    """Return which of n labels are equal in two arrays of one form; bool [n]."""
    same: Flags = one == other
    return same if same.ndim == 1 else np.logical_and.reduce(same, axis=1)
