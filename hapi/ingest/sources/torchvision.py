"""Any classification dataset of torchvision by name: ``torchvision:CIFAR10:root=data:split=test``.

If the dataset is made of image files they are kept as they are; otherwise images become PNG (lossless).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from hapi.arrays import IntArray
from hapi.errors import DataError, UsageError
from hapi.ingest.sources.base import Source, integer_labels, numbered_classes
from hapi.ingest.sources.folder import EXTENSIONS
from hapi.ingest.sources.images import png_bytes

_FILE_LISTS = ("samples", "imgs", "_samples", "_image_files")
_LABEL_LISTS = ("targets", "labels", "_labels", "y")


class TorchvisionSource(Source):
    """A torchvision dataset. Options are its constructor's; ``split=train|test`` works for all."""

    def __init__(self, text: str, download: bool = False) -> None:
        name, options = _parse(text)
        self._dataset = _build(name, options, download)
        shown = "".join(f":{key}={value}" for key, value in sorted(options.items()) if key != "root")
        self.description = f"torchvision:{name}{shown}"
        # Some read from one open file (HDF5, LMDB): one thread at a time for all that are not plain files.
        self.thread_safe = False
        try:
            count = len(self._dataset)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{self.description} has no number of samples: {error}; check its options"
            ) from error
        if count == 0:
            raise UsageError(f"{self.description} has no samples")
        self._probes = self._sound_samples(count)
        self.labels = self._labels(count)
        self._files = self._image_files(count)
        if self._files is not None:
            self.thread_safe = True
        self.classes = self._class_names()

    def sample(self, number: int) -> bytes:
        """Return the file's bytes, or the image as PNG."""
        if self._files is None:
            return png_bytes(self._image(number))
        try:
            return self._files(number).read_bytes()
        except OSError as error:
            raise DataError(f"{self.describe(number)}: {error}") from error

    def content_key(self) -> bytes:
        """Return text that differs for other files or items."""
        state = xxhash.xxh3_128()
        for number in self._probes:
            state.update(self.sample(number))
        return bytes(state.digest())

    def _image(self, number: int) -> Image.Image:
        image = self._item(number)[0]
        if not isinstance(image, Image.Image):
            raise UsageError(f"{self.description}: sample {number} is no image but {type(image).__name__}")
        return image

    def _item(self, number: int) -> tuple[Any, Any]:
        try:
            item = self._dataset[number]
        # A missing file is an OSError, a damaged one makes Pillow raise nearly anything.
        except Exception as error:
            raise DataError(f"{self.describe(number)}: {type(error).__name__}: {str(error)[:200]}") from error
        if not isinstance(item, tuple) or len(item) != 2:
            raise UsageError(
                f"{self.description} does not give (image, label) pairs: no classification dataset"
            )
        return item

    def _sound_samples(self, count: int) -> list[int]:
        """Samples that the rest is judged by: the first, the middle and the last one, but for those that are bad."""
        found, problem = [], None
        for number in sorted({0, count // 2, count - 1}):
            try:
                self._item(number)
                found.append(number)
            except DataError as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return found

    def _labels(self, count: int) -> IntArray:
        """Labels from the dataset's own list if it agrees with its items, otherwise from the items."""
        for name in _LABEL_LISTS:
            values = getattr(self._dataset, name, None)
            if values is not None and len(values) == count:
                array = np.asarray(values)
                if array.ndim == 1 and array.dtype.kind in "iu" and self._agrees(array):
                    return array.astype(np.int64)
        labels = (self._item(number)[1] for number in range(count))
        return integer_labels([_plain(label) for label in labels], self.description)

    def _agrees(self, labels: np.ndarray) -> bool:
        return all(np.array_equal(_plain(self._item(n)[1]), labels[n]) for n in self._probes)

    def _image_files(self, count: int) -> Callable[[int], Path] | None:
        """Number to file, when the dataset has a list of files that decode to just its images."""
        for name in _FILE_LISTS:
            entries = getattr(self._dataset, name, None)
            if not isinstance(entries, list) or len(entries) != count:
                continue

            def file(number: int, entries: list[Any] = entries) -> Path:
                entry = entries[number]
                return Path(entry[0] if isinstance(entry, tuple | list) else entry)

            try:
                if all(self._same_image(file(n), n) for n in self._probes):
                    return file
            except (OSError, TypeError, IndexError):
                continue
        return None

    def _same_image(self, path: Path, number: int) -> bool:
        if path.suffix.lower() not in EXTENSIONS:
            return False
        with Image.open(path) as image:
            stored = np.asarray(image.convert("RGB"))
        return np.array_equal(stored, np.asarray(self._image(number).convert("RGB")))

    def _class_names(self) -> tuple[str, ...]:
        names = getattr(self._dataset, "classes", None)
        if isinstance(names, list | tuple) and names:
            # ImageNet has tuples of synonyms; the first is the name.
            texts = [str(n[0] if isinstance(n, tuple | list) else n) for n in names]
            if len(texts) > int(self.labels.max()):
                return tuple(t if texts.count(t) == 1 else f"{t} ({i})" for i, t in enumerate(texts))
        return numbered_classes(self.labels.astype(np.int64))


def _plain(label: Any) -> Any:
    return label.item() if hasattr(label, "item") else label


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    _, name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise UsageError(
                f"source {text[:200]!r}: {part!r} is no option; write torchvision:NAME:root=PATH:split=test"
            )
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "," in text:
        return tuple(_value(part) for part in text.split(","))
    return int(text) if text.lstrip("-").isdecimal() else text


def _build(name: str, options: dict[str, Any], download: bool) -> Any:
    from torchvision import datasets

    cls = getattr(datasets, name, None) if name in datasets.__all__ else None
    if cls is None:
        matches = [n for n in datasets.__all__ if n.lower() == name.lower()]
        raise UsageError(
            f"torchvision has no dataset {name[:80]!r}; "
            + (
                f"did you mean {matches[0]}?"
                if matches
                else "see https://pytorch.org/vision/stable/datasets.html"
            )
        )
    known = inspect.signature(cls).parameters
    given = dict(options)
    if "split" in given and "split" not in known and "train" in known:
        given["train"] = given.pop("split") == "train"
    if "root" in known:
        given.setdefault("root", "data")
    if download and "download" in known:
        given["download"] = True
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"torchvision:{name} has no option {unknown[0]!r}; it has {', '.join(known)}")
    try:
        return cls(**given)
    # What a dataset raises when its files are missing or an option is wrong differs from one to the next.
    except Exception as error:
        hint = "give root=PATH, or --download" if "root" in known else "see its documentation"
        raise UsageError(f"torchvision:{name} cannot be opened: {str(error)[:300]}; {hint}") from error
