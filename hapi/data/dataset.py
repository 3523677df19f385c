"""Datasets: opened by name and version, then read by sample: labels, lengths and verified bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import HashArray, IntArray, LabelArray
from hapi.data.index import SampleIndex
from hapi.data.index_file import read_index
from hapi.data.manifest import Kind, Manifest, SampleLayout
from hapi.data.reading.chunk_cache import ChunkCache
from hapi.data.reading.reader import AccessHint, Reader, chunk_cache
from hapi.data.replaced import find_manifest
from hapi.data.sample_directory import Located
from hapi.data.shards import ShardTable
from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    NotFoundError,
    StoreError,
    StoreUnavailableError,
    UnprocessableError,
)
from hapi.store.base import ObjectStore
from hapi.wire.references import DatasetReference, TransformSpec
from hapi.wire.samples import Samples, offsets_of

__all__ = ["Dataset", "IntArray", "SampleLayout", "Samples", "find_dataset"]


_MOVES = 4
"""Times that the shards may be replaced while one read is under way."""
_KEPT_KEYS = 1 << 16
"""Shards whose keys are kept as text: all of a packed dataset, some of a million single objects."""


class Dataset:
    """One version of a dataset. Thread-safe; :func:`find_dataset` makes it."""

    def __init__(
        self, store: ObjectStore, manifest: Manifest, index: SampleIndex, cache: ChunkCache | None = None
    ) -> None:
        self.store = store
        self.index = index
        self.name = manifest.name
        self.version = manifest.version
        self.reference = DatasetReference(name=self.name, version=self.version)
        self.count = manifest.count
        self.classes = manifest.classes
        self.label_form = manifest.label_form
        self.total_bytes = manifest.total_bytes
        self.layout = manifest.layout
        self.transform: TransformSpec | None = manifest.transform
        """The default transform; None for tensors that need none."""
        self.shards = index.shards
        self._keys = _ShardKeys(manifest, index.shards)
        self._checks = _Checks(manifest, index)
        self.reader = Reader(
            store,
            self._keys,
            index.shards,
            index.directory,
            self._checks,
            index.run,
            chunk_cache(store) if cache is None else cache,
        )

    @property
    def manifest(self) -> Manifest:
        """Manifest, from the time of opening or from when :meth:`read` found the same version packed anew."""
        return self._keys.manifest

    @property
    def kind(self) -> Kind:
        """Kind of the samples: ``image`` or ``tensor``."""
        return self.layout.kind

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape of a sample that is a tensor; None for images."""
        return self.layout.sample_shape

    @property
    def sample_dtype(self) -> str | None:
        """Element type of a sample that is a tensor; None for images."""
        return self.layout.sample_dtype

    def shard_key(self, number: int) -> str:
        """Return the key of a shard's object."""
        return self._keys(number)

    @cached_property
    def label_counts(self) -> tuple[int, ...]:
        """Samples of each class; with several labels for a sample, those that have it; none of a regression."""
        return self.label_counts_of(None)

    def label_counts_of(self, ids: npt.ArrayLike | None) -> tuple[int, ...]:
        """Return :attr:`label_counts` of some samples.

        Args:
            ids: samples of the dataset; None for all.

        Raises:
            NotFoundError: an id is out of range.
        """
        labels, form = self.index.label if ids is None else self.labels(ids), self.label_form
        if form.kind == "regression":
            return ()
        if form.kind == "single":
            return tuple(np.bincount(labels.astype(np.int64), minlength=form.classes).tolist())
        return tuple((labels >= 0.5).sum(axis=0).tolist())

    def labels(self, ids: npt.ArrayLike) -> LabelArray:
        """Labels of these samples, int64 [n] or float32 [n, k]; :class:`NotFoundError` when an id is out of range."""
        return self.index.label[self._checked(ids)]

    def lengths(self, ids: npt.ArrayLike) -> IntArray:
        """Stored bytes of each of these samples, int64 [n]."""
        return self.locate(ids).length

    def locate(self, ids: npt.ArrayLike) -> Located:
        """Return shard, offset and length of each of these samples; a shard is a position in ``shards``.

        Functions that take the result instead of ids do not check again.

        Raises:
            NotFoundError: an id is out of range.
        """
        return self.index.directory.locate(self._checked(ids))

    def labels_at(self, located: Located) -> LabelArray:
        """Labels of the samples at ``located``, int64 [n] or float32 [n, k]."""
        return self.index.label[located.ids]

    def read(
        self,
        ids: npt.ArrayLike,
        hint: AccessHint | None = None,
        out: npt.NDArray[np.uint8] | None = None,
    ) -> Samples:
        """Return the bytes of samples ``ids``; see :meth:`read_at`.

        Args:
            ids: int64 [n].
            hint: for the reads to come.
            out: buffer for the bytes, uint8; None for new memory.

        Raises:
            NotFoundError: an id is out of range.
        """
        return self.read_at(self.locate(ids), hint, out)

    def read_at(
        self,
        located: Located,
        hint: AccessHint | None = None,
        out: npt.NDArray[np.uint8] | None = None,
    ) -> Samples:
        """Return the bytes of the samples at ``located``, each checked against its checksum.

        If the same version was packed again meanwhile, its new shards are read from then on.

        Args:
            located: from this dataset's :meth:`locate`.
            hint: from :meth:`hapi.data.reading.reader.Reader.access_hint`, for the reads to come.
            out: buffer for the bytes, uint8, long enough; None for new memory of ``located.length.sum()``
                bytes, for the caller to bound. Remote stores also need the gaps between near samples.

        Raises:
            DataError: a sample is damaged; the first one is named.
            ConflictError: another version has replaced this one, which is kept no longer.
        """
        wanted = located.ids.copy()
        offsets = offsets_of(located.length)
        total = int(offsets[-1])
        data = np.empty(total, dtype=np.uint8) if out is None else out[:total]
        self._found(lambda: self.reader.read(wanted, located, offsets, data, hint), wanted, located.shard)
        return Samples(ids=wanted, data=data, offsets=offsets, labels=self.index.label[wanted])

    def checked(self, located: Located, part_bytes: int, step: Callable[[], None]) -> int:
        """Read the one sample at ``located`` again and verify it, with no more than a piece in memory.

        Args:
            located: location of the sample.
            part_bytes: bytes read at a time.
            step: called before each piece; may raise.

        Returns:
            The sample's checksum. Errors are those of :meth:`read_at`.
        """
        length, offset = int(located.length[0]), int(located.offset[0])
        buffer = memoryview(bytearray(min(part_bytes, length)))

        def check() -> None:
            """Compare the checksum with the recorded one."""
            digest = xxhash.xxh3_64()
            for start in range(0, length, part_bytes):
                step()
                part = buffer[: min(part_bytes, length - start)]
                self.store.read_into(self.shard_key(int(located.shard[0])), offset + start, part)
                digest.update(part)
            self._checks(located.ids, np.array([digest.intdigest()], dtype=np.uint64))

        self._found(check, located.ids, located.shard)
        return int(self.index.checksum[located.ids[0]])

    def read_part(self, located: Located, start: int, out: memoryview) -> None:
        """Read the bytes of the one sample at ``located`` from ``start`` on into ``out``; the caller checks
        them.
        """
        shard, offset = int(located.shard[0]), int(located.offset[0]) + start
        self._found(
            lambda: self.store.read_into(self.shard_key(shard), offset, out), located.ids, located.shard
        )

    def _found(self, read: Callable[[], None], ids: IntArray, shards: npt.NDArray[np.uint32]) -> None:
        """Run ``read()`` for samples ``ids``, and again if this version's shards were moved meanwhile."""
        for _ in range(_MOVES):
            manifest = self.manifest
            try:
                return read()
            except (NotFoundError, StoreError, DataError) as error:
                if not self._moved(error, manifest):
                    raise self._explained(error, ids, shards) from error
        raise ConflictError(f"dataset {self.name!r} is replaced again and again; try again later")

    def refresh(self, manifest: Manifest) -> None:
        """Read from now on from the shards of ``manifest``, which must be of this version."""
        if manifest.version != self.version:
            raise ConflictError(f"dataset {self.name!r} has version {manifest.version}, not {self.version}")
        if manifest.pack != self.manifest.pack:
            self._keys.use(manifest)
            self.reader.forgive()

    def _moved(self, error: HapiError, failed: Manifest) -> bool:
        """Return whether this version now has other shards than those of ``failed``, whose reading ended with
        ``error``.
        """
        if isinstance(error, StoreUnavailableError):
            return False
        try:
            self.refresh(find_manifest(self.store, self.name, self.version))
        except HapiError:
            return False
        return self.manifest.pack != failed.pack

    def _explained(self, error: HapiError, ids: IntArray, shards: npt.NDArray[np.uint32]) -> HapiError:
        """Reason of a failed read: a replaced dataset, a damaged shard, or just the store's own error."""
        if isinstance(error, StoreUnavailableError | DataError):
            return error  # asking on would only take longer, or it says all that there is to say
        remedy = self.manifest.remedy
        try:
            find_manifest(self.store, self.name, self.version)
            numbers, firsts = np.unique(shards, return_index=True)
            # The store's message names the object that it is about: of many shards, that one is looked at first.
            for number, first in sorted(
                zip(numbers.tolist(), ids[firsts].tolist(), strict=True),
                key=lambda pair: self.shard_key(pair[0]) not in str(error),
            ):
                problem = self._shard_problem(number)
                if problem is not None:
                    return DataError(f"dataset {self.name!r}: sample {first}: {problem}; {remedy}")
        except ConflictError as replaced:
            return replaced
        except NotFoundError as missing:
            return DataError(f"dataset {self.name!r}: a part of it is gone: {missing}; {remedy}")
        except HapiError:
            return error
        return error

    def _shard_problem(self, number: int) -> str | None:
        """Damage of a shard as a whole."""
        shard = self.shards[number]
        try:
            size = self.store.size(self.shard_key(number))
        except NotFoundError:
            return f"shard {shard.key} is gone ({self.store.url}/{self.shard_key(number)})"
        return None if size == shard.size else f"shard {shard.key} has {size} bytes, not {shard.size}"

    def _checked(self, ids: npt.ArrayLike) -> IntArray:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UnprocessableError("sample ids: expected a list of integers")
        wanted: IntArray = array.astype(np.int64, copy=False)
        if array.size and int(wanted.view(np.uint64).max()) >= self.count:  # a negative id is a huge one
            wrong = array[(array < 0) | (array >= self.count)][0]
            raise NotFoundError(
                f"dataset {self.name!r} has no sample {wrong}; it has {self.count}, 0 to {self.count - 1}"
            )
        return wanted


