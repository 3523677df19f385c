"""Content of a store's packs, from their headers: what a push need not write again.

A pack is a safetensors file. The name of each of its tensors says what it is::

    LAYER:I/N:TENSOR     tensor I of the N of a layer; both digests are of content, LAYER's of its tensors' forms too

A layer that was stored whole is found as one, also where its tensors lie in several packs. Of a layer that differs,
large tensors are found one by one. Small ones are stored again beside it: a request of its own for each would cost more
than their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hapi.errors import NotFoundError
from hapi.models.graph.digest import content_digest
from hapi.repository.known.heads import known_heads
from hapi.repository.packs.place import PACKS, is_pack, pack_id
from hapi.store.base import ObjectStore, ReadPart
from hapi.store.safetensors import MAX_HEADER_BYTES
from hapi.wire.documents import parse_document

HEAD_BYTES = 4 << 10
"""First bytes of a pack that are read at once: more than the header of a fine-tune's few tensors. What is missing of a
longer one follows."""
_TENSOR = re.compile(r"([0-9a-f]{32}):(\d{1,7})/(\d{1,7}):([0-9a-f]{32})")


class PackedAt(NamedTuple):
    """Location of a tensor's bytes."""

    pack: str
    """Id of the pack."""
    start: int
    """First byte in its file."""


@dataclass
class PackIndex:
    """Places of content in some packs."""

    layers: dict[str, Mapping[int, PackedAt]] = field(default_factory=dict)
    """Places of tensors by the digest of their layer and their number in it; those of one pack where one has all."""
    tensors: dict[str, list[PackedAt]] = field(default_factory=dict)
    """Places of each single tensor by digest; more than one where pushes met, or a collection was under way."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that each pack has when it is whole, by id."""

    @classmethod
    def read(cls, store: ObjectStore, without: Collection[str] = (), *, cut_short: bool = False) -> PackIndex:
        """Read the headers of all packs of ``store`` but those of the ids in ``without``.

        A pack whose header is not the one that it is named by has nothing to offer. Those of a remote store that this
        machine has read are not read again.

        Args:
            store: of the packs.
            without: ids of packs that are left out.
            cut_short: take packs too that are shorter than their headers say, to mend them; all headers are read.
        """
        sizes = {i.key: i.size for i in store.list(PACKS) if is_pack(i.key) and pack_id(i.key) not in without}
        index = cls()
        heads = read_heads(store, sizes) if cut_short else known_heads(store, sizes, read_heads)
        for key, head in heads.items():
            header = head[: _header_bytes(head)]
            if content_digest(header) != pack_id(key):
                continue
            if cut_short or sizes[key] >= max(
                (stop for _, stop in tensor_ranges(header).values()), default=0
            ):
                index.add(pack_id(key), header)
        return index

    def add(self, pack: str, header: bytes) -> None:
        """Add a pack, from its length field and header; a header that cannot be read has nothing to offer."""
        layers: dict[tuple[str, int], dict[int, PackedAt]] = {}
        for name, (start, stop) in tensor_ranges(header).items():
            self.sizes[pack] = max(stop, self.sizes.get(pack, 0))
            found = _TENSOR.fullmatch(name)
            if found is None:
                continue
            place = PackedAt(pack, start)
            layers.setdefault((found[1], int(found[3])), {})[int(found[2])] = place
            self.tensors.setdefault(found[4], []).append(place)
        for (layer, count), places in layers.items():
            known = self.layers.get(layer, {})
            known_whole = len(known) == count and len({place.pack for place in known.values()}) == 1
            if known_whole or len(places) < count:
                places = {**places, **known}
            self.layers[layer] = places


def tensor_name(layer: str, number: int, count: int, tensor: str) -> str:
    """Return the name, in its pack, of tensor ``number`` of the ``count`` of a layer."""
    return f"{layer}:{number}/{count}:{tensor}"


def read_heads(store: ObjectStore, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Return length field and header of each pack in ``sizes`` (bytes by key); one that is not there any more is left
    out.
    """
    heads = _read(store, {key: min(size, HEAD_BYTES) for key, size in sizes.items()})
    longer = {}
    for key, head in heads.items():
        length = _header_bytes(head)
        if len(head) < length <= min(sizes[key], MAX_HEADER_BYTES):
            longer[key] = length
    behind = _read(store, longer, HEAD_BYTES) if longer else {}
    return {key: head + behind.get(key, b"") for key, head in heads.items()}


def tensor_digest(name: str) -> str:
    """Return the digest of the tensor of this name in a pack; an empty text for padding."""
    found = _TENSOR.fullmatch(name)
    return "" if found is None else found[4]


def tensor_ranges(header: bytes) -> dict[str, tuple[int, int]]:
    """Return the first byte in the file of each tensor by name, and the one after its last; none if unreadable."""
    return {name: (start, stop) for name, (start, stop, _) in header_tensors(header).items()}


def header_tensors(header: bytes) -> dict[str, tuple[int, int, tuple[str, list[int]]]]:
    """Return what :func:`tensor_ranges` does, and for each tensor its type, as the format calls it, and its shape."""
    length = _header_bytes(header)
    found = {}
    try:
        for name, entry in parse_document(header[8:length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                form = str(entry["dtype"]), list(entry["shape"])
                found[name] = (length + int(start), length + int(stop), form)
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def _read(store: ObjectStore, stops: Mapping[str, int], start: int = 0) -> dict[str, bytes]:
    parts = [ReadPart(key, start, memoryview(bytearray(stop - start))) for key, stop in stops.items()]
    try:
        store.read_many(parts)
        return {part.key: bytes(part.out) for part in parts}
    except NotFoundError:  # removed since the listing; the others are read one by one
        found: dict[str, bytes] = {}
        for part in parts:
            try:
                store.read_into(part.key, start, part.out)
            except NotFoundError:
                continue
            found[part.key] = bytes(part.out)
        return found


def _header_bytes(head: bytes) -> int:
    """Bytes of length field and header."""
    return 8 + int.from_bytes(head[:8], "little")
