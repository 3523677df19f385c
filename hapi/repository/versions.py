"""Names, versions and tags of pushed models. All are append-only, and each is one small object. The places of a
version's tensors alone may change, as a collection packs them anew.

    models/NAME/versions/00000001.json.gz  a version: the manifest of one push; half of its text is hexadecimal
    models/NAME/tags/TAG/00000001.json     a tag: the version that it names; the last one counts
    models/NAME/tagged/00000001.json       the name of a tag, written before its first use: a store's listing may be
                                           behind, but numbers are found by their keys

A reference is a name with a version, a tag, or the first digits of a digest: ``NAME``, ``NAME@3``, ``NAME@best``,
``NAME@4f2a90c1``. Brings no torch.
"""

from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import xxhash

from hapi.errors import BadRequestError, ConflictError, DataError, NotFoundError
from hapi.repository.known.side_by_side import side_by_side
from hapi.store.base import DOCUMENT_BYTES, ObjectStore
from hapi.store.locking.locks import Lease
from hapi.wire.documents import check_int, parse_document
from hapi.wire.references import LEAST_DIGEST_DIGITS, NAME_PATTERN, check_model, check_name, check_tag

MODELS, NAME_LOCK = "models", "@lock"
"""Folder of the models, and what the key of a name's lock ends with, which no name has in it."""
REGISTER = "tagged"
"""Folder of the names of a model's tags."""
_DIGITS = 8
_WAIT_SECONDS, _LOOK_SECONDS = 10.0, 0.02
_VERSION, _TAG = ".json.gz", ".json"
"""Endings of the keys of versions and of tags."""
_GZIP = 16 + zlib.MAX_WBITS
"""zlib's word for a stream with gzip's header and checksum."""
_NUMBER = re.compile(rf"[0-9]{{{_DIGITS}}}")
_MAX_HIDDEN = 1000
"""Objects that a listing may lack."""
_AHEAD = 8
"""Numbers at which the newest version is looked for where a listing lacks it: others may have been replaced there."""
_TRIES = 100
"""Changes of a tag that others may make while one is made."""


class ModelAddress(NamedTuple):
    """A model's name and what was asked of it."""

    name: str
    wanted: str | None
    """A version, a tag or a digest's first digits; None for the latest version."""


@dataclass(frozen=True)
class Tag:
    """A name for a version."""

    name: str
    version: int
    digest: str
    created: str
    """UTC, ISO 8601."""


def parse_reference(reference: str) -> ModelAddress:
    """Return the parts of ``NAME[@WANTED]``; :class:`BadRequestError` if it is none."""
    name, _, wanted = check_model(reference, "model").partition("@")
    return ModelAddress(name, wanted or None)


def model_prefix(name: str) -> str:
    """Return the key prefix of everything that belongs to model ``name``."""
    return f"{MODELS}/{check_name(name, 'model')}"


def version_key(name: str, version: int) -> str:
    """Return the key of a version's manifest."""
    return f"{model_prefix(name)}/versions/{version:0{_DIGITS}}{_VERSION}"


def model_names(store: ObjectStore) -> list[str]:
    """Return the names of the store's models, sorted; what has no well-formed name is none."""
    return [name for name in store.list_names(MODELS) if NAME_PATTERN.fullmatch(name) and ".." not in name]


def list_versions(store: ObjectStore, name: str, ahead: int = 1) -> list[int]:
    """Return the versions of ``name``, the oldest first; none for an unknown name.

    Those that were written a moment ago are among them, also where the store's listing is behind: behind the last one
    that is listed they are asked for, ``ahead`` numbers at a time.
    """
    return _numbers(store, f"{model_prefix(name)}/versions", _VERSION, ahead)


def list_tags(store: ObjectStore, name: str) -> dict[str, Tag]:
    """Return the tags of ``name`` as they are now."""
    found = {}
    for tag in _tag_names(store, name):
        numbers = _numbers(store, f"{model_prefix(name)}/tags/{tag}", _TAG)
        if numbers:
            with suppress(NotFoundError):  # removed with the model since the listing
                found[tag] = _read_tag(store, name, tag, numbers[-1])
    return found


