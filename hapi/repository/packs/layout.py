"""Division of a model's new tensors into packs. Pure: it computes names and places, and moves no byte.

Tensors lie in layer order, so that layers 1 to s, and those after s, are few ranges for every s. A pack ends at about
:data:`PACK_BYTES`, so that a push that was killed goes on behind the packs that it wrote, and at the default freeze, so
that a backbone which other models share can outlive the head it was pushed with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from hapi.models.graph.digest import content_digest
from hapi.models.tensors import STORED_NAMES
from hapi.repository.entries import DTYPES, SourceTensor, TensorEntry
from hapi.repository.packs.index import PackedAt, PackIndex, tensor_name
from hapi.repository.packs.place import pack_key
from hapi.store.safetensors import encode_header

PACK_BYTES = 256 << 20
"""Bytes of a pack; a larger tensor is alone in one."""
LARGE_BYTES = 256 << 10
"""A tensor of so many bytes is not stored again when only others of its layer differ: reading it from elsewhere takes a
request more, in which a store sends about as much."""
ALIGNMENT, ALIGNED_BYTES = 64, 64 << 10
"""Tensors of so many bytes begin at multiples of a cache line, as they will in memory. Reading 575 MB out of the page
cache took 38 ms of processor time so, and 57 to 61 from 8 bytes beside."""
_PADDING = "padding:"
"""Beginning of the names of the few bytes before them: the format knows no gaps."""


@dataclass(frozen=True)
class HashedTensor:
    """A tensor whose bytes were read once."""

    source: SourceTensor
    digest: str
    checksum: str


@dataclass(frozen=True)
class HashedLayer:
    """The tensors of one layer."""

    tensors: tuple[HashedTensor, ...]
    ends_pack: bool = False
    """Whether tensors of the following layers lie in other packs."""

    @property
    def digest(self) -> str:
        """Digest of its tensors' forms and content, whatever their names."""
        parts = [[t.source.dtype, list(t.source.shape), t.digest] for t in self.tensors]
        return content_digest(json.dumps(parts, separators=(",", ":")).encode())


