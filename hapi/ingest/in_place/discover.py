"""Discovery for ``hapi index``: the foreign shards below a key prefix of a store."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hapi.data.listing import STORE_FOLDERS
from hapi.errors import BadRequestError, NotFoundError, UsageError
from hapi.ingest.formats.registry import FORMATS, Format, choose
from hapi.ingest.parts import training_and_other
from hapi.paths import user_path
from hapi.store.base import ObjectInfo, ObjectStore, check_key, check_prefix
from hapi.text import counted, printable

_WORDS = re.compile(r"[^A-Za-z]+")


@dataclass(frozen=True)
class Folder:
    """Contents of the folder that is indexed."""

    title: str
    """Name that the user gave."""
    prefix: str
    """Key prefix of all shards; empty for the whole store."""
    module: Format
    shards: list[ObjectInfo]
    left_out: list[str]
    """Objects that are no shards, or whose names cannot be used."""


def find_folder(store: ObjectStore, folder: str, wanted: str | None = None) -> Folder:
    """Return the shards below a key prefix.

    Args:
        store: where they lie.
        folder: the key prefix; "." for the whole store. Its last parts may be a pattern of names
            (``wds/train-*``). In a local store also the folder's path, as a shell completes it.
        wanted: name of the format; None: the one that is found.

    Raises:
        UsageError: the shards are of no format or a mixture, or of training and validation.
        NotFoundError: nothing lies there.
    """
    folder, pattern = _split_pattern(folder)
    prefix = _checked_prefix(store, folder)
    where = "/".join(filter(None, (store.url, prefix, pattern)))
    below = len(prefix) + 1 if prefix else 0
    listed = [
        info
        for info in store.list(prefix)
        if info.key.partition("/")[0] not in STORE_FOLDERS
        and (pattern is None or fnmatchcase(info.key[below:], pattern))
    ]
    if not listed:
        store.ping()
        if prefix and pattern is None and store.exists(prefix):
            parent = prefix.rpartition("/")[0] or "."
            raise UsageError(
                f"{where} is an object, no folder; give its folder ({parent}), or {prefix}* for this one alone"
            )
        raise NotFoundError(
            f"there is nothing below {where}; give the key prefix of the shards inside the store, as FOLDER"
        )
    usable = [info for info in listed if _is_usable(info.key)]
    module = choose(where, usable) if wanted is None else FORMATS[wanted]
    shards = module.shards_of(store, prefix, usable)
    if not shards:
        raise UsageError(
            f"{where} has no {module.NAME} shards by their names ({counted(len(listed), 'object')})"
        )
    _check_parts(where, module, [info.key[below:] for info in shards])
    chosen = {info.key for info in shards}
    return Folder(
        "/".join(filter(None, (prefix, pattern))) or ".",
        prefix,
        module,
        shards,
        [info.key for info in listed if info.key not in chosen],
    )


def _split_pattern(folder: str) -> tuple[str, str | None]:
    """The key prefix, and the pattern of what is taken below it; "*" stands for slashes too."""
    segments = folder.rstrip("/").split("/")
    first = next((n for n, segment in enumerate(segments) if set("*?[") & set(segment)), None)
    return (folder, None) if first is None else ("/".join(segments[:first]), "/".join(segments[first:]))


def _check_parts(where: str, module: Format, paths: Sequence[str]) -> None:
    """Raise UsageError when shards of training and of validation lie together, by words in their names.

    For single objects only the first folder counts, which would be their class.
    """
    objects = module.NAME == "objects"
    mixed = training_and_other(
        ([path.partition("/")[0]] if objects else _WORDS.split(path), path) for path in paths
    )
    if mixed:
        raise UsageError(
            f"{where} holds training data ({printable(mixed[0])}) and other data ({printable(mixed[1])}), "
            "which are not mixed: give the folder of one, or a pattern of the names, as in 'wds/train-*'"
        )


def _key_prefix(store: ObjectStore, folder: str) -> str:
    """``folder`` without ``./`` and needless slashes; the path of a folder of a local store as its key prefix."""
    top = store.local_path("datasets")
    parts = [part for part in folder.split("/") if part not in ("", ".")]
    key = "/".join(parts)
    if top is None or (not folder.startswith("/") and (not key or Path(top.parent, key).exists())):
        return key
    inside = Path(os.path.relpath(user_path(folder, "FOLDER").resolve(), top.parent.resolve()))
    if ".." in inside.parts or not user_path(folder, "FOLDER").exists():
        return folder.rstrip("/") if folder.startswith("/") else key
    return "" if inside == Path() else inside.as_posix()


def _checked_prefix(store: ObjectStore, folder: str) -> str:
    try:
        prefix = check_prefix(_key_prefix(store, folder))
    except BadRequestError:
        raise UsageError(
            f"{folder} is not in the store {store.url}: give the key prefix of the shards there, as FOLDER, without "
            "empty parts or leading dots"
        ) from None
    if prefix.partition("/")[0] in STORE_FOLDERS:
        raise UsageError(
            f"{store.url}/{prefix}: this folder of a store is Hapi's own; if the files are yours, "
            f"make {prefix.partition('/')[0]} the store: hapi index {prefix.partition('/')[2] or '.'} "
            f"{store.url}/{prefix.partition('/')[0]}/NAME"
        )
    return prefix


def _is_usable(key: str) -> bool:
    """Return whether Hapi can read an object of this name and record it."""
    try:
        check_key(key).encode()
    except (BadRequestError, UnicodeEncodeError):
        return False
    return True


def left_out_note(folder: Folder) -> str | None:
    """Return a line about the objects in the folder that are not indexed; None when there are none."""
    if not folder.left_out:
        return None
    some = ", ".join(printable(key) for key in folder.left_out[:3])
    count, name = len(folder.left_out), folder.module.NAME
    what = (
        f"object is no {name} shard by its name"
        if count == 1
        else f"objects are no {name} shards by their names"
    )
    return f"{count} {what} and left out: {some}{', ...' if count > 3 else ''}"
