"""Mending of packs: damaged tensors are written again from a source that has them, for all models that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hapi.errors import DataError
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import PIECE_BYTES, TensorEntry
from hapi.repository.packs.layout import HashedTensor, WritePlan
from hapi.repository.packs.place import pack_id, pack_key
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import Lease


def mend(store: ObjectStore, plan: WritePlan, lease: Lease) -> int:
    """Check all copies that the store has of ``plan``'s tensors; write damaged packs anew, under their names.

    The other tensors of such a pack stay as they are.

    Returns:
        The number of damaged copies.
    """
    damaged: dict[str, list[TensorEntry]] = {}
    for entry in {entry.digest: entry for entry in plan.entries.values()}.values():
        for pack, start in plan.known.tensors.get(entry.digest, ()):
            copy = replace(entry, pack=pack_key(pack), start=start)
            if not _sound(store, copy):
                damaged.setdefault(copy.pack, []).append(copy)
    for key, entries in damaged.items():
        lease.check()
        size = plan.known.sizes[pack_id(key)]
        store.put_pieces(key, size, _mended(store, key, size, entries, plan.tensors))
    return sum(map(len, damaged.values()))


def checked_pieces(tensor: HashedTensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes from its source; :class:`DataError` if they are others than when it was hashed."""
    checksum, nbytes = TensorChecksum(), 0
    for piece in tensor.source.pieces():
        checksum.update(piece)
        nbytes += len(piece)
        if nbytes > tensor.source.nbytes:
            break
        yield piece
    if nbytes != tensor.source.nbytes or checksum.hexdigest() != tensor.checksum:
        raise DataError(f"tensor {tensor.source.name!r} changed while it was pushed; push the model again")


def _sound(store: ObjectStore, entry: TensorEntry) -> bool:
    checksum = TensorChecksum()
    for piece in _read(store, entry.pack, entry.start, entry.stop, store.size(entry.pack)):
        checksum.update(piece)
    return checksum.hexdigest() == entry.checksum


def _mended(
    store: ObjectStore,
    key: str,
    size: int,
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, HashedTensor],
) -> Iterator[memoryview]:
    """The pack's bytes, with those of ``entries`` from their sources; zeros for others that it lost."""
    held_bytes, at = store.size(key), 0
    for entry in sorted(entries, key=lambda e: e.start):
        if entry.start < at:
            continue  # the same content under another name
        yield from _read(store, key, at, entry.start, held_bytes)
        yield from checked_pieces(tensors[entry.name])
        at = entry.stop
    yield from _read(store, key, at, size, held_bytes)


def _read(store: ObjectStore, key: str, start: int, stop: int, held_bytes: int) -> Iterator[memoryview]:
    for at in range(start, stop, PIECE_BYTES):
        piece = memoryview(bytearray(min(PIECE_BYTES, stop - at)))
        held = piece[: max(0, held_bytes - at)]
        if held:
            store.read_into(key, at, held)
        yield piece