@dataclass(frozen=True)
class PackPlan:
    """A pack that is to be written."""

    names: tuple[str, ...]
    tensors: tuple[HashedTensor, ...]
    salt: str = ""

    @cached_property
    def header(self) -> bytes:
        """Length field and header of the file."""
        forms = [
            (name, STORED_NAMES[DTYPES[t.source.dtype]], t.source.shape, t.source.nbytes)
            for name, t in zip(self.names, self.tensors, strict=True)
        ]
        return encode_header(forms, {"salt": self.salt} if self.salt else None, ALIGNMENT)

    @cached_property
    def id(self) -> str:
        """Digest of the header, which names the content."""
        return content_digest(self.header)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(t.source.nbytes for t in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors, without padding."""
        named = zip(self.names, self.tensors, strict=True)
        return sum(tensor.source.nbytes for name, tensor in named if not is_padding(name))


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Packs to write, and the place of every tensor of the model."""

    packs: tuple[PackPlan, ...]
    entries: Mapping[str, TensorEntry]
    tensors: Mapping[str, HashedTensor]
    """All tensors by name."""
    found: Mapping[str, int]
    """Packs that are there already and are needed: bytes of the whole file by id."""
    known: PackIndex
    """Content that the store had."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(pack.nbytes for pack in self.packs)


def fits_pack(nbytes: int) -> bool:
    """Return whether tensors of so many bytes in all are no more than a pack holds."""
    return nbytes <= PACK_BYTES


def plan_packs(layers: Sequence[HashedLayer], known: PackIndex, avoid: Collection[str] = ()) -> WritePlan:
    """Return what is to be written for a model.

    Args:
        layers: all its tensors, in layer order, each once.
        known: content that the store has.
        avoid: ids that new packs must not have, as packs of these ids are about to be removed.
    """
    planner = PackPlanner(known, avoid)
    for layer in layers:
        planner.add(layer)
    return planner.finish()


class PackPlanner:
    """The plan of a model whose layers become known one after another."""

    def __init__(self, known: PackIndex, avoid: Collection[str] = ()) -> None:
        """Begin without any layer; see :func:`plan_packs`."""
        self._known, self._avoid = known, avoid
        self._tensors: dict[str, HashedTensor] = {}
        self._places: dict[str, PackedAt | int] = {}
        """A new tensor has its number among the new ones."""
        self._written: dict[str, Mapping[int, PackedAt | int]] = {}
        self._large: dict[str, PackedAt | int] = {d: copies[0] for d, copies in known.tensors.items()}
        self._packs: list[PackPlan] = []
        self._new = 0
        self._group: list[tuple[str, HashedTensor]] = []
        """New tensors that are in no pack yet."""
        self._group_bytes = 0

    def add(self, layer: HashedLayer) -> Sequence[PackPlan]:
        """Add the next layer; return the packs that nothing is added to any more since."""
        complete = len(self._packs)
        digest, count = layer.digest, len(layer.tensors)
        own = dict(self._written.get(digest) or self._known.layers.get(digest, {}))
        for number, tensor in enumerate(layer.tensors):
            if number not in own:
                own[number] = self._place(tensor_name(digest, number, count, tensor.digest), tensor)
        self._written[digest] = own
        for number, tensor in enumerate(layer.tensors):
            self._places[tensor.source.name] = own[number]
            self._tensors[tensor.source.name] = tensor
        if layer.ends_pack:
            self._end_pack()
        return self._packs[complete:]

    def _place(self, name: str, tensor: HashedTensor) -> PackedAt | int:
        """Location of a tensor that the store does not have as a part of this layer."""
        is_large = tensor.source.nbytes >= LARGE_BYTES
        known = self._large.get(tensor.digest) if is_large else None
        if known is not None:
            return known
        if self._group and self._group_bytes + tensor.source.nbytes > PACK_BYTES:
            self._end_pack()
        self._group.append((name, tensor))
        self._group_bytes += tensor.source.nbytes
        place, self._new = self._new, self._new + 1
        if is_large:
            self._large[tensor.digest] = place
        return place

    def _end_pack(self) -> None:
        if self._group:
            self._packs.append(_salted(_pack(self._group), self._avoid))
        self._group, self._group_bytes = [], 0

    def finish(self) -> WritePlan:
        """Return the plan of all layers."""
        self._end_pack()
        starts = [PackedAt(pack.id, start) for pack in self._packs for start in _starts(pack)]
        final = {n: starts[place] if isinstance(place, int) else place for n, place in self._places.items()}
        found = {place.pack for place in final.values()} - {pack.id for pack in self._packs}
        return WritePlan(
            packs=tuple(self._packs),
            entries={name: _entry(tensor, final[name]) for name, tensor in self._tensors.items()},
            tensors=self._tensors,
            found={pack: self._known.sizes[pack] for pack in found},
            known=self._known,
        )


def _pack(group: Sequence[tuple[str, HashedTensor]]) -> PackPlan:
    """The pack of these tensors, with padding before large ones."""
    padded: list[tuple[str, HashedTensor]] = []
    start = 0
    for name, tensor in group:
        gap = -start % ALIGNMENT
        if gap and tensor.source.nbytes >= ALIGNED_BYTES:
            padded.append((padding_name(len(padded)), _padding(gap)))
            start += gap
        padded.append((name, tensor))
        start += tensor.source.nbytes
    return PackPlan(tuple(name for name, _ in padded), tuple(tensor for _, tensor in padded))


def padding_name(number: int) -> str:
    """Return the name of padding that is tensor ``number`` of its pack."""
    return f"{_PADDING}{number}"


def is_padding(name: str) -> bool:
    """Return whether ``name``, of a pack's tensor, is that of bytes without a meaning."""
    return name.startswith(_PADDING)


def _padding(nbytes: int) -> HashedTensor:
    zeros = bytes(nbytes)
    source = SourceTensor("padding", "uint8", (nbytes,), lambda: iter([memoryview(zeros)]))
    return HashedTensor(source, content_digest(zeros), xxhash.xxh3_64_hexdigest(zeros))


def _salted(pack: PackPlan, avoid: Collection[str]) -> PackPlan:
    salt = 0
    while pack.id in avoid:
        salt += 1
        pack = PackPlan(pack.names, pack.tensors, str(salt))
    return pack


def _starts(pack: PackPlan) -> Iterator[int]:
    start = len(pack.header)
    for name, tensor in zip(pack.names, pack.tensors, strict=True):
        if not is_padding(name):
            yield start
        start += tensor.source.nbytes


def _entry(tensor: HashedTensor, place: PackedAt) -> TensorEntry:
    source = tensor.source
    key = pack_key(place.pack)
    return TensorEntry(
        source.name, source.dtype, source.shape, tensor.digest, tensor.checksum, key, place.start
    )
