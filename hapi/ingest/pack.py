"""``hapi pack``: a source becomes shards, index and manifest. Resumable, atomic, one writer at a time."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import xxhash

from hapi.arrays import IntArray
from hapi.data.chunk_checksums import run_sums
from hapi.data.index import SampleIndex
from hapi.data.manifest import Manifest, SampleLayout
from hapi.data.replaced import KEEP_OLD_SECONDS
from hapi.data.sample_directory import MAX_SAMPLE_BYTES, SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.data.tensor_check import tensor_check
from hapi.data.transforms.decode import check_image, decode_image
from hapi.data.transforms.pipeline import check_resize, input_batch, input_shape, resize_and_crop
from hapi.errors import BadRequestError, DataError, UsageError
from hapi.ingest.pack_options import PackOptions, Preprocess, select
from hapi.ingest.skipped import Skipped
from hapi.ingest.sources.base import Source
from hapi.ingest.transaction import PackFolder, Packing, shard_name, write_dataset
from hapi.store.base import ObjectStore
from hapi.wire.documents import parse_document
from hapi.wire.references import TransformSpec
from hapi.wire.samples import Samples, offsets_of

Progress = Callable[[int, int], None]
"""Called with the samples and bytes since the last call."""
Start = Callable[[int, int, int], None]
"""Called before the first sample: number of all samples, and samples and bytes that an earlier run completed.
"""


_REMEDY = "repair or remove it and begin anew (--restart), or pass --skip-bad to leave bad samples out"


@dataclass
class _Gathered:
    """The samples of the shard to come."""

    data: bytearray = field(default_factory=bytearray)
    numbers: list[int] = field(default_factory=list)
    """Numbers of the samples in the source."""
    sizes: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    """Samples left out since the last shard."""

    def add(self, number: int, data: bytes | memoryview) -> None:
        self.data += data
        self.numbers.append(number)
        self.sizes.append(len(data))
        self.sums.append(xxhash.xxh3_64_intdigest(data))


def pack(
    source: Source,
    store: ObjectStore,
    name: str,
    options: PackOptions | None = None,
    *,
    replace: bool = False,
    restart: bool = False,
    force_lock: bool = False,
    keep_old: float = KEEP_OLD_SECONDS,
    on_start: Start = lambda total, samples, size: None,
    on_progress: Progress = lambda samples, size: None,
    on_skipped: Callable[[Skipped], None] = lambda skipped: None,
) -> Manifest:
    """Pack ``source`` into ``STORE/datasets/name``, going on with an unfinished packing of the same.

    Args:
        source: the samples.
        store: where they are written.
        name: the dataset's name.
        options: what is packed and how.
        replace: replace the dataset of this name; readers see the old one until the new one is whole.
        restart: throw an unfinished packing away.
        force_lock: take the lock of another writer that is known to be dead.
        keep_old: seconds for which a replaced version stays readable for jobs that name it.
        on_start: told all samples, and samples and bytes that an earlier run completed.
        on_progress: told samples and bytes since its last call.
        on_skipped: told at the end the samples that were left out, with ``options.skip_bad``.

    Raises:
        ConflictError: the name is taken, is being packed by another process, or is half packed from something
            else.
        DataError: a bad sample, unless ``options.skip_bad``.
    """
    options = (options or PackOptions()).checked()
    packer = _Packer(source, options, select(source.count, options))
    fingerprint = packer.fingerprint()
    manifest = write_dataset(
        store,
        name,
        source.description,
        fingerprint,
        lambda folder, packing: packer.run(folder, packing, on_start, on_progress),
        whole=fingerprint,
        replace=replace,
        restart=restart,
        force_lock=force_lock,
        keep_old=keep_old,
    )
    on_skipped(packer.skipped)
    return manifest


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
        self._problem = tensor_check(self.layout)
        self.skipped = Skipped()
        self.skipped.add(source.unmatched)
        # Here, and not in the middle of a training: does this transform fit these samples, and can both be noted down?
        input_shape(self.layout, self.transform)
        try:
            SampleLayout.from_json(self.layout.to_json())
            if self.transform is not None:
                TransformSpec.from_json(self.transform.to_json())
        except BadRequestError as error:
            raise UsageError(f"{source.description} cannot be packed: {error}") from None

    def fingerprint(self) -> str:
        """Digest of everything that decides the stored bytes; an unfinished packing with another one is begun
        anew.
        """
        options = {k: v for k, v in asdict(self.options).items() if k not in ("workers", "skip_bad")}
        options["transform"] = None if self.options.transform is None else self.options.transform.to_json()
        transform = None if self.transform is None else self.transform.to_json()
        state = xxhash.xxh3_128(
            json.dumps([options, transform, self.layout.to_json()], sort_keys=True).encode()
        )
        state.update(self.source.fingerprint().encode())
        return state.hexdigest()

    def run(self, folder: PackFolder, packing: Packing, on_start: Start, on_progress: Progress) -> Manifest:
        """Write what is missing of the shards, then the index; the manifest is returned, not written."""
        parts, first = self._resume(folder)
        on_start(len(self.chosen), first, sum(part.shards.total_bytes for part in parts))
        gathered, done = _Gathered(), first

        def flush() -> None:
            """Write what has gathered as the next shard, with its part of the index."""
            nonlocal gathered
            part = self._part(len(parts), gathered)
            known = {"done": str(done), "skipped": json.dumps(gathered.skipped.to_json())}
            folder.write_shard(len(parts), memoryview(gathered.data), part, known)
            parts.append(part)
            self.skipped.add(gathered.skipped)
            gathered = _Gathered()

        for number, sample in self._samples(self.chosen[first:]):
            if isinstance(sample, DataError):
                if not self.options.skip_bad:
                    raise DataError(f"{sample}; {_REMEDY}") from sample
                gathered.skipped.add(Skipped(1, [str(sample)]))
                sample = b""
            else:
                if gathered.data and len(gathered.data) + len(sample) > self.options.shard_bytes:
                    flush()
                gathered.add(number, sample)
            done += 1
            on_progress(1, len(sample))
        if gathered.numbers:
            flush()
        self.skipped.add(gathered.skipped)
        if not parts:
            raise DataError(f"{self.source.description}: not one sample can be used; {self.skipped.lines[0]}")
        return folder.write_index(
            packing,
            SampleIndex.joined(parts),
            classes=self.source.classes,
            layout=self.layout,
            transform=self.transform,
            skipped=self.skipped.count,
            label_kind=self.source.label_kind,
        )

    def _part(self, number: int, gathered: _Gathered) -> SampleIndex:
        """The index of the shard ``number``."""
        lengths = np.array(gathered.sizes, dtype=np.int64)
        directory = SampleDirectory.empty(len(lengths))
        offsets = offsets_of(lengths)
        directory.write(0, 0, offsets[:-1], lengths)
        checksum = xxhash.xxh3_64_intdigest(gathered.data)
        size = len(gathered.data)
        shard = Shard(key=shard_name(number), size=size, checksum=checksum, count=len(lengths))
        return SampleIndex(
            directory=directory,
            label=self.source.labels[gathered.numbers],
            checksum=np.array(gathered.sums, dtype=np.uint64),
            shards=ShardTable.of([shard]),
            run=run_sums(gathered.data, offsets),
        )

    def _resume(self, folder: PackFolder) -> tuple[list[SampleIndex], int]:
        """The parts of the index of the completed shards, and how many of the chosen samples they are done with."""
        parts: list[SampleIndex] = []
        done = 0
        while (found := folder.read_shard(len(parts))) is not None:
            part, known = found
            try:
                skipped = Skipped.from_json(parse_document(known["skipped"].encode()))
                upto = int(known["done"])
            except (KeyError, ValueError):
                break  # of no packing of ours: made again from here on
            if upto != done + len(part) + skipped.count or upto > len(self.chosen):
                break
            if skipped.count and not self.options.skip_bad:
                break
            parts.append(part)
            self.skipped.add(skipped)
            done = upto
        return parts, done

    def _samples(self, numbers: IntArray) -> Iterator[tuple[int, bytes | memoryview | DataError]]:
        """Numbers and bytes of the samples in order, read by a few threads a little ahead; or what is wrong."""
        if not self.source.thread_safe or self.options.workers == 1:
            yield from map(self._tried, _ints(numbers))
            return
        with ThreadPoolExecutor(self.options.workers, thread_name_prefix="hapi-pack") as pool:
            waiting: deque[Future[tuple[int, bytes | memoryview | DataError]]] = deque()
            for read in (partial(self._tried, number) for number in _ints(numbers)):
                waiting.append(pool.submit(read))
                if len(waiting) >= 4 * self.options.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _tried(self, number: int) -> tuple[int, bytes | memoryview | DataError]:
        try:
            return number, self._sample(number)
        except DataError as error:
            return number, error

    def _sample(self, number: int) -> bytes | memoryview:
        data = self.source.sample(number)
        try:
            if self.options.preprocess != "none":
                data = self._preprocessed(data)
            elif self.layout.kind == "encoded":
                if self.options.decode:
                    image = decode_image(bytes(data))
                    if self.transform is not None:
                        check_resize(image, self.transform)
                else:
                    check_image(bytes(data))
        except DataError as error:
            raise DataError(f"{self.source.describe(number)}: {error}") from error
        if not len(data):
            raise DataError(f"{self.source.describe(number)} has no bytes")
        problem = self._problem(memoryview(data))
        if problem is not None:
            raise DataError(f"{self.source.describe(number)} {problem}")
        if len(data) > MAX_SAMPLE_BYTES:
            raise DataError(f"{self.source.describe(number)} has {len(data)} bytes; 4 GiB is the most")
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
        try:
            batch = input_batch(one, self.source.layout, transform)
        except DataError as error:
            raise DataError(str(error.__cause__)) from error  # without a number that is not the source's
        return batch.numpy().reshape(-1).view(np.uint8).data


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
