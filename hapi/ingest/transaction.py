"""The state of an unfinished packing in the store, from which the same command goes on.

    no packing -- begin --> packing.json is there
    packing    -- shard --> shard-N.bin, then shard-N.part.safetensors: the shard counts from the second on
    indexing   -- run of foreign shards --> run-DIGEST.part.safetensors
    packing    -- all shards --> index.safetensors, a record of what is replaced (``replaced.py``), then manifest.json
                  (the dataset is there from here on)
    finished   -- clean --> parts, earlier packs that are kept no longer and, last of all, packing.json are removed

Packing and indexing in place take the same steps (:func:`write_dataset`). A kill between
any two of these steps leaves one of these states, never a dataset that only looks whole.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import numpy as np

from hapi.data.chunk_checksums import runs_of
from hapi.data.index import SampleIndex, digest
from hapi.data.listing import LOCK_NAME, PACKING_NAME
from hapi.data.manifest import (
    REMEDY,
    InPlace,
    Manifest,
    SampleLayout,
    dataset_prefix,
    load_manifest,
    manifest_key,
)
from hapi.data.replaced import KEEP_OLD_SECONDS, kept, record, replaced_prefix
from hapi.errors import BadRequestError, ConflictError, DataError, HapiError, NotFoundError, UsageError
from hapi.store.base import ObjectStore, is_key
from hapi.store.commit import commit
from hapi.store.locking.locks import Lease, LeaseLostError, is_lock_object
from hapi.wire.documents import parse_document, strict_fields
from hapi.wire.labels import LabelKind
from hapi.wire.references import TransformSpec, check_digest, check_name

PART_BYTES = 8 << 30
"""Largest part of an index: that of a shard of 250 million samples."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Contents of ``packing.json``: the id of the packing, its source and its options."""

    pack: str
    fingerprint: str
    """Digest of everything that decides the parts: if equal, existing parts are as they would be made again.
    """
    whole: str
    """Digest of everything that decides the dataset: if equal, a finished one is the one asked for."""
    source: str
    created: str

    @classmethod
    def new(cls, source: str, fingerprint: str, whole: str) -> Self:
        """Begin a packing."""
        now = datetime.now(UTC)
        return cls(
            pack=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}",
            fingerprint=fingerprint,
            whole=whole,
            source=source,
            created=now.isoformat(timespec="seconds"),
        )

    def to_bytes(self) -> bytes:
        """Return the document as JSON text."""
        return json.dumps(self.__dict__, indent=1).encode()

    @classmethod
    def load(cls, store: ObjectStore, name: str) -> Self | None:
        """Return the unfinished packing of ``name``; None when there is none, :class:`DataError` on damage."""
        key = f"{dataset_prefix(name)}/{PACKING_NAME}"
        try:
            data = store.get(key)
        except NotFoundError:
            return None
        try:
            fields = ("pack", "fingerprint", "whole", "source", "created")
            d = strict_fields(parse_document(data), dict.fromkeys(fields, True), "packing")
            check_name(d["pack"], "packing.pack")
            for digest_of in ("fingerprint", "whole"):
                check_digest(d[digest_of], f"packing.{digest_of}")
            return cls(
                pack=d["pack"],
                fingerprint=d["fingerprint"],
                whole=d["whole"],
                source=str(d["source"]),
                created=str(d["created"]),
            )
        except (ValueError, BadRequestError) as error:
            raise DataError(
                f"{store.url}/{key} is damaged ({error}); pass --restart to begin anew"
            ) from error


