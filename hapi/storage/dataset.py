"""Data sets: open by name and version, then labels, lengths and verified bytes of any samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
    UnprocessableError,
)
from hapi.storage.directory import Located, offsets_of
from hapi.storage.index import SampleIndex, digest
from hapi.storage.manifest import Kind, Manifest, SampleLayout, load_manifest
from hapi.storage.objects import ObjectStore, ReadPart
from hapi.storage.sequence import IntArray
from hapi.storage.tensorfile import read_object
from hapi.wire.references import DatasetReference, TransformSpec

__all__ = ["Dataset", "IntArray", "SampleLayout", "Samples", "open_dataset", "read_index"]


@dataclass(frozen=True)
class Samples:
    """Bytes and labels of n samples, in the order asked for."""

    ids: IntArray
    """int64 [n]."""
    data: npt.NDArray[np.uint8]
    """All samples' bytes, one after the other; uint8 [total]."""
    offsets: IntArray
    """Sample i is ``data[offsets[i]:offsets[i + 1]]``; int64 [n + 1]."""
    labels: IntArray
    """int64 [n]."""

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, position: int) -> npt.NDArray[np.uint8]:
        """The bytes of the sample at ``position`` of this read, a view."""
        return self.data[int(self.offsets[position]) : int(self.offsets[position + 1])]


class Dataset:
    """One version of a data set. Thread-safe; :func:`open_dataset` makes it."""

    def __init__(self, store: ObjectStore, manifest: Manifest, index: SampleIndex) -> None:
        self.store = store
        self.manifest = manifest
        self.index = index
        self.name = manifest.name
        self.version = manifest.version
        self.reference = DatasetReference(name=self.name, version=self.version)
        self.count = manifest.count
        self.classes = manifest.classes
        self.total_bytes = manifest.total_bytes
        self.layout = manifest.layout
        self.transform: TransformSpec | None = manifest.transform
        """The default transform; None for tensors that need none."""
        self._keys = [manifest.shard_key(number) for number in range(len(manifest.shards))]

    @property
    def kind(self) -> Kind:
        return self.layout.kind

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        return self.layout.sample_shape

    @property
    def sample_dtype(self) -> str | None:
        return self.layout.sample_dtype

    def labels(self, ids: npt.ArrayLike) -> IntArray:
        """Labels of these samples, int64 [n]; :class:`NotFoundError` when an id is out of range."""
        return self.index.label[self._checked(ids)]

    def lengths(self, ids: npt.ArrayLike) -> IntArray:
        """Stored bytes of each of these samples, int64 [n]."""
        return self.locate(ids).length

    def locate(self, ids: npt.ArrayLike) -> Located:
        """Shard, offset and length of each of these samples; a shard is a place in ``manifest.shards``."""
        return self.index.directory.locate(self._checked(ids))

    def read(self, ids: npt.ArrayLike) -> Samples:
        """Bytes of these samples, every one checked against its checksum.

        Memory is the samples' own bytes (``lengths(ids).sum()``, for the caller to bound), for remote stores
        also the gaps between near samples. Raises :class:`DataError` naming the first damaged sample,
        :class:`NotFoundError` for an id out of range, :class:`ConflictError` when the data set was replaced.
        """
        wanted = self._checked(ids)
        places = self.index.directory.locate(wanted)
        shards = places.shard
        offsets = offsets_of(places.length)
        data = np.empty(int(offsets[-1]), dtype=np.uint8)
        try:
            self.store.read_many(list(self._parts(shards, places.offset, offsets, data.data)))
        except (NotFoundError, StoreError) as error:
            raise self._explained(error, np.unique(shards)) from error
        self._verify(wanted, shards, data, offsets)
        return Samples(ids=wanted, data=data, offsets=offsets, labels=self.index.label[wanted])

    def _parts(
        self, shards: npt.NDArray[np.uint32], starts: IntArray, offsets: IntArray, out: memoryview
    ) -> Iterator[ReadPart]:
        """Ranges to read: samples that are neighbours both in the shard and in the read are one."""
        if len(shards) == 0:
            return
        ends = starts + np.diff(offsets)
        breaks = np.flatnonzero((shards[1:] != shards[:-1]) | (starts[1:] != ends[:-1])) + 1
        firsts = np.concatenate(([0], breaks))
        stops = offsets[np.concatenate((breaks, [len(shards)]))]
        for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
            part = out[int(offsets[first]) : stop]
            if len(part):
                yield ReadPart(self._keys[int(shards[first])], int(starts[first]), part)

    def _verify(
        self, ids: IntArray, shards: npt.NDArray[np.uint32], data: npt.NDArray[np.uint8], offsets: IntArray
    ) -> None:
        view, bounds = data.data, offsets.tolist()
        found = np.fromiter(
            (xxhash.xxh3_64_intdigest(view[a:b]) for a, b in pairwise(bounds)),
            dtype=np.uint64,
            count=len(ids),
        )
        wrong = np.flatnonzero(found != self.index.checksum[ids])
        if len(wrong):
            first = int(wrong[0])
            shard = self.manifest.shards[shards[first]].key
            raise DataError(
                f"data set {self.name!r}: sample {ids[first]} in shard {shard} "
                "fails its checksum; run 'hapi verify' for all damage, and pack the data set again"
            )

    def _explained(self, error: HapiError, shards: npt.NDArray[np.uint32]) -> HapiError:
        """Why a read failed: the data set was replaced, a shard is damaged, or just the store's own error."""
        if isinstance(error, StoreUnavailableError):
            return error  # asking on would only take longer
        try:
            if load_manifest(self.store, self.name).pack != self.manifest.pack:
                return ConflictError(
                    f"data set {self.name!r} was replaced since version {self.version}; open it again"
                )
            for number in shards.tolist():
                shard = self.manifest.shards[number]
                size = self.store.size(self._keys[number])
                if size != shard.size:
                    return DataError(
                        f"data set {self.name!r}: shard {shard.key} has {size} bytes, not {shard.size}; "
                        "pack the data set again"
                    )
        except NotFoundError as missing:
            return DataError(
                f"data set {self.name!r}: a part of it is gone: {missing}; pack the data set again"
            )
        except HapiError:
            return error
        return error

    def _checked(self, ids: npt.ArrayLike) -> IntArray:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UnprocessableError("sample ids: expected a list of integers")
        if array.size and (array.min() < 0 or array.max() >= self.count):
            wrong = array[(array < 0) | (array >= self.count)][0]
            raise NotFoundError(
                f"data set {self.name!r} has no sample {wrong}; it has {self.count}, 0 to {self.count - 1}"
            )
        return array.astype(np.int64)


