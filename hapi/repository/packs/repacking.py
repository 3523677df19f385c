"""Packs that are mostly dead are written anew with the tensors that versions use (a part of ``hapi gc``).

    write     -- the live tensors of such a pack, in their order, as a new pack; each is checked on its way
    move      -- each version's manifest says where its tensors are now; nothing else in it changes
    remove    -- the old pack, which nothing needs any more, as the collection removes any other

A kill in between leaves both packs, each whole, and versions that use one of them: the next collection goes on. The
journal of a remote store is told first which packs a version uses from now on: one that had lost a node may answer with
the manifest as it was before. A reader that knows the old place looks into the manifest again
(:class:`hapi.repository.stored.StoredModel`). A push that needs the old pack keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hapi.errors import DataError, NotFoundError
from hapi.models.graph.digest import content_digest
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import PIECE_BYTES
from hapi.repository.manifest import FORMAT
from hapi.repository.packs.index import header_tensors, read_heads, tensor_digest
from hapi.repository.packs.journal import append, moved_entry
from hapi.repository.packs.layout import ALIGNED_BYTES, ALIGNMENT, padding_name
from hapi.repository.packs.place import pack_id, pack_key
from hapi.repository.versions import compressed, document_checksum, holding, read_document
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.store.locking.locks import Lease
from hapi.store.safetensors import encode_header

DEAD_SHARE = 0.5
"""Part of a pack's bytes that must go: rewriting the others costs less than it frees."""


class TensorAt(NamedTuple):
    """A tensor in a pack."""

    start: int
    """First byte in the file."""
    digest: str


class Live(NamedTuple):
    """A tensor that is kept: where it lies in the old pack and in the new one, and its checksum."""

    name: str
    place: TensorAt
    stop: int
    new_start: int
    checksum: str


@dataclass(frozen=True)
class Rewrite:
    """A pack and the one that takes its place."""

    old: ObjectInfo
    header: bytes
    tensors: tuple[Live, ...]
    """By their places, which have no more than padding between them in the new pack."""

    @cached_property
    def id(self) -> str:
        """Id of the new pack."""
        return content_digest(self.header)

    @property
    def size(self) -> int:
        """Bytes of the new pack."""
        last = self.tensors[-1]
        return last.new_start + last.stop - last.place.start

    @cached_property
    def places(self) -> Mapping[TensorAt, int]:
        """First byte in the new pack of each tensor."""
        return {tensor.place: tensor.new_start for tensor in self.tensors}


def find_rewrites(
    store: ObjectStore,
    packs: Iterable[ObjectInfo],
    documents: Iterable[Mapping[str, Any]],
    spared: Collection[str] = (),
) -> list[Rewrite]:
    """Return the packs that are to be written anew.

    Args:
        store: of the packs.
        packs: that are there.
        documents: of all versions.
        spared: ids of packs that are left as they are.
    """
    live: dict[str, dict[TensorAt, str]] = {}
    left = set(spared)
    for document in documents:
        if not _is_movable(document):
            left |= set(document["packs"])
            continue
        for digest, checksum, pack, start in _entries(document):
            live.setdefault(pack, {})[TensorAt(start, digest)] = checksum
    known = {info.key: info for info in packs if pack_id(info.key) in live.keys() - left}
    found = []
    for key, head in read_heads(store, {key: info.size for key, info in known.items()}).items():
        rewrite = _rewrite(known[key], head, live[pack_id(key)])
        if rewrite is not None:
            found.append(rewrite)
    return found


def write_pack(store: ObjectStore, rewrite: Rewrite) -> bool:
    """Write the new pack, also over one of the same name, which may be damaged; return False where a tensor is."""
    try:
        store.put_pieces(pack_key(rewrite.id), rewrite.size, _pieces(store, rewrite))
    except (DataError, NotFoundError):
        return False  # verify and load name it, and a repair mends the old pack; or a node that was away still had it
    return True


def move_versions(
    store: ObjectStore,
    versions: Iterable[tuple[str, str, Mapping[str, Any]]],
    rewrites: Collection[Rewrite],
    lease: Lease,
) -> None:
    """Let versions say that their tensors are in the new packs.

    Args:
        store: of the versions.
        versions: name of the model, key and document of each version.
        rewrites: whose new packs are there.
        lease: of the collection.
    """
    by_pack = {pack_id(rewrite.old.key): rewrite for rewrite in rewrites}

    def moves(document: Mapping[str, Any]) -> bool:
        return _is_movable(document) and not by_pack.keys().isdisjoint(document["packs"])

    for name, key, seen in versions:
        if not moves(seen):
            continue
        with holding(store, name) as held:  # a version that was removed stays removed
            try:
                document = read_document(store, key)
            except NotFoundError:
                continue
            if moves(document):
                lease.check()
                held.check()
                now = _moved(document, by_pack)
                # A folder always has the last state, and maybe no room for more.
                if store.local_path(key) is None:
                    append(store, moved_entry(key, now))
                store.put(key, compressed(now))


