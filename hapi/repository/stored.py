"""A pushed model in its store: the needed tensors, read by ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
)
from hapi.models.graph.digest import ContentDigest, content_key
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.repository.entries import DTYPES, TensorEntry
from hapi.repository.manifest import ModelManifest
from hapi.repository.pushed import REMEDY, PushedModel
from hapi.store.base import ObjectStore
from hapi.wire.frames import TensorSpec

_GROUP_BYTES = 8 << 20
"""Neighbouring tensors are read together up to this size (facts: ranges of 4 MiB and more are worth a request)."""

_GAP_BYTES = 64 << 10
"""Unwanted bytes between two tensors that are read over rather than asking the store twice: a store like Swift
takes about 3 ms a request (facts), in which it sends more than a MiB."""

_READERS = 4


class StoredModel(PushedModel):
    """A pushed model and the store that holds it."""

    def __init__(self, store: ObjectStore, manifest: ModelManifest) -> None:
        super().__init__(manifest)
        self.store = store

    def load(self, model: LayeredModel, start: int, stop: int, device: str | torch.device = "cpu") -> int:
        """Load the weights of some layers, and no others.

        Args:
            model: from :meth:`layered`; its tensors are replaced.
            start: number of layers before the first one to load.
            stop: last layer to load.
            device: torch device of the loaded tensors.

        Returns:
            The bytes read.
        """
        return self.load_from(self.fetch, model, start, stop, str(device))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors ``names``, verified, in any order; neighbours are read together."""
        for entry, tensor in self.received(self.fetch, [self._entry(name) for name in names]):
            yield entry.name, tensor

    def key(self, name: str) -> str:
        """Key of stored tensor ``name``'s content."""
        entry = self._entry(name)
        form = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        return content_key(entry.digest, form)

    def tensor_spec(self, name: str) -> TensorSpec:
        """Return the form of one stored tensor; :class:`NotFoundError` for an unknown name."""
        entry = self._entry(name)
        return TensorSpec(name, entry.dtype, entry.shape)

    def read_tensor(self, name: str) -> memoryview:
        """Return the bytes of one stored tensor, verified."""
        entry = self._entry(name)
        ((_, data),) = self._read_group([entry])
        self.verify(entry, data)
        return data

    def read_part(self, name: str, start: int, out: memoryview) -> None:
        """Read the bytes of tensor ``name`` from ``start`` on into ``out``; the caller checks them
        (:meth:`checked`).
        """
        entry = self._entry(name)
        try:
            self.store.read_into(entry.pack, entry.start + start, out)
            return
        except StoreUnavailableError:
            raise
        except (NotFoundError, StoreError) as error:
            now = self._moved(error, [entry])[0]
        self.store.read_into(now.pack, now.start + start, out)

    def checked(self, name: str, piece_bytes: int, step: Callable[[], None]) -> int:
        """Verify one stored tensor with no more than a piece of it in memory.

        Args:
            name: the tensor.
            step: called before each piece; may raise.

        Returns:
            The tensor's xxh3-64.
        """
        entry, found, own = self._entry(name), xxhash.xxh3_64(), ContentDigest()
        buffer = memoryview(bytearray(min(piece_bytes, entry.nbytes)))
        for start in range(0, entry.nbytes, piece_bytes):
            step()
            part = buffer[: min(piece_bytes, entry.nbytes - start)]
            self.read_part(name, start, part)
            found.update(part)
            own.update(part)
        if own.hexdigest() != entry.digest:
            raise self.damaged(entry)
        return found.intdigest()

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise NotFoundError(f"model {self.name!r} has no tensor {name[:80]!r}")
        return entry

    def fetch(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, memoryview]]:
        """Yield the name and the raw bytes of each of ``entries``, in any order."""
        groups = _groups(entries)
        if len(groups) < 2:
            for group in groups:
                yield from self._read_group(group)
            return
        with ThreadPoolExecutor(min(_READERS, len(groups)), thread_name_prefix="hapi-weights") as readers:
            for parts in readers.map(self._read_group, groups):
                yield from parts

    def _read_group(self, group: Sequence[TensorEntry]) -> list[tuple[str, memoryview]]:
        try:
            return self._read_from(group)
        except StoreUnavailableError:
            raise
        except (NotFoundError, StoreError) as error:
            now = self._moved(error, group)
        return [pair for entry in now for pair in self._read_from([entry])]

    def _read_from(self, group: Sequence[TensorEntry]) -> list[tuple[str, memoryview]]:
        key, start, stop = group[0].pack, group[0].start, max(entry.stop for entry in group)
        if stop - start > _GROUP_BYTES and self.store.size(key) < stop:  # before that much memory is taken
            raise StoreError(f"{self.store.url}/{key} ends before byte {stop}")
        # torch's allocator aligns to 64 bytes, so that a tensor alone in its group is used where it lies.
        buffer = tensor_bytes(torch.empty(stop - start, dtype=torch.uint8))
        if stop > start:
            self.store.read_into(key, start, buffer)
        return [(entry.name, buffer[entry.start - start : entry.stop - start]) for entry in group]

    def _moved(self, error: HapiError, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Where the tensors are now, after ``error`` of reading them: a collection may have packed them anew.

        :class:`ConflictError` when the version was removed, :class:`DataError` when the pack is damaged; else
        ``error``.
        """
        try:
            now = self._manifest_now()
        except NotFoundError:
            raise ConflictError(
                f"model {self.reference!r} was removed while it was read; push it again"
            ) from error
        if now.digest != self.digest:
            raise ConflictError(
                f"model {self.reference!r} was removed and pushed anew while it was read"
            ) from error
        found = [now.tensors[entry.name] for entry in entries]
        if [(e.pack, e.start) for e in found] != [(e.pack, e.start) for e in entries]:
            self.manifest = now
            return found
        key, stop = entries[0].pack, max(entry.stop for entry in entries)
        try:
            size = self.store.size(key)
        except NotFoundError:
            size = 0
        if size < stop:
            raise DataError(
                f"model {self.reference!r}: {self.store.url}/{key} has {size} bytes, {stop} or more are needed;"
                f" {REMEDY}"
            ) from error
        raise error

    def _manifest_now(self) -> ModelManifest:
        key = self.manifest.key
        return ModelManifest.from_bytes(
            self.store.get(key), self.manifest.structure, f"{self.store.url}/{key}"
        )


def _groups(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Neighbours in the file together, up to the group's size; a large tensor is a group of its own.

    Neighbours may have a little between them that nobody asked for.
    """
    groups: list[list[TensorEntry]] = []
    for entry in sorted(entries, key=lambda e: (e.pack, e.start)):
        last = groups[-1] if groups else None
        adjacent = last and last[-1].pack == entry.pack and entry.start - last[-1].stop <= _GAP_BYTES
        if last and adjacent and entry.stop - last[0].start <= _GROUP_BYTES:
            last.append(entry)
        else:
            groups.append([entry])
    return groups