class PackFolder:
    """The objects of one packing in the store."""

    def __init__(self, store: ObjectStore, name: str, pack: str, lease: Lease) -> None:
        """Use the objects of one packing.

        Args:
            store: where they lie.
            name: the dataset's name.
            pack: id of the packing.
            lease: guards the dataset's name; once it is lost nothing more is written or removed.
        """
        self.store = store
        self.lease = lease
        self._parts: dict[str, int] = {}
        self.name = name
        self.pack = pack
        self.prefix = f"{dataset_prefix(name)}/{pack}"

    def _part_key(self, part: str) -> str:
        return f"{self.prefix}/{part}.part.safetensors"

    def write_shard(
        self, number: int, data: memoryview, index: SampleIndex, metadata: Mapping[str, str]
    ) -> None:
        """Write the shard, and then its part of the index, which makes it count."""
        self.lease.raise_if_lost()
        self.store.put(f"{self.prefix}/{shard_name(number)}", data)
        self.lease.raise_if_lost()
        self.write_part(f"shard-{number:05d}", index, metadata)

    def read_shard(self, number: int) -> tuple[SampleIndex, dict[str, str]] | None:
        """Return the part that :meth:`write_shard` wrote beside a shard; None when either is absent or
        incomplete.
        """
        part = self.read_part(f"shard-{number:05d}")
        if part is None or len(part[0].shards) != 1 or part[0].shards.key(0) != shard_name(number):
            return None
        try:
            size = self.store.size(f"{self.prefix}/{shard_name(number)}")
        except NotFoundError:
            return None
        shard = part[0].shards[0]
        whole = size == shard.size and len(part[0].run) == runs_of(shard.size, shard.count)
        return part if whole else None

    def write_part(self, part: str, index: SampleIndex, metadata: Mapping[str, str]) -> None:
        """Write a piece of the later index with facts about it; its shards count from 0."""
        self.store.put(self._part_key(part), index.to_bytes({**metadata, "seal": _seal(index, metadata)}))

    def read_part(self, part: str) -> tuple[SampleIndex, dict[str, str]] | None:
        """Return the piece that :meth:`write_part` wrote; None when it is absent or incomplete."""
        key = self._part_key(part)
        try:
            index, metadata = SampleIndex.from_buffer(
                np.frombuffer(self.store.get(key, PART_BYTES), dtype=np.uint8), key
            )
            index.directory.check(index.shards, key, REMEDY)
            sealed = metadata.pop("seal", "") == _seal(index, metadata)
            return (index, metadata) if sealed else None
        except (NotFoundError, DataError):
            return None

    def write_index(
        self,
        packing: Packing,
        index: SampleIndex,
        *,
        classes: tuple[str, ...],
        layout: SampleLayout,
        transform: TransformSpec | None,
        in_place: InPlace | None = None,
        skipped: int = 0,
        label_kind: LabelKind = "single",
    ) -> Manifest:
        """Write the index of the whole dataset; return the manifest that belongs to it, unwritten.

        Args:
            packing: the running packing.
            index: of all samples.
            classes: names in the order of the labels.
            layout: form of the samples.
            transform: the dataset's own; None for tensors that need none.
            in_place: location of foreign shards; None if the shards were packed.
            skipped: bad samples that were left out.
            label_kind: of the labels in ``index``.
        """
        encoded = index.to_bytes()
        manifest = Manifest(
            name=self.name,
            pack=self.pack,
            count=len(index),
            classes=classes,
            layout=layout,
            transform=transform,
            index_size=len(encoded),
            index_xxh3=digest(encoded),
            shards=len(index.shards),
            total_bytes=index.shards.total_bytes,
            in_place=in_place,
            skipped=skipped,
            label_kind=label_kind,
            source=packing.source,
            created=packing.created,
        )
        self.store.put(manifest.index_key, encoded)
        shards = index.shards
        self._parts = {
            manifest.key_of(shards.key(number)): shards[number].size for number in range(len(shards))
        }
        self._parts[manifest.index_key] = len(encoded)
        return manifest

    def commit(self, manifest: Manifest, mark: str | None) -> None:
        """Write the manifest that :meth:`write_index` made; ``mark``: see :func:`hapi.store.commit.commit`."""
        key, data = manifest_key(self.name), manifest.to_bytes()
        commit(self.store, key, data, mark=mark, lease=self.lease, parts=self._parts)

    def withdraw(self) -> None:
        """Remove this process's objects after its lock was lost before the manifest: its successor has
        cleaned up.

        Objects that the successor goes on with stay.
        """
        with suppress(HapiError):
            packing = Packing.load(self.store, self.name)
            current = (
                load_manifest(self.store, self.name).pack
                if self.store.exists(manifest_key(self.name))
                else ""
            )
            if self.pack not in (current, "" if packing is None else packing.pack):
                for info in self.store.list(self.prefix):
                    self.store.delete(info.key)

    def is_empty(self) -> bool:
        """Return whether nothing was written yet."""
        return not self.store.list(self.prefix)

    def clean(self, manifest: Manifest, keep_old: float) -> None:
        """Remove all but ``manifest`` of this packing, its shards and index, and replaced versions that are kept.

        Records of replaced versions go before what they keep, ``packing.json`` goes last, so that an interrupted
        cleaning is done again.
        """
        prefix = dataset_prefix(self.name)
        last = f"{prefix}/{PACKING_NAME}"
        keys = [info.key for info in self.store.list(prefix) if is_key(info.key)]
        self.lease.check()  # after the listing: nothing in it can be of one that takes the lock from now on
        left = kept(self.store, self.name, manifest, keys, keep_old)
        left |= {key for key in keys if key.startswith(f"{self.prefix}/")}
        left = {key for key in left if not key.endswith(".part.safetensors")}
        left |= {key for key in keys if is_lock_object(key, f"{prefix}/{LOCK_NAME}")}
        left |= {last, manifest_key(self.name)}
        records = f"{replaced_prefix(self.name)}/"
        for key in sorted(set(keys) - left, key=lambda key: (not key.startswith(records), key)):
            self.store.delete(key)
        self.store.clean_temporary(prefix)
        self.lease.check()
        self.store.delete(last)


