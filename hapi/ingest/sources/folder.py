"""A folder of images as in torchvision's ImageFolder, but for hidden ones: FOLDER/CLASS/**/image. Files stay as they
are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import xxhash

from hapi.errors import UsageError
from hapi.ingest.parts import training_and_other
from hapi.ingest.sources.base import Source
from hapi.store.walk import GONE
from hapi.text import counted, printable

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File suffixes of torchvision's ImageFolder."""


class FolderSource(Source):
    """Scanned once, in ImageFolder's order; file names are kept as one block of bytes, not as objects."""

    def __init__(self, root: Path, store: Path | None = None) -> None:
        """Scan ``root``, but not ``store``, the folder of a store that may lie inside."""
        self.root = root
        apart = [root] if store is None else [root, store, store / "datasets", store / "models"]
        self._apart = {_identity(folder) for folder in apart} - {None}
        self.description = f"folder {root.name or root}"
        self._names = bytearray()
        self._ends: np.ndarray = np.empty(0, dtype=np.int64)
        self._files = xxhash.xxh3_128()
        self._left_out = 0
        self._first_left_out = ""
        self.classes = self._class_names()
        self._scan()
        if self._left_out:
            self.note = (
                f"{counted(self._left_out, 'file')} left out: hidden, no images by their names, in no class's folder, "
                f"or links that lead nowhere; the first is {self._first_left_out}{'; ' if self.note else ''}{self.note}"
            )

    def _class_names(self) -> tuple[str, ...]:
        try:
            with os.scandir(self.root) as entries:
                found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            raise UsageError(f"{self.root}: {error.strerror}") from error
        names: list[str] = []
        stores: list[str] = []
        for entry in found:
            if _is_folder(entry):
                (stores if _identity(entry.path) in self._apart else names).append(entry.name)
            elif entry.name.lower().endswith(EXTENSIONS) or _state(entry) is None:
                self._leave_out(entry)
        if stores:
            self.note = f"no class, as the dataset goes there: {', '.join(stores)}"
        classes = tuple(names)
        if not classes:
            raise UsageError(
                f"{self.root} has no folders in it; put the images of each class into a folder of its name"
            )
        mixed = training_and_other([([name], name) for name in classes])
        if mixed:
            raise UsageError(
                f"{self.root} holds training data ({mixed[0]}) and other data ({mixed[1]}), which are not mixed: "
                f"pack {self.root / mixed[0]} and {self.root / mixed[1]}, each as a dataset of its own"
            )
        return classes

    def _scan(self) -> None:
        ends: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        for label, name in enumerate(self.classes):
            marks = np.fromiter(self._class_files(name), dtype=np.int64)
            if not len(marks):
                raise UsageError(
                    f"{self.root / name} has no images ({', '.join(EXTENSIONS)}); remove the folder"
                )
            ends.append(marks)
            labels.append(np.full(len(marks), label, dtype=np.int64))
        self._ends = np.concatenate(ends)
        self.labels = np.concatenate(labels)

    def _class_files(self, name: str) -> Iterator[int]:
        """Append every image of a class to the block of names; yields where each name ends."""
        apart = self._apart if name else self._apart - {_identity(self.root)}
        for folder in sorted(_folders(self.root / name, apart)):
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda e: e.name)
            for entry in found:
                state = _state(entry)
                if state is not None and stat.S_ISDIR(state.st_mode):
                    continue
                if (
                    state is None
                    or not stat.S_ISREG(state.st_mode)
                    or entry.name.startswith(".")
                    or not entry.name.lower().endswith(EXTENSIONS)
                ):
                    self._leave_out(entry)
                    continue
                relative = os.path.relpath(entry.path, self.root)
                if not self._accepts(relative):
                    continue
                path = os.fsencode(relative)
                self._files.update(path + b"\0%d %d\0" % (state.st_size, state.st_mtime_ns))
                self._names += path
                yield len(self._names)

    def _leave_out(self, entry: os.DirEntry[str]) -> None:
        """Count a file that is no sample."""
        self._first_left_out = self._first_left_out or printable(entry.path)
        self._left_out += 1

    def _accepts(self, path: str) -> bool:
        """Whether an image at this path from the folder is a sample."""
        return True

    def path(self, number: int) -> Path:
        """Return the file of a sample."""
        first = int(self._ends[number - 1]) if number else 0
        return self.root / os.fsdecode(bytes(self._names[first : int(self._ends[number])]))

    def describe(self, number: int) -> str:
        """Return the path below the folder."""
        return str(self.path(number))

    def sample(self, number: int) -> bytes:
        """Return the bytes of the file."""
        path = self.path(number)
        try:
            return path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; the folder changed while it was packed") from error

    def content_key(self) -> bytes:
        """Return names, sizes and times of all files, as a digest."""
        return self._files.digest()


def _state(entry: os.DirEntry[str]) -> os.stat_result | None:
    """State of the entry or of a link's target; None for a dangling link, or a file that vanished meanwhile."""
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in GONE:
            return None
        raise UsageError(f"{entry.path}: {error.strerror}; it cannot be read") from error


def _identity(folder: str | Path) -> tuple[int, int] | None:
    """Identity of a folder; None for an inaccessible one."""
    try:
        state = Path(folder).stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _folders(top: Path, apart: Set[tuple[int, int] | None]) -> Iterator[str]:
    """``top`` and all folders below but hidden ones and those ``apart``; links are followed, each folder once."""
    seen = set(apart)
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        try:
            state = Path(folder).stat()
            if (state.st_dev, state.st_ino) in seen:
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(folder) as entries:
                waiting += [e.path for e in entries if not e.name.startswith(".") and _is_folder(e)]
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}; it cannot be read") from error
        yield folder


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return entry.is_dir()
    state = _state(entry)
    return state is not None and stat.S_ISDIR(state.st_mode)