def open_dataset(store: ObjectStore, name: str, version: str | None = None) -> Dataset:
    """The data set ``name``. :class:`ConflictError` when it is there in another version than ``version``.

    :class:`NotFoundError` (naming what is there) when there is none, :class:`DataError` when manifest or
    index are damaged. The index is checked as a whole, the samples when they are read.
    """
    manifest = load_manifest(store, name)
    if version is not None and manifest.version != version:
        raise ConflictError(
            f"data set {name!r} in {store.url} has version {manifest.version}, not {version}; open it again"
        )
    return Dataset(store, manifest, read_index(store, manifest))


def read_index(store: ObjectStore, manifest: Manifest) -> SampleIndex:
    """The index of a data set, checked against its digest and the manifest; :class:`DataError` on damage."""
    where = f"{store.url}/{manifest.index_key}"
    try:
        size = store.size(manifest.index_key)
        if size != manifest.index_size:
            raise DataError(
                f"{where} has {size} bytes instead of {manifest.index_size}; pack the data set again"
            )
        buffer: Any = read_object(store, manifest.index_key)
    except NotFoundError:
        raise DataError(f"{where} is missing; pack the data set again") from None
    if digest(buffer) != manifest.index_xxh3:
        raise DataError(f"{where} fails its checksum; pack the data set again")
    index, _ = SampleIndex.from_buffer(buffer, where)
    index.directory.check(manifest.shards, where)
    if index.label.min() < 0 or index.label.max() >= len(manifest.classes):
        wrong = int(np.argmax((index.label < 0) | (index.label >= len(manifest.classes))))
        raise DataError(
            f"{where}: sample {wrong} has label {index.label[wrong]}, but there are {len(manifest.classes)} "
            "classes; pack the data set again"
        )
    return index
