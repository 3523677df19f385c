"""Mending of packs: damaged tensors are written again from a source that has them, for all models that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hapi.errors import DataError
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import PIECE_BYTES, TensorEntry
from hapi.repository.packs.index import read_heads, tensor_ranges
from hapi.repository.packs.layout import HashedTensor, WritePlan, is_padding
from hapi.repository.packs.place import pack_id, pack_key
from hapi.store.base import ObjectStore
from hapi.store.locking.locks import Lease


def mend(store: ObjectStore, plan: WritePlan, lease: Lease) -> bool:
    """Check all copies that the store has of ``plan``'s tensors; write damaged packs anew, under their names.

    The other tensors of such a pack stay as they are. A pack that was cut short ends where the first tensor begins
    that the plan does not have: what stands behind is missing, and is never made up.

    Returns:
        Whether all packs that were damaged are whole; otherwise the tensors need places in others.
    """
    damaged: dict[str, list[TensorEntry]] = {}
    for entry in {entry.digest: entry for entry in plan.entries.values()}.values():
        for pack, start in plan.known.tensors.get(entry.digest, ()):
            copy = replace(entry, pack=pack_key(pack), start=start)
            if not _sound(store, copy):
                damaged.setdefault(copy.pack, []).append(copy)
    whole = True
    for key, entries in damaged.items():
        lease.check()
        end = _end(store, key, entries)
        mended = [entry for entry in entries if entry.stop <= end]
        if mended:
            store.put_pieces(key, end, _mended(store, key, end, mended, plan.tensors))
        whole = whole and end == plan.known.sizes[pack_id(key)]
    return whole


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
    held_bytes = store.size(entry.pack)
    if held_bytes < entry.stop:
        return False
    checksum = TensorChecksum()
    for piece in _read(store, entry.pack, entry.start, entry.stop, held_bytes):
        checksum.update(piece)
    return checksum.hexdigest() == entry.checksum


def _end(store: ObjectStore, key: str, entries: Sequence[TensorEntry]) -> int:
    """Bytes from the first on that the pack has, or that ``entries`` and padding give."""
    end = store.size(key)
    ranges = [(entry.start, entry.stop) for entry in entries]
    header = read_heads(store, {key: end})[key]
    ranges += [place for name, place in tensor_ranges(header).items() if is_padding(name)]
    for start, stop in sorted(ranges):
        if start > end:
            break
        end = max(end, stop)
    return end


def _mended(
    store: ObjectStore,
    key: str,
    size: int,
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, HashedTensor],
) -> Iterator[memoryview]:
    """The pack's bytes, with those of ``entries`` from their sources; what else it lost is padding: zeros."""
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
