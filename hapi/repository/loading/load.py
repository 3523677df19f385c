"""Loading of stored tensors (DStore, sections 3 and 5): planned ranges, read in parallel, checked on arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from hapi.errors import DataError, HapiError, StoreError, UsageError
from hapi.models.tensors import tensor_bytes
from hapi.process.processors import processor_count
from hapi.repository.checksums import CHECKED_BYTES
from hapi.repository.entries import DTYPES, TensorEntry
from hapi.repository.loading.checks import VERIFIED, ContentCheck, Identity
from hapi.repository.loading.landing import Conversion, landing
from hapi.repository.loading.plan import ReadPlan, ReadTraits, Wanted, plan_reads
from hapi.repository.loading.pool import LoadingPool, process_pool
from hapi.repository.loading.readers import RangeSource, Readers
from hapi.repository.loading.staging import STAGE_BYTES
from hapi.store.base import ObjectStore
from hapi.store.coalesce import COALESCE_GAP
from hapi.store.http.ranges import GAP_BYTES, PARALLEL, SLICE_BYTES
from hapi.store.remote import PARALLEL_REQUESTS

LOCAL_RANGE_BYTES = CHECKED_BYTES
"""Bytes that a reader of local files takes at a time: it alone hashes a piece, which is in its processor's cache."""
ALONE_BYTES = 2 << 20
"""Up to here starting a second reader of local files costs more than it saves."""
MAX_TRUSTED_BYTES = 64 << 20
"""Largest tensor for which memory is taken without asking the store whether the object is that long."""
CHECKSUM, IDENTITY = "checksum", "identity"
"""Ways to verify a tensor: xxh3-64, which finds damage, or also its SHA-256 digest, which nobody can forge."""

Loaded = tuple[TensorEntry, torch.Tensor]
Damaged = Callable[[TensorEntry], HapiError]


def load(
    source: ObjectStore | RangeSource,
    entries: Sequence[TensorEntry],
    device: str | torch.device = "cpu",
    pool: LoadingPool | None = None,
    *,
    verify: str = CHECKSUM,
    damaged: Damaged | None = None,
    dtype: torch.dtype | None = None,
) -> Generator[Loaded, None, None]:
    """Yield the tensors of ``entries`` in their order, each verified and in memory of its own.

    Tensors of equal content are read once. Nothing is read before the first tensor is asked for. After an error, or
    when the iterator is closed, no reader is left. A caller must not use what it has until the iterator ends: a model
    is loaded whole or not at all.

    Args:
        source: store that holds the tensors' objects, or anything else that ranges of them can be read from.
        entries: tensors in the order in which they are needed, first layers first.
        device: where the tensors go.
        pool: memory that loads share; None: the process's own.
        verify: "checksum" finds damage. "identity" also computes the digest of each content that this process has not
            verified yet: for servers that share tensors between tenants by it.
        damaged: makes the error for a tensor whose bytes are not those that were stored.
        dtype: type that floating tensors get while they are copied from the staging buffers, as ``Tensor.to`` makes it;
            None: the one that is stored. All else keeps its own.

    Raises:
        DataError: a tensor is damaged; the message names it and its place.
        NotFoundError: an object is missing.
        StoreError: the store failed, or an object is too short.
        HostMemoryError: the system has no memory for the tensors.
    """
    if verify not in (CHECKSUM, IDENTITY):
        raise UsageError(f"verify: {verify!r} is neither {CHECKSUM!r} nor {IDENTITY!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(
            f"dtype: {dtype} is no floating type; integers and truth values are loaded as they are"
        )
    how = _Checked(verify == IDENTITY, damaged)
    return _tensors(_Load(source, entries, torch.device(device), pool or process_pool(), how, dtype))


def verified(entry: TensorEntry, raw: torch.Tensor, damaged: Damaged) -> torch.Tensor:
    """Return the tensor of ``entry`` in the memory that its bytes came into, after a check of its digest.

    Args:
        entry: the tensor.
        raw: its bytes, uint8 [nbytes], on the CPU.
        damaged: makes the error for other bytes.

    Raises:
        DataError: as ``damaged`` makes it.
    """
    check = ContentCheck(entry.nbytes, entry.checksum, entry.digest)
    if entry.nbytes and not (check.add(0, tensor_bytes(raw)) and check.is_sound):
        raise damaged(entry)
    return _formed(entry, raw)


def traits_of(source: RangeSource, whole_bytes: int = 0) -> ReadTraits:
    """Return how ``source`` is best read: a local file by every processor, others by as many requests as they take.

    Args:
        source: that is read.
        whole_bytes: bytes of the load if its ranges need not fit into staging buffers. Servers are then asked for long
            ranges, as each request takes them time, but for enough to keep every connection busy.
    """
    if not isinstance(source, ObjectStore):
        share = whole_bytes // (2 * PARALLEL) // STAGE_BYTES * STAGE_BYTES
        return ReadTraits(min(max(share, STAGE_BYTES), SLICE_BYTES), PARALLEL, GAP_BYTES)
    if source.local_path("packs") is None:
        return ReadTraits(STAGE_BYTES, PARALLEL_REQUESTS, COALESCE_GAP)
    return ReadTraits(LOCAL_RANGE_BYTES, processor_count(), None)


def plan_of(entries: Sequence[TensorEntry], traits: ReadTraits) -> ReadPlan:
    """Return the plan that :func:`load` follows for ``entries``, with the bytes that it moves."""
    return plan_reads((Wanted(e.pack, e.start, e.nbytes, e.digest, e.checksum) for e in entries), traits)