def _seal(index: SampleIndex, metadata: Mapping[str, str]) -> str:
    """Digest over all of a part of the index."""
    return digest(json.dumps([index.digest(), dict(metadata)], sort_keys=True).encode())


def write_dataset(
    store: ObjectStore,
    name: str,
    source: str,
    fingerprint: str,
    make: Callable[[PackFolder, Packing], Manifest],
    *,
    whole: str,
    replace: bool,
    restart: bool,
    force_lock: bool,
    keep_old: float = KEEP_OLD_SECONDS,
) -> Manifest:
    """Begin a dataset or go on with it, ``make`` shards and index, write the manifest, remove what is left over.

    ``source``, ``fingerprint`` and ``whole`` say what it is made from (:class:`Packing`). Raises
    :class:`ConflictError` when the name is taken, being written by another process, or half made from something
    else. When ``make`` refuses what it finds before it has written anything, nothing is left behind. A version that is
    replaced stays readable for ``keep_old`` seconds; 0 removes it, and all that were replaced before.
    """
    with store.lock(f"{dataset_prefix(name)}/{LOCK_NAME}", force=force_lock) as lease:
        asked, mark = Packing.new(source, fingerprint, whole), store.mark(manifest_key(name))
        folder, packing = _begin(store, name, lease, asked, replace, restart, keep_old)
        manifest = _finished(store, name, packing)
        if manifest is None:
            try:
                manifest = make(folder, packing)
                lease.check()
                record(store, manifest, keep_old)
                folder.commit(manifest, mark)
            except (DataError, UsageError):
                if folder.is_empty():
                    lease.check()
                    store.delete(f"{dataset_prefix(name)}/{PACKING_NAME}")
                raise
            except LeaseLostError:
                folder.withdraw()
                raise
        folder.clean(manifest, keep_old)
    return manifest


def _finished(store: ObjectStore, name: str, packing: Packing) -> Manifest | None:
    """The manifest that came of ``packing``; None when it has not come that far."""
    if not store.exists(manifest_key(name)):
        return None
    try:
        manifest = load_manifest(store, name)
    except DataError:
        return None
    return manifest if manifest.pack == packing.pack else None


def _begin(
    store: ObjectStore, name: str, lease: Lease, asked: Packing, replace: bool, restart: bool, keep_old: float
) -> tuple[PackFolder, Packing]:
    """The packing to go on with, or ``asked``, a new one."""
    where = f"{store.url}/{name}"
    packing = None if restart else Packing.load(store, name)
    finished = None if packing is None else _finished(store, name, packing)
    if packing is not None and finished is not None and packing.whole != asked.whole:
        # Nothing was left to do of it but to clean up. What is asked for now is another one, if only in its labels.
        PackFolder(store, name, packing.pack, lease).clean(finished, keep_old)
        packing = finished = None
    if packing is not None and packing.fingerprint != asked.fingerprint:
        raise ConflictError(
            f"{where} is half packed from another source, from one that has changed since, or with other options "
            f"({packing.source}, begun {packing.created}); run that command again, or pass --restart to begin anew"
        )
    if store.exists(manifest_key(name)) and not replace and finished is None:
        raise ConflictError(f"there is a dataset {where} already; choose another name, or pass --replace")
    if packing is not None:
        store.clean_temporary(dataset_prefix(name))
    if packing is None or packing.whole != asked.whole:
        # Its parts are of use all the same; what comes of them is what is asked for now.
        packing = asked if packing is None else dataclasses.replace(asked, pack=packing.pack)
        store.put(f"{dataset_prefix(name)}/{PACKING_NAME}", packing.to_bytes())
    return PackFolder(store, name, packing.pack, lease), packing


def shard_name(number: int) -> str:
    """Return the name of the shard of this number."""
    return f"shard-{number:05d}.bin"
