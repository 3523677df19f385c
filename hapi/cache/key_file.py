"""File that says of which key the features in a folder are, and by what they were computed."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hapi.errors import DataError
from hapi.wire.documents import parse_document

KEY_FILE = "key.json"


@dataclass(frozen=True)
class KeyFile:
    """Its content."""

    key: dict[str, Any]
    """The whole key, as JSON."""
    dataset: str
    """Name that the dataset had when the first features were kept, for people."""
    made_with: tuple[str, ...] = ()
    """Devices and smallest batches that the features were computed with, a line each."""


def digest_of(key: Mapping[str, Any]) -> str:
    """Return the digest of a key as JSON, 32 hex digits."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_key_file(folder: Path) -> KeyFile | None:
    """Return the content of the file in ``folder``; None when there is none, or its key is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = parse_document((folder / KEY_FILE).read_bytes())
        lines = tuple(str(line) for line in document["made_with"])
        found = KeyFile(dict(document["key"]), str(document["dataset"]), lines)
        return found if document["digest"] == digest_of(found.key) else None
    return None


def check_key(folder: Path, wanted: KeyFile) -> KeyFile | None:
    """Return the content of the file in ``folder``, if there is any; :class:`DataError` when it is of another key."""
    found = read_key_file(folder)
    if found is not None and found.key != wanted.key:
        raise DataError(
            f"{folder}: holds features of another key; remove it with 'hapi cache clear --only {folder.name}'"
        )
    return found


def settle_key(folder: Path, wanted: KeyFile, room: int) -> int | None:
    """Check that ``folder`` is of a key, and write that it is; the caller has the cache's lock.

    Args:
        folder: folder of the features.
        wanted: the key, and lines that are added to those about what computed the features.
        room: most bytes that may be written.

    Returns:
        The bytes by which the folder has grown; None when there is no room, and nothing was written.

    Raises:
        DataError: the folder is of another key.
        OSError: it cannot be written.
    """
    found = check_key(folder, wanted)
    if found is not None and set(wanted.made_with) <= set(found.made_with):
        return 0
    dataset = wanted.dataset if found is None else found.dataset
    lines = sorted({*wanted.made_with, *(() if found is None else found.made_with)})
    content = {"key": wanted.key, "digest": digest_of(wanted.key), "dataset": dataset, "made_with": lines}
    text = (json.dumps(content, indent=1) + "\n").encode()
    if len(text) > room:
        return None
    path, new = folder / KEY_FILE, folder / f"{KEY_FILE}.new"
    before = path.stat().st_size if path.exists() else 0
    new.write_bytes(text)
    new.replace(path)
    return len(text) - before
