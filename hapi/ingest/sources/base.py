"""What ``hapi pack`` reads from: a source has labels for all its samples, and bytes for each.

``open_source`` chooses by the text the user gave: a folder of images, an array file,
``torchvision:NAME[:option=value]...`` or ``sklearn:digits`` / ``sklearn:photos``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hapi.arrays import IntArray
from hapi.data.manifest import SampleLayout, check_classes
from hapi.errors import BadRequestError, UsageError
from hapi.wire.references import TransformSpec

ENCODED = SampleLayout(kind="encoded")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a user may say about a source beside its name."""

    labels: Path | None = None
    """File of labels for an array without them: ``.npy``, or text with one integer a line."""
    classes: tuple[str, ...] | None = None
    """All classes, by name in the order of their labels; where the source knows no names, or wholly other ones, these
    are its classes' names. Else what the source knows, else the labels' numbers."""
    store: Path | None = None
    """The folder of the store that is written, if it is one: no part of the source, though it may lie in it."""
    download: bool = False
    """Let torchvision fetch what is missing."""


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


def open_source(text: str, options: SourceOptions | None = None) -> Source:
    """The source that ``text`` names; :class:`UsageError` when it is none or has no usable content."""
    options = options or SourceOptions()
    if not text.strip():
        raise UsageError("the source is empty; give a folder ('.' for this one), a file or a name")
    if text.startswith("torchvision:"):
        from hapi.ingest.sources.torchvision import TorchvisionSource

        source: Source = TorchvisionSource(text, download=options.download)
    elif text.startswith("sklearn:"):
        from hapi.ingest.sources.sklearn import sklearn_source

        source = sklearn_source(text)
    elif _is_there(Path(text).is_dir):
        from hapi.ingest.sources.folder import FolderSource

        source = FolderSource(Path(text), options.store)
    elif _is_there(Path(text).is_file):
        from hapi.ingest.sources.arrays import ArraySource

        source = ArraySource(Path(text), labels=options.labels)
    else:
        raise UsageError(
            f"source {text[:200]!r}: no such folder or file; give a folder of images, a .npy, .npz or "
            ".safetensors file, torchvision:NAME, sklearn:digits or sklearn:photos"
        )
    if options.labels is not None and not _is_there(Path(text).is_file):
        raise UsageError("--labels is for array files; the other sources have labels")
    if source.count == 0:
        raise UsageError(f"source {text[:200]!r} has no samples")
    if options.classes is not None:
        _name_classes(source, options.classes)
    _check_labels(source)
    return source


def _is_there(look: Callable[[], bool]) -> bool:
    """A text may also be too long, or otherwise unfit, to be a path."""
    try:
        return look()
    except (OSError, ValueError):
        return False


def _name_classes(source: Source, given: tuple[str, ...]) -> None:
    """Label the source by the ``given`` classes: by their names where it has the same, else by their places."""
    own = source.classes
    if own != tuple(str(number) for number in range(len(own))):
        missing = [name for name in own if name not in given]
        if len(missing) < len(own) and missing:
            raise UsageError(
                f"--classes: {source.description} has the class {missing[0][:80]!r}, which is not among them; add it"
            )
        if len(missing) == len(own) != len(given):
            raise UsageError(
                f"--classes: none of these {len(given)} is a class of {source.description}, which has {len(own)}; "
                "give other names for all of them, or all their names"
            )
        if not missing:
            source.labels = np.array([given.index(name) for name in own], dtype=np.int64)[source.labels]
    source.classes = given


def _check_labels(source: Source) -> None:
    try:
        check_classes(source.classes)
    except BadRequestError as error:
        raise UsageError(f"source {source.description}: {error}; give --classes") from None
    low, high = int(source.labels.min()), int(source.labels.max())
    if low < 0 or high >= len(source.classes):
        raise UsageError(
            f"source {source.description}: labels are {low} to {high}, but there are {len(source.classes)} "
            "classes, 0 and up; correct the labels, or give --classes"
        )


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