def _rewrite(old: ObjectInfo, head: bytes, live: Mapping[TensorAt, str]) -> Rewrite | None:
    """The rewriting of a pack; None where it is not worth it, or the pack is not what its name says."""
    length = 8 + int.from_bytes(head[:8], "little")
    if content_digest(head[:length]) != pack_id(old.key):
        return None
    tensors, kept = header_tensors(head[:length]), []
    for name, (start, stop, form) in sorted(tensors.items(), key=lambda item: item[1][:2]):
        place = TensorAt(start, tensor_digest(name))
        if place in live:
            kept.append((name, place, stop, form))
    whole = max((stop for _, stop, _ in tensors.values()), default=0)
    nbytes = sum(stop - place.start for _, place, stop, _ in kept)
    if (
        old.size != whole
        or {place for _, place, _, _ in kept} != live.keys()
        or old.size - nbytes <= DEAD_SHARE * old.size
    ):
        return None
    forms: list[tuple[str, str, list[int], int]] = []
    starts, at = [], 0
    for name, place, stop, (dtype, shape) in kept:
        gap = -at % ALIGNMENT
        if gap and stop - place.start >= ALIGNED_BYTES:
            forms.append((padding_name(len(forms)), "U8", [gap], gap))
            at += gap
        forms.append((name, dtype, shape, stop - place.start))
        starts.append(at)
        at += stop - place.start
    header = encode_header(forms, alignment=ALIGNMENT)
    live_tensors = [
        Live(name, place, stop, len(header) + start, live[place])
        for (name, place, stop, _), start in zip(kept, starts, strict=True)
    ]
    found = Rewrite(old, header, tuple(live_tensors))
    return found if old.size - found.size > DEAD_SHARE * old.size else None  # small packs are mostly header


def _pieces(store: ObjectStore, rewrite: Rewrite) -> Iterator[memoryview]:
    """The new pack's bytes; :class:`DataError` for a tensor whose bytes are not those that were stored."""
    yield memoryview(rewrite.header)
    at = len(rewrite.header)
    for tensor in rewrite.tensors:
        yield memoryview(bytes(tensor.new_start - at))
        checksum = TensorChecksum()
        for start in range(tensor.place.start, tensor.stop, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, tensor.stop - start)))
            store.read_into(rewrite.old.key, start, piece)
            checksum.update(piece)
            yield piece
        if checksum.hexdigest() != tensor.checksum:
            raise DataError(f"{store.url}/{rewrite.old.key}: tensor {tensor.name} is damaged")
        at = tensor.new_start + tensor.stop - tensor.place.start


def _moved(document: Mapping[str, Any], rewrites: Mapping[str, Rewrite]) -> Mapping[str, Any]:
    entries = []
    for digest, checksum, pack, start in _entries(document):
        rewrite = rewrites.get(pack)
        moved = None if rewrite is None else rewrite.places.get(TensorAt(start, digest))
        if rewrite is not None and moved is not None:  # else a push has just used a tensor that seemed dead
            entries.append((digest, checksum, rewrite.id, moved))
        else:
            entries.append((digest, checksum, pack, start))
    packs = {pack: place for place, pack in enumerate(dict.fromkeys(pack for _, _, pack, _ in entries))}
    tensors = [[digest, checksum, packs[pack], start] for digest, checksum, pack, start in entries]
    now = {**document, "packs": list(packs), "tensors": tensors}
    return {**now, "checksum": document_checksum(now)}


def _is_movable(document: Mapping[str, Any]) -> bool:
    """Return whether a version's document is sound and of this format, which alone says where each tensor is."""
    return document.get("format") == FORMAT and document.get("checksum") == document_checksum(document)


def _entries(document: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    """Digest, checksum, pack and first byte of each tensor."""
    try:
        packs = document["packs"]
        return [
            (digest, checksum, packs[place], start) for digest, checksum, place, start in document["tensors"]
        ]
    except (TypeError, ValueError, LookupError):
        where = f"{document.get('name')}@{document.get('version')}"
        raise DataError(
            f"version {where!r:.80} does not say where its tensors are, so no pack is packed anew; push it again"
        ) from None