@dataclass(frozen=True)
class _Checks:
    """Holds samples against their checksums. No part of the dataset, which would keep it alive by a circle."""

    manifest: Manifest
    index: SampleIndex

    def __call__(self, ids: IntArray, found: HashArray) -> None:
        """:class:`DataError` unless ``found[i]`` is the checksum of sample ``ids[i]``, for every i."""
        wrong = np.flatnonzero(found != self.index.checksum[ids])
        if len(wrong):
            first = ids[wrong[:1]]
            shard = self.index.shards.key(int(self.index.directory.locate(first).shard[0]))
            raise DataError(
                f"dataset {self.manifest.name!r}: sample {first[0]} in shard {shard} "
                f"fails its checksum; run 'hapi verify' for all damage, and {self.manifest.remedy}"
            )


class _ShardKeys:
    """The objects of the shards by their numbers. They change when the same version is packed again."""

    def __init__(self, manifest: Manifest, shards: ShardTable) -> None:
        self._shards = shards
        self.use(manifest)

    def use(self, manifest: Manifest) -> None:
        """Take the shards' keys from ``manifest``."""
        self.manifest = manifest
        self._key_of = lru_cache(_KEPT_KEYS)(partial(_shard_key, manifest, self._shards))

    def __call__(self, number: int) -> str:
        return self._key_of(number)


def _shard_key(manifest: Manifest, shards: ShardTable, number: int) -> str:
    return manifest.key_of(shards.key(number))


def find_dataset(
    store: ObjectStore, name: str, version: str | None = None, cache: ChunkCache | None = None
) -> Dataset:
    """Open the dataset ``name``. The index is checked as a whole, samples are checked when they are read.

    Args:
        store: where it lies.
        name: its name there.
        version: the version that it must have, also a replaced one that is still kept (``replaced.py``);
            None: any.
        cache: keeps chunks of small samples, and may be shared by datasets of one store; None: a cache of its
            own.

    Raises:
        NotFoundError: there is none; the message names those that are there.
        ConflictError: it exists in another version only.
        DataError: its manifest or index is damaged.
    """
    manifest = find_manifest(store, name, version)
    while True:
        try:
            return Dataset(store, manifest, read_index(store, manifest), cache)
        except DataError:
            # Was it replaced between its manifest and its index?
            now = find_manifest(store, name, version)
            if now.pack == manifest.pack:
                raise
            manifest = now