def resolve(store: ObjectStore, address: ModelAddress) -> int:
    """Return the version that is meant; its object exists unless it was removed just now.

    Raises:
        NotFoundError: there is no such model, or no such version, tag or digest of it.
    """
    name, wanted = address
    number = int(wanted) if wanted is not None and wanted.isdigit() and len(wanted) <= _DIGITS else None
    if number is not None and store.exists(version_key(name, number)):
        return number
    versions = list_versions(store, name, _AHEAD if wanted is None else 1)
    while versions and not store.exists(version_key(name, versions[-1])):
        versions.pop()  # removed, which the listing does not know
    if not versions:
        raise unknown_model(store, name)
    if wanted is None:
        return versions[-1]
    if number is not None and len(wanted) < LEAST_DIGEST_DIGITS:
        raise NotFoundError(
            f"model {name!r} has no version {number} in {store.url}; it has {_listed(versions)}",
            outside=f"model {name!r} has no version {number} here; it has {_listed(versions)}",
        )
    tags, tag = _numbers(store, f"{model_prefix(name)}/tags/{wanted}", _TAG), None
    if tags:
        with suppress(NotFoundError):  # removed with the model since the listing
            tag = _read_tag(store, name, wanted, tags[-1])
            if _digest(store, name, tag.version) == tag.digest:
                return tag.version  # else a later push has the number of a version that is gone
    for version in reversed(versions) if len(wanted) >= LEAST_DIGEST_DIGITS else ():
        with suppress(NotFoundError):
            if _digest(store, name, version).startswith(wanted):
                return version
    if tag is not None:
        what = f"tag {wanted!r} of model {name!r} names version {tag.version} of digest {tag.digest[:12]}, which is not"
        raise NotFoundError(
            f"{what} in {store.url}; {_tag_remedy(store, name, wanted)}", outside=f"{what} here"
        )
    known = ", ".join(_tag_names(store, name)[:8]) or "none"
    raise NotFoundError(
        f"model {name!r} has no tag or digest {wanted!r} in {store.url}; its tags: {known}",
        outside=f"model {name!r} has no tag or digest {wanted!r} here; its tags: {known}",
    )


def lost_tags(store: ObjectStore, name: str) -> dict[str, str]:
    """Return the tags of ``name`` that name no version which is there, with a line for each."""
    found = {}
    for tag in _tag_names(store, name):
        try:
            if _numbers(store, f"{model_prefix(name)}/tags/{tag}", _TAG):
                resolve(store, ModelAddress(name, tag))
        except (NotFoundError, DataError) as error:
            found[tag] = str(error)
    return found


def unknown_model(store: ObjectStore, name: str) -> NotFoundError:
    """Return the error for a name that has no version; :class:`NotFoundError` where there is no store."""
    known = ", ".join(store.list_names(MODELS)[:8])
    if not known:
        store.ping()
        known = "none"
    return hidden_model(name, f"{store.url} has no model {name!r}; it has: {known}")


def hidden_model(name: str, whole: str | None = None) -> NotFoundError:
    """Return the error for a name that has no model to be seen; ``whole`` only to who may know the store."""
    outside = f"there is no model {name!r} here; GET /v1/models and 'hapi ls' tell what there is"
    return NotFoundError(whole or outside, outside=outside)


def add_tag(store: ObjectStore, name: str, tag: str, version: int) -> Tag:
    """Name ``version`` of ``name`` by ``tag``; an earlier use of the tag stays in its history.

    Raises:
        NotFoundError: there is no such version.
        BadRequestError: it is no name for a tag.
        ConflictError: others have been removing versions or tagging them for ten seconds.
    """
    check_tag(tag, "tag")
    with holding(store, name):
        return _add_tag(store, name, tag, version)