class _Checked(NamedTuple):
    """Checks of a load."""

    identity: bool
    damaged: Damaged | None


class _Load:
    """One load before it begins: its plan, where its bytes go, and how they are checked."""

    def __init__(
        self,
        source: RangeSource,
        entries: Sequence[TensorEntry],
        device: torch.device,
        pool: LoadingPool,
        checked: _Checked,
        dtype: torch.dtype | None,
    ) -> None:
        whole_bytes = sum(e.nbytes for e in entries) if device.type == "cpu" and dtype is None else 0
        traits = traits_of(source, whole_bytes)
        self.source = source
        self.entries = entries
        self.device = device
        self.pool = pool
        self.plan = plan_of(entries, traits)
        self.dtype = dtype
        self.converted = {} if dtype is None else _conversions(entries, self.plan, dtype)
        """New types of contents that are converted on their way, by their numbers."""
        self.landing = landing(self.plan, pool, device, self.converted)
        self.identities: list[Identity | None] = [
            (source.url, content.pack, content.start, content.digest) if checked.identity else None
            for content in self.plan.contents
        ]
        alone = traits.gap_bytes is None and self.plan.needed <= ALONE_BYTES
        self.readers = 1 if alone else max(1, min(traits.readers, len(self.plan.ranges)))
        self._damaged = checked.damaged or self._damage

    def begin(self) -> Readers:
        """Return the readers, after a look whether the objects are as long as they should be."""
        if isinstance(self.source, ObjectStore):
            _check_sizes(self.source, self.plan)
        checks = [
            ContentCheck(content.nbytes, content.checksum, self._unverified(identity))
            for content, identity in zip(self.plan.contents, self.identities, strict=True)
        ]
        return Readers(self.source, self.plan, self.landing, checks, self._error)

    def _unverified(self, identity: Identity | None) -> str | None:
        """The digest that is still to be verified. Packs of a store never change; what a server sends may."""
        if identity is None or (isinstance(self.source, ObjectStore) and identity in VERIFIED):
            return None
        return identity[-1]

    def _error(self, content: int) -> HapiError:
        return self._damaged(self.entries[self.plan.content_of.index(content)])

    def _damage(self, entry: TensorEntry) -> HapiError:
        return DataError(
            f"{self.source.url}/{entry.pack}: the stored bytes of tensor {entry.name!r} (from byte {entry.start}) "
            "are damaged; push the model again"
        )


def _conversions(entries: Sequence[TensorEntry], plan: ReadPlan, dtype: torch.dtype) -> dict[int, Conversion]:
    """Contents that are of one other floating type, whoever wants them; bytes of several types are converted later."""
    found: dict[int, set[torch.dtype]] = {}
    for entry, number in zip(entries, plan.content_of, strict=True):
        found.setdefault(number, set()).add(DTYPES[entry.dtype])
    only = {number: min(types, key=str) for number, types in found.items() if len(types) == 1}
    return {
        number: Conversion(old, dtype)
        for number, old in only.items()
        if old.is_floating_point and old != dtype
    }


def _check_sizes(store: ObjectStore, plan: ReadPlan) -> None:
    """Raise :class:`StoreError` for an object that cannot hold a large tensor, before memory is taken for it."""
    ends: dict[str, int] = {}
    for content in plan.contents:
        if content.nbytes > MAX_TRUSTED_BYTES:
            ends[content.pack] = max(ends.get(content.pack, 0), content.start + content.nbytes)
    for pack, end in ends.items():
        if (size := store.size(pack)) < end:
            raise StoreError(f"{store.url}/{pack} has {size} bytes, {end} or more are needed")


def _tensors(job: _Load) -> Generator[Loaded, None, None]:
    uses = Counter(job.plan.content_of)
    shared: dict[int, torch.Tensor] = {}
    """Contents that later entries need too."""
    try:
        with closing(job.begin().ready(job.readers)) as ready:
            for entry, number in zip(job.entries, job.plan.content_of, strict=True):
                raw = shared.pop(number, None)
                if raw is None:
                    raw = _content(job, next(ready))
                uses[number] -= 1
                if uses[number]:  # the last one gets the original, which nobody could change until then
                    shared[number] = raw
                    raw = _copy(raw, job.pool)
                yield entry, _typed(job, number, entry, raw)
                del raw
    finally:
        job.landing.close()


def _content(job: _Load, number: int) -> torch.Tensor:
    """The verified bytes of a content that is ready."""
    identity = job.identities[number]
    if identity is not None:
        VERIFIED.add(identity)
    if not job.plan.contents[number].nbytes:
        return torch.empty(0, dtype=torch.uint8, device=job.device)
    return job.landing.content(number)


def _formed(entry: TensorEntry, raw: torch.Tensor) -> torch.Tensor:
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def _typed(job: _Load, number: int, entry: TensorEntry, raw: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that was asked for."""
    if number in job.converted:
        return raw.view(job.converted[number].new).reshape(entry.shape)
    tensor = _formed(entry, raw)
    return tensor.to(job.dtype) if job.dtype is not None and tensor.is_floating_point() else tensor


def _copy(raw: torch.Tensor, pool: LoadingPool) -> torch.Tensor:
    return pool.take(raw.numel()).copy_(raw) if raw.device.type == "cpu" else raw.clone()
