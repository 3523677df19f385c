"""``hapi index``: foreign files in the store become a dataset where they are, without a copy.

Every shard is read once: its samples' locations, labels and checksums go into an index under
``datasets/NAME``, and the manifest names the folder of the shards. Nothing is ever written, moved or removed
there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import xxhash

from hapi.data.index import SampleIndex
from hapi.data.manifest import InPlace, Manifest, SampleLayout, dataset_prefix
from hapi.data.replaced import KEEP_OLD_SECONDS
from hapi.data.shard_marks import write_marks
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import DataError, UsageError
from hapi.ingest.formats.shard import Fields
from hapi.ingest.in_place.discover import Folder
from hapi.ingest.in_place.labels import checked_classes, merged
from hapi.ingest.in_place.scan import Run, RunScanner, Scanned, runs_of
from hapi.ingest.labels.matching import LabelledFiles, names_of
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.labels.values import Labels
from hapi.ingest.skipped import Skipped
from hapi.ingest.sources.arrays import in_order, read_labels
from hapi.ingest.transaction import PackFolder, Packing, write_dataset
from hapi.store.base import ObjectStore
from hapi.wire.labels import LabelKind
from hapi.wire.references import TransformSpec

LOCAL_WORKERS, REMOTE_WORKERS = 2, 8
"""Threads for a local and a remote store. In a local folder one thread indexes 510 MB/s of tar shards, two
540, eight 460: they compete for Python's lock (8,000 JPEGs of 48 KB, two cores). Over a network eight wait
for the store at the same time.
"""
_LAYOUT = SampleLayout(kind="encoded")


@dataclass(frozen=True, kw_only=True)
class IndexOptions(LabelOptions):
    """Options of an indexing.

    >>> import hapi, pathlib, PIL.Image
    >>> for kind in ("cat", "dog"):
    ...     pathlib.Path("store/pets", kind).mkdir(parents=True)
    ...     PIL.Image.new("RGB", (32, 32)).save(f"store/pets/{kind}/1.png")
    >>> options = hapi.IndexOptions(classes=("bird", "cat", "dog"), decode=True, skip_bad=True)
    >>> hapi.index("pets", "store/pets-indexed", options).classes
    ('bird', 'cat', 'dog')
    """

    fields: Fields = field(default_factory=Fields)
    classes: tuple[str, ...] | None = None
    """Names of the classes; default: the labels that are names, sorted, or the labels' numbers."""
    transform: TransformSpec | None = None
    decode: bool = False
    """Decode every image; otherwise only its beginning is checked."""
    skip_bad: bool = False
    """Leave bad samples out and count them; otherwise the first one is an error."""
    workers: int | None = None
    """Threads that read shards; None: ``LOCAL_WORKERS`` or ``REMOTE_WORKERS``."""


@dataclass(frozen=True)
class Indexed:
    """Result of an indexing; ``skipped`` is known unless the dataset was finished before."""

    manifest: Manifest
    skipped: Skipped


