"""The index file of a dataset, read and checked.

It is never mapped in place: if a file is shortened, every process that has it mapped dies at the next access
(SIGBUS). The check covers this process's own copy, and only that is used.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from hapi.data.chunk_checksums import runs_of
from hapi.data.index import SampleIndex, digest
from hapi.data.manifest import Manifest
from hapi.errors import DataError, NotFoundError, StoreError
from hapi.store.base import ObjectStore
from hapi.store.safetensors import Array

IN_MEMORY_BYTES = 1 << 30
"""Indexes up to this size (33 million samples) are kept in memory; larger ones in a temporary file."""
_BLOCK = 8 << 20


def read_own(store: ObjectStore, key: str, size: int) -> Array:
    """Return the first ``size`` bytes of an object, uint8, in a private copy.

    Up to ``IN_MEMORY_BYTES`` that is memory, beyond it a mapped file without a name in the folder for
    temporary files (``TMPDIR``), which the system may put out of memory and fetch again.
    """
    if size <= IN_MEMORY_BYTES:
        buffer = np.empty(size, dtype=np.uint8)
        store.read_into(key, 0, buffer.data)
        return buffer
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(prefix="hapi-index-", dir=folder) as file:
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # a full disk is to be known now, not when a page is looked at
            block = memoryview(bytearray(_BLOCK))
            for start in range(0, size, _BLOCK):
                part = block[: min(_BLOCK, size - start)]
                store.read_into(key, start, part)
                file.write(part)
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), dtype=np.uint8)
    except OSError as error:
        raise StoreError(
            f"{store.url}/{key} has {size} bytes, and {folder} has no room for them: {error.strerror or error}; "
            "set TMPDIR to a folder on a disk with room"
        ) from error


def read_index(store: ObjectStore, manifest: Manifest) -> SampleIndex:
    """The index of a dataset, checked against its digest and the manifest; :class:`DataError` on damage."""
    where, remedy = f"{store.url}/{manifest.index_key}", manifest.remedy
    try:
        size = store.size(manifest.index_key)
        if size != manifest.index_size:
            raise DataError(f"{where} has {size} bytes instead of {manifest.index_size}; {remedy}")
        buffer = read_own(store, manifest.index_key, size)
    except NotFoundError:
        raise DataError(f"{where} is missing; {remedy}") from None
    if digest(buffer) != manifest.index_xxh3:
        raise DataError(f"{where} fails its checksum; {remedy}")
    index, _ = SampleIndex.from_buffer(buffer, where)
    index.directory.check(index.shards, where, remedy)
    _check_against(index, manifest, where)
    return index


def _check_against(index: SampleIndex, manifest: Manifest, where: str) -> None:
    """:class:`DataError` unless the index is what the manifest says of it."""
    remedy = manifest.remedy
    if (len(index.shards), index.shards.total_bytes) != (manifest.shards, manifest.total_bytes):
        raise DataError(f"{where}: its shards do not add up to what the manifest says; {remedy}")
    if len(index) != manifest.count:
        raise DataError(f"{where}: it has {len(index)} samples, the manifest says {manifest.count}; {remedy}")
    runs = int(runs_of(index.shards.size, index.shards.count).sum())
    if len(index.run) not in (0, runs):
        raise DataError(
            f"{where}: it has checksums of {len(index.run)} runs, the shards have {runs}; {remedy}"
        )
    form = manifest.label_form
    if (index.label.dtype, index.label.shape) != (form.dtype, form.shape(len(index))):
        raise DataError(f"{where}: its labels are not {form.kind} labels, as the manifest says; {remedy}")
    if (wrong := form.first_wrong(index.label)) is not None:
        raise DataError(
            f"{where}: sample {wrong} has label {index.label[wrong]}; expected {form.bounds}; {remedy}"
        )
