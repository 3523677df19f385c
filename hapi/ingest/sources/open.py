"""The source that a user names: a folder of images, an array file, or data of a library.

Those are ``torchvision:NAME[:option=value]...``, ``sklearn:digits`` and ``sklearn:photos``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hapi.data.manifest import check_classes
from hapi.errors import BadRequestError, UsageError
from hapi.ingest.labels.options import TABLE_SUFFIXES, LabelOptions
from hapi.ingest.sources.arrays import ArraySource
from hapi.ingest.sources.base import Source
from hapi.ingest.sources.folder import FolderSource
from hapi.ingest.sources.labelled_folder import LabelledFolder
from hapi.text import counted


@dataclass(frozen=True, kw_only=True)
class SourceOptions(LabelOptions):
    """Options of a source beside its name."""

    classes: tuple[str, ...] | None = None
    """All classes, by name in the order of their labels. If the source has no names, or wholly other ones,
    these are its classes' names. Default: the source's own names, or the labels' numbers.
    """
    store: Path | None = None
    """Folder of the store that is written, if it is local: never part of the source, though it may lie in it.
    """
    download: bool = False
    """Let torchvision fetch missing files."""


def open_source(text: str, options: SourceOptions | None = None) -> Source:
    """Open the source that ``text`` names; :class:`UsageError` when there is none or it has no usable
    content.
    """
    options = options or SourceOptions()
    options.checked()
    library = text.startswith(("torchvision:", "sklearn:"))
    if library and (options.labels is not None or options.label_kind != "auto"):
        raise UsageError("--labels and --label-kind are for folders and array files; this source has labels")
    if not text.strip():
        raise UsageError("the source is empty; give a folder ('.' for this one), a file or a name")
    if text.startswith("torchvision:"):
        from hapi.ingest.sources.torchvision import TorchvisionSource

        source: Source = TorchvisionSource(text, download=options.download)
    elif text.startswith("sklearn:"):
        from hapi.ingest.sources.sklearn import sklearn_source

        source = sklearn_source(text)
    elif _exists(Path(text).is_dir):
        source = _folder(Path(text), options)
    elif _exists(Path(text).is_file):
        source = ArraySource(Path(text), options, options.classes)
    else:
        raise UsageError(
            f"source {text[:200]!r}: no such folder or file; give a folder of images, a .npy, .npz or "
            ".safetensors file, torchvision:NAME, sklearn:digits or sklearn:photos"
        )
    if source.count == 0:
        raise UsageError(f"source {text[:200]!r} has no samples")
    if options.classes is not None and options.table is None and source.label_kind == "single":
        _name_classes(source, options.classes)
    _check_labels(source)
    return source


def _folder(path: Path, options: SourceOptions) -> Source:
    if options.table is not None:
        return LabelledFolder(path, options, options.classes, options.store)
    if options.labels is not None:
        raise UsageError(
            f"--labels {options.labels}: for a folder it is a table of files and labels ({', '.join(TABLE_SUFFIXES)}); "
            "if it is one, name the column with --label"
        )
    return FolderSource(path, options.store)


def _exists(check: Callable[[], bool]) -> bool:
    """A text may also be too long, or otherwise unfit, to be a path."""
    try:
        return check()
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
    if source.label_kind != "single":
        return
    low, high = int(source.labels.min()), int(source.labels.max())
    if low < 0 or high >= len(source.classes):
        raise UsageError(
            f"source {source.description}: labels are {low} to {high}, but must be 0 to "
            f"{len(source.classes) - 1} for {counted(len(source.classes), 'class')}; correct the labels, or give "
            "--classes"
        )