def index_folder(
    store: ObjectStore,
    name: str,
    folder: Folder,
    options: IndexOptions,
    *,
    replace: bool = False,
    restart: bool = False,
    force_lock: bool = False,
    keep_old: float = KEEP_OLD_SECONDS,
    on_start: Callable[[int, int], None] = lambda samples, size: None,
    on_progress: Callable[[int, int], None] = lambda samples, size: None,
) -> Indexed:
    """Index ``folder`` (of ``find_folder``) as the dataset ``name``, going on with an unfinished indexing.

    Args:
        store: where the shards lie and the index is written.
        name: the dataset's name.
        folder: the shards.
        options: fields, labels, classes and the transform.
        replace: replace the dataset of this name.
        restart: throw an unfinished indexing away.
        force_lock: take the lock of another writer that is known to be dead.
        keep_old: seconds for which a replaced version stays readable.
        on_start: told samples and bytes that an earlier run completed.
        on_progress: told samples and bytes since its last call.

    Raises:
        DataError: a bad sample, unless ``options.skip_bad``; the message names shard and sample.
    """
    dataset_prefix(name)
    input_shape(_LAYOUT, options.transform or TransformSpec())
    options.checked()
    if options.labels is None and options.label_kind != "auto":
        raise UsageError("--label-kind is for a file of labels; give it with --labels FILE")
    labels = _given_labels(store, folder, options)
    indexer = _Indexer(store, folder, options, labels, on_progress)
    skipped = Skipped()

    def make(target: PackFolder, packing: Packing) -> Manifest:
        """Index the folder within the dataset's transaction."""
        parts = indexer.run(target, on_start)
        for part in parts:
            skipped.add(part.skipped)
        index, classes, kind = _whole(folder, parts, labels, options)
        below = len(folder.prefix) + 1 if folder.prefix else 0
        write_marks(store, target.prefix, index.shards, folder.shards, below)
        return target.write_index(
            packing,
            index,
            classes=classes,
            layout=_LAYOUT,
            transform=options.transform or TransformSpec(),
            in_place=InPlace(format=folder.module.NAME, folder=folder.prefix),
            skipped=skipped.count,
            label_kind=kind,
        )

    manifest = write_dataset(
        store, name, f"{folder.title} ({folder.module.NAME})", indexer.fingerprint(), make,
        whole=indexer.whole(), replace=replace, restart=restart, force_lock=force_lock,
        keep_old=keep_old,
    )  # fmt: skip
    return Indexed(manifest, skipped)


def _given_labels(store: ObjectStore, folder: Folder, options: IndexOptions) -> Labels | LabelledFiles | None:
    """The labels in a file: of all samples in their order, or by the samples' names; None for the shards' own."""
    if options.labels is None:
        return None
    if options.table is None:
        return in_order(read_labels(options), options, options.classes, f"--labels {options.labels}")
    where = "/".join(filter(None, (store.url, folder.prefix)))
    roots = (where,) if "://" in where else names_of(where)
    table = LabelledFiles.read(options, options.classes, roots)
    if folder.module.NAME == "objects":  # each sample's name is known before anything is read
        below = len(folder.prefix) + 1 if folder.prefix else 0
        found = [(info.key[below:], table.row_of(info.key[below:])) for info in folder.shards]
        rows = np.array([row for _, row in found if row is not None], dtype=np.int64)
        without = [name for name, row in found if row is None]
        if not len(rows):
            raise table.no_match(without[0], folder.title)
        if not options.skip_unmatched:
            table.check_files(len(without), without[0] if without else "", folder.title)
            table.check_rows(rows, folder.title)
    return table


def _whole(
    folder: Folder,
    parts: Sequence[Scanned],
    labels: Labels | LabelledFiles | None,
    options: IndexOptions,
) -> tuple[SampleIndex, tuple[str, ...], LabelKind]:
    """The index of all parts with its final labels, the classes, and the labels' kind."""
    found = [part for part in parts if part.index is not None]
    if not found:
        raise DataError(
            f"not one sample in {len(folder.shards)} {folder.module.NAME} shards can be used"
            + "".join(f"; {line}" for part in parts[:1] for line in part.skipped.lines[:1])
        )
    indexes = [part.index for part in found if part.index is not None]
    whole = SampleIndex.joined(indexes)
    if isinstance(labels, LabelledFiles):
        rows = whole.label.astype(np.int64)
        if not options.skip_unmatched and not any(part.skipped.count for part in parts):
            labels.check_rows(rows, folder.title)
        return replace(whole, label=labels.of(rows)), labels.labels.classes, labels.labels.kind
    if labels is None:
        numbers, classes = merged(
            [index.label.astype(np.int64) for index in indexes],
            [part.kind for part in found],
            [part.names for part in found],
            options.classes,
        )
        return replace(whole, label=numbers), classes, "single"
    if len(labels.values) != len(whole):
        raise UsageError(
            f"--labels {options.labels}: there are {len(labels.values)}, but {len(whole)} samples; "
            "give one for each sample, in the order of the shards"
        )
    if labels.kind != "single":
        return replace(whole, label=labels.values), labels.classes, labels.kind
    numbers = labels.values.astype(np.int64)
    return replace(whole, label=numbers), checked_classes(numbers, options.classes), "single"