@contextmanager
def holding(store: ObjectStore, name: str) -> Iterator[Lease]:
    """Keep versions and tags of ``name`` together during the block: none is removed while another is tagged or moved.

    Pushes do not wait for it, since they only add versions.

    Raises:
        ConflictError: another process holds them for ten seconds.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                lease = stack.enter_context(store.lock(f"repository/{check_name(name, 'model')}{NAME_LOCK}"))
                break
            except ConflictError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
        yield lease


def _add_tag(store: ObjectStore, name: str, tag: str, version: int) -> Tag:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    key = version_key(name, version)
    document = read_document(store, key)
    if document.get("checksum") != document_checksum(document):
        raise DataError(f"{store.url}/{key} is damaged: its checksum does not fit; push the model again")
    found = Tag(tag, version, str(document.get("digest")), created)
    folder = f"{model_prefix(name)}/tags/{tag}"
    numbers, newest = _numbers(store, folder, _TAG), None
    if numbers:
        with suppress(DataError):  # a damaged one is followed by a sound one
            newest = _read_tag(store, name, tag, numbers[-1])
    if newest is not None and (newest.version, newest.digest) == (version, found.digest):
        return newest  # as a command that is repeated after a kill finds it
    _register_tag(store, name, tag)
    text = json.dumps({"version": version, "digest": found.digest, "created": created}).encode()
    following = max(numbers, default=0) + 1
    for number in range(following, following + _TRIES):
        if store.put_new(f"{folder}/{number:0{_DIGITS}}{_TAG}", text):
            return found
    raise ConflictError(f"tag {tag!r} of model {name!r} is changed by many others just now; try again")


def _register_tag(store: ObjectStore, name: str, tag: str) -> None:
    """Write the name of a tag at the first free number, unless it is written. The name's lock is held."""
    known = _registered(store, name)
    if tag in known.values():
        return
    free = (number for number in range(1, len(known) + _TRIES) if number not in known)
    text = json.dumps({"tag": tag}).encode()
    if not any(store.put_new(_register_key(name, number), text) for number in free):
        raise ConflictError(f"tags of model {name!r} are changed by many others just now; try again")


def _registered(store: ObjectStore, name: str) -> dict[int, str]:
    """Names of tags by their number in the register, which has no gaps; no text for a damaged one."""
    found = {}
    last = max(_listed_numbers(store, f"{model_prefix(name)}/{REGISTER}", _TAG), default=0)
    for number in range(1, last + _MAX_HIDDEN):
        try:
            tag = read_document(store, _register_key(name, number)).get("tag")
            found[number] = tag if isinstance(tag, str) and NAME_PATTERN.fullmatch(tag) else ""
        except DataError:
            found[number] = ""
        except NotFoundError:
            if number > last:  # else removed with the model, which the listing does not know
                break
    return found


def _register_key(name: str, number: int) -> str:
    return f"{model_prefix(name)}/{REGISTER}/{number:0{_DIGITS}}{_TAG}"


def _tag_names(store: ObjectStore, name: str) -> list[str]:
    """Names of tags, sorted: those that are listed, as those of older stores, and those that are registered."""
    listed = store.list_names(f"{model_prefix(name)}/tags")
    return sorted({*listed, *_registered(store, name).values()} - {""})


def tag_keys(store: ObjectStore, name: str) -> set[str]:
    """Return the keys of the objects that have names of tags of ``name``, and of those that say their versions."""
    folders = [f"{model_prefix(name)}/tags/{tag}" for tag in _tag_names(store, name)]
    keys = {f"{at}/{number:0{_DIGITS}}{_TAG}" for at in folders for number in _numbers(store, at, _TAG)}
    return keys | {_register_key(name, number) for number in _registered(store, name)}


