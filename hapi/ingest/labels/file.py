"""A file of labels: on this machine, or an object of a store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hapi.errors import DataError, NotFoundError, UsageError
from hapi.paths import read_bounded
from hapi.store.base import ObjectStore, is_key
from hapi.store.open import open_store


@dataclass(frozen=True)
class StoredFile:
    """An object of a store."""

    store: ObjectStore
    key: str

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}"

    @property
    def suffix(self) -> str:
        """The ending of its name, with the dot."""
        return PurePosixPath(self.key).suffix


LabelFile = Path | StoredFile
MAX_TABLE_BYTES = 1 << 30
"""Largest file of labels but for an array on this machine."""


def label_file(path: str | os.PathLike[str], store: ObjectStore | None = None) -> LabelFile:
    """Return the file of labels that ``path`` stands for; it is not read yet.

    Args:
        path: a path, the URL of an object (``s3://bucket/labels.csv``), or the key of one in ``store``; a file on
            this machine comes before an object of that key.
        store: the store of the dataset.

    Raises:
        UsageError: the URL is of no store, or has no name at its end.
    """
    text = os.fspath(path)
    if "://" in text:
        url, _, key = text.rpartition("/")
        if url.startswith("memory://"):  # a store's name has no parts
            name, _, folders = url.removeprefix("memory://").partition("/")
            url, key = f"memory://{name}", f"{folders}/{key}" if folders else key
        if url.endswith((":/", "://")) or not is_key(key):
            raise UsageError(f"--labels {text}: is no object; for example s3://bucket/labels.csv")
        return StoredFile(open_store(url), key)
    local = Path(text)
    if store is not None and not local.exists() and is_key(text) and store.exists(text):
        return StoredFile(store, text)
    return local


def content_of(file: LabelFile, max_bytes: int, what: str) -> bytes:
    """Return the file's bytes.

    Args:
        file: the file.
        max_bytes: largest sensible content in bytes.
        what: name for messages.

    Raises:
        UsageError: it is not there, cannot be read, or has more bytes.
        StoreError: its store does not answer.
    """
    if isinstance(file, Path):
        return read_bounded(file, max_bytes, what)
    try:
        return file.store.get(file.key, max_bytes)
    except NotFoundError:
        raise UsageError(f"{what}: cannot be read: there is no such object") from None
    except DataError:
        raise UsageError(
            f"{what}: has more than {max_bytes} bytes, too many for this; name another file"
        ) from None