class _StoppedError(Exception):
    """Another thread has failed, or the user has interrupted."""


class _Indexer:
    """Scans the runs of a folder with a few threads."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Folder,
        options: IndexOptions,
        labels: Labels | LabelledFiles | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._store, self._folder, self._options, self._labels = store, folder, options, labels
        self._fields = replace(options.fields, unlabelled=options.labels is not None)
        self._on_progress = on_progress
        self._guard = threading.Lock()
        self._stop = threading.Event()

    def fingerprint(self) -> str:
        """Digest of everything that decides a run's part of the index, beside its shards."""
        known = [self._folder.prefix, self._folder.module.NAME, asdict(self._fields), self._options.decode]
        if isinstance(self._labels, LabelledFiles):
            known += [self._labels.fingerprint(), self._options.skip_unmatched]
        return xxhash.xxh3_128_hexdigest(json.dumps(known).encode())

    def whole(self) -> str:
        """Digest of everything that decides the dataset."""
        options, labels = self._options, self._labels
        transform = (options.transform or TransformSpec()).to_json()
        known = [self.fingerprint(), options.classes, transform, options.skip_bad, labels is None]
        state = xxhash.xxh3_128(json.dumps(known, sort_keys=True).encode())
        for run in runs_of(self._folder.shards):
            state.update(run.key.encode())
        if labels is not None:
            known_labels = labels.labels if isinstance(labels, LabelledFiles) else labels
            state.update(np.ascontiguousarray(known_labels.values).data)
            if known_labels.kind != "single" or isinstance(labels, LabelledFiles):
                state.update(json.dumps([known_labels.kind, known_labels.classes]).encode())
        return state.hexdigest()

    def run(self, target: PackFolder, on_start: Callable[[int, int], None]) -> list[Scanned]:
        """Index of all runs, in their order; runs that an earlier indexing completed are taken over."""
        runs = list(runs_of(self._folder.shards))
        parts: dict[int, Scanned] = {}
        for number, run in enumerate(runs):
            part = Scanned.read(target, run)
            if part is not None and (self._options.skip_bad or part.skipped.count == 0):
                parts[number] = part
        on_start(
            sum(len(part.index) for part in parts.values() if part.index is not None),
            sum(info.size for number in parts for info in runs[number].shards),
        )
        local = self._store.local_path(runs[0].shards[0].key) is not None
        workers = self._options.workers or (LOCAL_WORKERS if local else REMOTE_WORKERS)
        with ThreadPoolExecutor(workers, thread_name_prefix="hapi-index") as pool:
            missing = [number for number in range(len(runs)) if number not in parts]
            futures = {number: pool.submit(self._one, target, runs[number]) for number in missing}
            try:
                _raise_first(futures)
            finally:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
        parts |= {number: future.result() for number, future in futures.items()}
        return [parts[number] for number in range(len(runs))]

    def _one(self, target: PackFolder, run: Run) -> Scanned:
        scanner = RunScanner(
            self._store,
            self._folder.prefix,
            self._folder.module,
            self._fields,
            decode=self._options.decode,
            skip_bad=self._options.skip_bad,
            table=self._labels if isinstance(self._labels, LabelledFiles) else None,
            skip_unmatched=self._options.skip_unmatched,
            alive=self._alive,
        )
        scanned = scanner.scan(run)
        scanned.write(target, run)
        return scanned

    def _alive(self, samples: int, size: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        with self._guard:
            self._on_progress(samples, size)


def _raise_first(futures: dict[int, Future[Scanned]]) -> None:
    """Wait until all are done, or one has failed: of those that have, the first in the order of the shards."""
    done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
    for future in futures.values():
        if future in done and (error := future.exception()) is not None:
            raise error
