"""``hapi pack``: a source becomes shards, index and manifest. Resumable, atomic, one writer at a time."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

import numpy as np
import xxhash

from hapi.errors import ConflictError, DataError, UsageError
from hapi.storage.dataset import Samples
from hapi.storage.decode import check_image, decode_image
from hapi.storage.directory import MAX_SAMPLE_BYTES, offsets_of
from hapi.storage.index import SampleIndex, digest
from hapi.storage.listing import PACKING_NAME
from hapi.storage.manifest import Manifest, SampleLayout, Shard, dataset_prefix, load_manifest, manifest_key
from hapi.storage.objects import ObjectStore
from hapi.storage.pack_options import PackOptions, Preprocess, select
from hapi.storage.packing import LOCK_NAME, PackFolder, Packing, shard_name
from hapi.storage.sequence import IntArray
from hapi.storage.sources import Source
from hapi.storage.transform import input_batch, input_shape, resize_and_crop
from hapi.wire.references import TransformSpec

Progress = Callable[[int, int], None]
"""Called with the samples and bytes that were done since the last call."""
Start = Callable[[int, int, int], None]
"""Called before the first sample: how many there are, and samples and bytes that an earlier run completed."""


def pack(
    source: Source,
    store: ObjectStore,
    name: str,
    options: PackOptions | None = None,
    *,
    replace: bool = False,
    restart: bool = False,
    force_lock: bool = False,
    on_start: Start = lambda total, samples, size: None,
    on_progress: Progress = lambda samples, size: None,
) -> Manifest:
    """Pack ``source`` into ``STORE/datasets/name``, going on with an unfinished packing of the same.

    ``replace`` allows a data set of this name to be there already: readers see the old one until the new
    one is whole. ``restart`` throws an unfinished packing away. Raises :class:`ConflictError` when the name
    is taken, being packed by another process, or half packed from something else.
    """
    options = (options or PackOptions()).checked()
    prefix = dataset_prefix(name)
    with store.lock(f"{prefix}/{LOCK_NAME}", force=force_lock):
        packer = _Packer(source, options, select(source.count, options))
        folder, packing = _begin(store, name, packer, replace, restart)
        existing = _existing(store, name)
        if existing is None or existing.pack != packing.pack:
            manifest = packer.run(folder, packing, on_start, on_progress)
            store.put(manifest_key(name), manifest.to_bytes())
        else:
            manifest = existing
        folder.clean(keep=True)
    return manifest


def _existing(store: ObjectStore, name: str) -> Manifest | None:
    if not store.exists(manifest_key(name)):
        return None
    try:
        return load_manifest(store, name)
    except DataError:
        return None


def _begin(
    store: ObjectStore, name: str, packer: _Packer, replace: bool, restart: bool
) -> tuple[PackFolder, Packing]:
    """The packing to go on with, or a new one."""
    where = f"{store.url}/{name}"
    packing = None if restart else Packing.load(store, name)
    fingerprint = packer.fingerprint()
    if packing is not None and packing.fingerprint != fingerprint:
        raise ConflictError(
            f"{where} is half packed from another source or with other options ({packing.source}, begun "
            f"{packing.created}); run that command again, or pass --restart to begin anew"
        )
    finished = (
        packing is not None and (known := _existing(store, name)) is not None and known.pack == packing.pack
    )
    if store.exists(manifest_key(name)) and not replace and not finished:
        raise ConflictError(f"there is a data set {where} already; choose another name, or pass --replace")
    if packing is not None:
        store.clean_temporary(dataset_prefix(name))
        return PackFolder(store, name, packing.pack), packing
    now = datetime.now(UTC)
    pack_id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
    packing = Packing(
        pack=pack_id,
        fingerprint=fingerprint,
        source=packer.source.description,
        created=now.isoformat(timespec="seconds"),
    )
    store.put(f"{dataset_prefix(name)}/{PACKING_NAME}", packing.to_bytes())
    return PackFolder(store, name, pack_id), packing


class _Packer:
    """Reads the chosen samples of a source in order and lays them into shards."""

    def __init__(self, source: Source, options: PackOptions, chosen: IntArray) -> None:
        self.source = source
        self.options = options
        self.chosen = chosen
        transform = options.transform or source.transform
        if transform is None and source.layout.kind == "encoded":
            transform = TransformSpec()
        self.layout, self.transform = _stored_form(source.layout, transform, options.preprocess)
        self._input_transform = transform
        # Here, and not in the middle of a training: does this transform fit these samples?
        input_shape(self.layout, self.transform)

    def fingerprint(self) -> str:
        """Of all that decides what is stored: an unfinished packing with another one is begun anew."""
        options = {k: v for k, v in asdict(self.options).items() if k != "workers"}
        options["transform"] = None if self.options.transform is None else self.options.transform.to_json()
        transform = None if self.transform is None else self.transform.to_json()
        state = xxhash.xxh3_128(
            json.dumps([options, transform, self.layout.to_json()], sort_keys=True).encode()
        )
        state.update(self.source.fingerprint().encode())
        return state.hexdigest()

    def run(self, folder: PackFolder, packing: Packing, on_start: Start, on_progress: Progress) -> Manifest:
        """Write what is missing of the shards, then the index; the manifest is returned, not written."""
        index, shards, first = self._resume(folder)
        on_start(len(index), first, sum(shard.size for shard in shards))
        buffer = bytearray()
        sizes: list[int] = []
        sums: list[int] = []

        def flush() -> None:
            """Write what has gathered as the next shard, with its part of the index."""
            nonlocal buffer, first
            number = len(shards)
            shard = Shard(key=shard_name(number), size=len(buffer), xxh3=digest(buffer), count=len(sizes))
            stop = first + len(sizes)
            lengths = np.array(sizes, dtype=np.int64)
            index.directory.write(first, number, offsets_of(lengths)[:-1], lengths)
            index.checksum[first:stop] = np.array(sums, dtype=np.uint64)
            folder.write_shard(number, memoryview(buffer), shard, index.part(first, stop))
            shards.append(shard)
            first = stop
            buffer = bytearray()
            sizes.clear()
            sums.clear()

        for data in self._samples(self.chosen[first:]):
            if buffer and len(buffer) + len(data) > self.options.shard_bytes:
                flush()
            buffer += data
            sizes.append(len(data))
            sums.append(xxhash.xxh3_64_intdigest(data))
            on_progress(1, len(data))
        if sizes:
            flush()
        return self._finish(folder, packing, index, shards)

    def _resume(self, folder: PackFolder) -> tuple[SampleIndex, list[Shard], int]:
        """The index with the completed shards filled in, these shards, and the number of their samples."""
        index = SampleIndex.empty(len(self.chosen))
        index.label[:] = self.source.labels[self.chosen]
        shards: list[Shard] = []
        first = 0
        while (part := folder.read_part(len(shards))) is not None and first + part.shard.count <= len(index):
            stop = first + part.shard.count
            index.directory.entries[first:stop] = part.index.directory.entries
            index.checksum[first:stop] = part.index.checksum
            shards.append(part.shard)
            first = stop
        return index, shards, first

    def _finish(
        self, folder: PackFolder, packing: Packing, index: SampleIndex, shards: list[Shard]
    ) -> Manifest:
        encoded = index.to_bytes()
        manifest = Manifest(
            name=folder.name,
            pack=folder.pack,
            count=len(index),
            classes=self.source.classes,
            layout=self.layout,
            transform=self.transform,
            index_size=len(encoded),
            index_xxh3=digest(encoded),
            shards=tuple(shards),
            source=packing.source,
            created=packing.created,
        )
        folder.store.put(manifest.index_key, encoded)
        return manifest

    def _samples(self, numbers: IntArray) -> Iterator[bytes | memoryview]:
        """Bytes of the samples in order, read by a few threads a little ahead."""
        if not self.source.thread_safe or self.options.workers == 1:
            yield from map(self._sample, _ints(numbers))
            return
        with ThreadPoolExecutor(self.options.workers, thread_name_prefix="hapi-pack") as pool:
            waiting: deque[Future[bytes | memoryview]] = deque()
            for read in (partial(self._sample, number) for number in _ints(numbers)):
                waiting.append(pool.submit(read))
                if len(waiting) >= 4 * self.options.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _sample(self, number: int) -> bytes | memoryview:
        data = self.source.sample(number)
        try:
            if self.options.preprocess != "none":
                data = self._preprocessed(data)
            elif self.layout.kind == "encoded":
                check_image(data)
        except DataError as error:
            raise DataError(f"{self.source.describe(number)}: {error}; repair or remove it") from error
        if not len(data):
            raise DataError(f"{self.source.describe(number)} has no bytes; repair or remove it")
        if len(data) > MAX_SAMPLE_BYTES:
            raise UsageError(f"{self.source.describe(number)} has {len(data)} bytes; 4 GiB is the most")
        return data

    def _preprocessed(self, data: bytes | memoryview) -> memoryview:
        transform = self._input_transform or TransformSpec()
        if self.options.preprocess == "uint8":
            image = resize_and_crop(decode_image(bytes(data)), transform)
            return np.ascontiguousarray(image.numpy()).reshape(-1).data
        one = Samples(
            ids=np.zeros(1, dtype=np.int64),
            data=np.frombuffer(data, dtype=np.uint8),
            offsets=np.array([0, len(data)], dtype=np.int64),
            labels=np.zeros(1, dtype=np.int64),
        )
        return input_batch(one, self.source.layout, transform).numpy().reshape(-1).view(np.uint8).data


def _stored_form(
    layout: SampleLayout, transform: TransformSpec | None, preprocess: Preprocess
) -> tuple[SampleLayout, TransformSpec | None]:
    """Layout and remaining transform of what is stored."""
    if preprocess == "none":
        return layout, transform
    if layout.kind != "encoded" or transform is None:
        raise UsageError("--preprocess is for images; arrays are stored as they are")
    done = SampleLayout(kind="tensor", sample_shape=transform.output_shape, sample_dtype=preprocess)
    if preprocess == "float32":
        return done, None
    crop = transform.crop
    return done, TransformSpec(resize=crop, crop=crop, mean=transform.mean, std=transform.std)


def _ints(numbers: IntArray) -> Iterable[int]:
    """Python integers one at a time: 10 million at once would be objects by the hundred megabytes."""
    return (int(number) for number in numbers)
