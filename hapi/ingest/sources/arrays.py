"""Arrays on disk: ``.npy``, ``.npz`` or ``.safetensors`` with samples along the first axis, and labels."""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hapi.data.manifest import DTYPES, SampleLayout
from hapi.errors import BadRequestError, DataError, UsageError
from hapi.ingest.labels.file import MAX_TABLE_BYTES, StoredFile, content_of
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.labels.values import Labels, array_labels
from hapi.ingest.sources.base import Source, integer_labels, numbered_classes
from hapi.store.stored_array import StoredArray, npy_array, safetensors_arrays
from hapi.wire.references import TransformSpec, check_shape

Samples = np.ndarray | StoredArray

SAMPLE_NAMES = ("images", "features", "x", "data", "X")
LABEL_NAMES = ("labels", "y", "targets", "Y")
MAX_LABEL_TEXT_BYTES = 128 << 20
"""Largest file of labels as text; more labels fit a .npy file."""
_UNREADABLE = (
    OSError,
    MemoryError,
    ValueError,
    EOFError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)
"""Errors of numpy for files that are no arrays."""


class ArraySource(Source):
    """Samples that stay tensors of their type, in this machine's byte order.

    Models want channels first, so uint8 images are transposed: [N, H, W] becomes [N, 1, H, W], and [N, H, W,
    C] with C of 1 or 3 (and H none of both) becomes [N, C, H, W]. Arrays of floats are stored as they are.
    uint8 images of 1 or 3 channels get ImageNet's normalisation as their transform.
    """

    def __init__(
        self, path: Path, options: LabelOptions | None = None, classes: tuple[str, ...] | None = None
    ) -> None:
        """Open ``path``, with its own labels or those of ``options``, and these names of ``classes``."""
        options = options or LabelOptions()
        self.description = f"file {path.name}"
        self._path = path
        samples, found = _read(path)
        what = f"labels of {path}"
        if options.table is not None:
            raise UsageError(
                f"--labels {options.table}: a table of files is for a folder of images; labels of an array are .npy, "
                "or text with one a line"
            )
        if options.labels is not None:
            what, found = f"--labels {options.labels}", read_labels(options)
        if found is None:
            raise UsageError(f"{path} has no labels ({', '.join(LABEL_NAMES)}); give them with --labels FILE")
        labels = in_order(found, options, classes, what)
        self.labels, self.label_kind = labels.values, labels.kind
        if samples.ndim < 2 or len(samples) != len(self.labels):
            raise UsageError(
                f"{path}: expected samples along the first axis and a label for each, got an array of shape "
                f"{samples.shape} and {len(self.labels)} labels"
            )
        if samples.dtype.name not in DTYPES:
            raise UsageError(
                f"{path}: element type {samples.dtype} is not among {', '.join(DTYPES)}; convert it"
            )
        self._samples = samples
        self._moved, shape = _channels_first(samples)
        try:
            check_shape(list(shape), f"{path} cannot be packed: shape of its samples")
        except BadRequestError as error:
            raise UsageError(str(error)) from None
        self.layout = SampleLayout(kind="tensor", sample_shape=shape, sample_dtype=samples.dtype.name)
        self.classes = labels.classes
        if samples.dtype == np.uint8 and len(shape) == 3 and shape[0] in (1, 3):
            side = min(shape[1:])
            self.transform = TransformSpec(resize=side, crop=side)

    def sample(self, number: int) -> memoryview:
        """Return the bytes of a sample in C order."""
        sample = self._moved(self._samples[number])
        native = np.ascontiguousarray(sample, dtype=sample.dtype.newbyteorder("="))
        return native.reshape(-1).view(np.uint8).data

    def content_key(self) -> bytes:
        """Return size and time of the file."""
        stat = self._path.stat()
        state = xxhash.xxh3_128(b"%d %d" % (stat.st_size, stat.st_mtime_ns))
        for number in range(0, self.count, max(1, self.count // 16)):
            state.update(self.sample(number))
        return bytes(state.digest())


def _channels_first(samples: Samples) -> tuple[Callable[[np.ndarray], np.ndarray], tuple[int, ...]]:
    """The function that brings a sample's channels first, and the resulting shape."""
    shape = tuple(int(side) for side in samples.shape[1:])
    if samples.dtype == np.uint8 and len(shape) == 2:
        return (lambda sample: sample[None]), (1, *shape)
    if samples.dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3) and shape[0] not in (1, 3):
        return (lambda sample: sample.transpose(2, 0, 1)), (shape[2], *shape[:2])
    return (lambda sample: sample), shape


def _read(path: Path) -> tuple[Samples, np.ndarray | None]:
    try:
        if path.suffix == ".npy":
            return npy_array(path), None
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return _pick(path, archive)
        if path.suffix == ".safetensors":
            samples, labels = _pick(path, safetensors_arrays(path))
            return samples, labels.whole() if isinstance(labels, StoredArray) else labels
    except (*_UNREADABLE, DataError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    raise UsageError(
        f"{path}: not a kind of file that can be packed; give .npy, .npz or .safetensors, or a folder"
    )


def _pick(path: Path, tensors: Mapping[str, Any]) -> tuple[Any, Any]:
    samples = next((name for name in SAMPLE_NAMES if name in tensors), None)
    if samples is None:
        names = ", ".join(sorted(tensors)) or "nothing"
        raise UsageError(f"{path}: no array is named {', '.join(SAMPLE_NAMES)}; there is {names}")
    labels = next((name for name in LABEL_NAMES if name in tensors), None)
    return tensors[samples], None if labels is None else tensors[labels]


def read_labels(options: LabelOptions) -> np.ndarray:
    """Return the numbers in the file of labels of ``options``; :class:`UsageError` when it has none or is too large."""
    path = options.labels
    if path is None:
        raise UsageError("there is no file of labels; give one with --labels FILE")
    what, word = f"--labels {path}", "number" if options.label_kind == "regression" else "integer"
    try:
        if path.suffix == ".npy" and isinstance(path, StoredFile):
            stored: np.ndarray = np.load(
                io.BytesIO(content_of(path, MAX_TABLE_BYTES, what)), allow_pickle=False
            )
            return stored
        elif path.suffix == ".npy":
            found = npy_array(Path(str(path)))
            return found.whole() if isinstance(found, StoredArray) else found
        lines = content_of(path, MAX_LABEL_TEXT_BYTES, what).decode().split()
        if word == "number":
            return np.array([float(line) for line in lines])
        return np.array([int(line) for line in lines], dtype=np.int64)
    except (*_UNREADABLE, OverflowError) as error:
        raise UsageError(f"{what}: {error}; give a .npy file, or text with one {word} a line") from error


def in_order(values: np.ndarray, options: LabelOptions, classes: tuple[str, ...] | None, what: str) -> Labels:
    """Return ``values`` as the labels of all samples in their order; single ones unless ``options`` say otherwise.

    Args:
        values: numbers of shape [n] or [n, k].
        options: kind of the labels.
        classes: names of the outputs; None: their numbers. Single labels are not compared with them.
        what: name for messages.

    Raises:
        UsageError: they are no such labels.
    """
    if options.label_kind in ("multi", "regression"):
        return array_labels(values, options.label_kind, classes, what)
    numbers = integer_labels(values, what)
    return Labels(numbers, "single", numbered_classes(numbers))