def drop_versions(store: ObjectStore, name: str, before: int) -> list[int]:
    """Remove the versions of ``name`` earlier than ``before`` that no tag holds; return them.

    The newest one of a listing that is behind stays: from it on the others are found.
    """
    with holding(store, name):
        tagged = {tag.version for tag in list_tags(store, name).values()}
        before = min(
            before, max(_listed_numbers(store, f"{model_prefix(name)}/versions", _VERSION), default=0)
        )
        dropped = [n for n in list_versions(store, name) if n < before and n not in tagged]
        for number in dropped:
            store.delete(version_key(name, number))
    return dropped


def read_document(store: ObjectStore, key: str, remedy: str = "push the model again") -> Mapping[str, Any]:
    """Return a JSON object of the store; :class:`DataError` with the ``remedy`` when it is none."""
    return document_of(store, key, store.get(key), remedy)


def document_of(store: ObjectStore, key: str, data: bytes, remedy: str) -> Mapping[str, Any]:
    """Return the JSON object in ``data``, which is object ``key``; see :func:`read_document`."""
    try:
        document = parse_document(decompressed(data) if key.endswith(".gz") else data)
    except ValueError as error:
        raise DataError(f"{store.url}/{key} is damaged: {error}; {remedy}") from error
    if not isinstance(document, dict):
        raise DataError(f"{store.url}/{key} is damaged: it is no JSON object; {remedy}")
    return document


def compressed(document: Mapping[str, Any]) -> bytes:
    """Return a version's document as it is stored: JSON, by gzip; the same bytes for the same document."""
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def decompressed(data: bytes) -> bytes:
    """Return the JSON text of a version's document; ValueError for anything but one whole gzip stream of bounded
    length.
    """
    reader = zlib.decompressobj(_GZIP)
    try:
        text = reader.decompress(data, DOCUMENT_BYTES)
    except zlib.error as error:
        raise ValueError(f"it is no gzip stream ({error})") from None
    if not reader.eof or reader.unused_data:
        raise ValueError("it is no whole gzip stream, or too long")
    return text


def document_checksum(document: Mapping[str, Any]) -> str:
    """Return the checksum of a version's document: of everything in it but the checksum."""
    covered = {name: value for name, value in document.items() if name != "checksum"}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _digest(store: ObjectStore, name: str, version: int) -> str:
    return str(read_document(store, version_key(name, version)).get("digest"))


def _read_tag(store: ObjectStore, name: str, tag: str, number: int) -> Tag:
    key = f"{model_prefix(name)}/tags/{tag}/{number:0{_DIGITS}}{_TAG}"
    remedy = _tag_remedy(store, name, tag)
    document = read_document(store, key, remedy)
    try:
        version = check_int(document.get("version"), 1, 10**_DIGITS, "version")
    except BadRequestError as error:
        raise DataError(f"{store.url}/{key} is damaged: {error}; {remedy}") from None
    return Tag(tag, version, str(document.get("digest")), str(document.get("created")))


def _tag_remedy(store: ObjectStore, name: str, tag: str) -> str:
    return f"name a version with 'hapi tag {store.url}/{name}@VERSION {tag}'"


def _numbers(store: ObjectStore, folder: str, ending: str, ahead: int = 1) -> list[int]:
    """Numbers of the objects in ``folder``, in order. Those behind the last one that is listed are asked for by key,
    ``ahead`` at a time, until none of these is there.
    """
    found = _listed_numbers(store, folder, ending)
    last = max(found, default=0)
    end = last + _MAX_HIDDEN
    while last < end:
        numbers = range(last + 1, last + 1 + ahead)
        keys = [f"{folder}/{number:0{_DIGITS}}{ending}" for number in numbers]
        exist = side_by_side(store, store.exists, keys)
        if not any(exist):
            break
        found += [number for number, exists in zip(numbers, exist, strict=True) if exists]
        last = found[-1]
    return found


def _listed_numbers(store: ObjectStore, folder: str, ending: str) -> list[int]:
    names = [key.rpartition("/")[2] for key in store.list_keys(folder)]
    stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    return sorted(int(stem) for stem in stems if _NUMBER.fullmatch(stem))


def _listed(versions: list[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else str(versions[0])
