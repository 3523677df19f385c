"""Runs of foreign shards: the unit that one thread scans, and that an interrupted indexing keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import xxhash

from hapi.data.index import SampleIndex
from hapi.data.sample_directory import MAX_SAMPLE_BYTES, SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.data.transforms.decode import check_image, decode_image
from hapi.errors import DataError, UsageError
from hapi.ingest.formats.registry import Format
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.ingest.in_place.labels import Kind, LabelBook, LabelError
from hapi.ingest.labels.matching import LabelledFiles
from hapi.ingest.skipped import Skipped
from hapi.ingest.transaction import PackFolder
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.text import printable
from hapi.wire.documents import parse_document

RUN_BYTES = 64 << 20
RUN_SHARDS = 1000
"""Most shards of a run: an interrupted indexing loses a few seconds of work."""


@dataclass(frozen=True)
class Run:
    """Consecutive shards; ``key`` stands for their names, sizes and marks of change."""

    shards: tuple[ObjectInfo, ...]
    key: str


@dataclass(frozen=True)
class Scanned:
    """Samples of a run; ``index`` is None when there is none, its labels are those of a LabelBook."""

    index: SampleIndex | None
    kind: Kind
    names: list[str]
    skipped: Skipped

    def write(self, folder: PackFolder, run: Run) -> None:
        """Store it for an indexing that goes on after an interruption."""
        if self.index is not None:
            document = [self.kind, self.names, self.skipped.to_json()]
            folder.write_part(f"run-{run.key}", self.index, {"run": json.dumps(document)})

    @classmethod
    def read(cls, folder: PackFolder, run: Run) -> Scanned | None:
        """Return the part that an earlier indexing stored of this run; None when there is none, or no whole
        one.
        """
        part = folder.read_part(f"run-{run.key}")
        if part is None:
            return None
        try:
            kind, names, skipped = parse_document(part[1]["run"].encode())
            if kind not in get_args(Kind) or not isinstance(names, list) or not all(map(_is_text, names)):
                return None
            return cls(part[0], kind, names, Skipped.from_json(skipped))
        except (KeyError, ValueError, TypeError):
            return None  # of no indexing of ours


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def runs_of(shards: Sequence[ObjectInfo]) -> Iterator[Run]:
    """Divide all shards, in their order, into runs."""
    gathered: list[ObjectInfo] = []
    size = 0
    for number, info in enumerate(shards):
        gathered.append(info)
        size += info.size
        if size >= RUN_BYTES or len(gathered) >= RUN_SHARDS or number == len(shards) - 1:
            text = json.dumps([[one.key, one.size, one.changed] for one in gathered])
            yield Run(tuple(gathered), xxhash.xxh3_128_hexdigest(text.encode()))
            gathered, size = [], 0


class RunScanner:
    """Scans one run. ``alive`` is called with samples and bytes for each sample and each block; it may raise."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        module: Format,
        fields: Fields,
        *,
        decode: bool,
        skip_bad: bool,
        alive: Callable[[int, int], None],
        table: LabelledFiles | None = None,
        skip_unmatched: bool = False,
    ) -> None:
        """Scan with ``module``; labels are rows of ``table``, or those of the samples if it is None."""
        self._store, self._module, self._fields = store, module, fields
        self._below = len(folder) + 1 if folder else 0
        self._check_image = decode_image if decode else check_image
        self._skip_bad, self._alive = skip_bad, alive
        self._table, self._skip_unmatched = table, skip_unmatched
        self._labels = LabelBook(fields.unlabelled)
        self._skipped = Skipped()
        self._positions: list[tuple[int, int, int]] = []
        """Shard, offset and length of each sample."""
        self._numbers: list[int] = []
        self._sums: list[int] = []
        self._shards: list[Shard] = []

    def scan(self, run: Run) -> Scanned:
        """Return all samples of the run; the first bad one is a :class:`DataError`, unless they are skipped."""
        for info in run.shards:
            self._scan_shard(ShardBytes(self._store, info, info.key[self._below :]))
        return Scanned(self._index(), self._labels.kind or "ignored", self._labels.names, self._skipped)

    def _scan_shard(self, shard: ShardBytes) -> None:
        first = len(self._positions)
        shard.watch(lambda block: self._alive(0, len(block)))
        for line in self._problems(shard):
            self._bad(line)
        try:
            checksum = shard.checksum()
        except DataError as error:
            self._bad(f"{error} (all of it is left out)" if self._skip_bad else str(error))
            self._forget(first)
            return
        count = len(self._positions) - first
        if count:
            path = shard.path
            self._shards.append(Shard(key=path, size=shard.size, checksum=checksum, count=count))

    def _problems(self, shard: ShardBytes) -> Iterator[str]:
        """Take the samples of a shard; a line for each that is bad, and for damage that ends the scan."""
        try:
            for item in self._module.scan(shard, self._fields):
                problem = item.problem if isinstance(item, Bad) else self._take(shard, item)
                if problem is None:
                    self._alive(1, 0)
                else:
                    yield f"shard {shard.name}, sample {printable(item.name)}: {problem}"
        except DataError as error:
            yield f"{error} (samples before that place are kept)" if self._skip_bad else str(error)

    def _take(self, shard: ShardBytes, found: Found) -> str | None:
        """Note a sample down; what is wrong with it, if anything is."""
        if found.length == 0:
            return "it has no bytes"
        if found.length > MAX_SAMPLE_BYTES:
            return f"it has {found.length} bytes; 4 GiB is the most"
        data = shard.read(found.offset, found.length)
        try:
            self._check_image(bytes(data))
        except DataError as error:
            return f"{error}; its first bytes are {bytes(data[:12])!r}"
        try:
            number = self._labels.add(found.label) if self._table is None else self._row(shard, found.name)
        except LabelError as error:
            return str(error)
        if number is None:
            return None
        self._positions.append((len(self._shards), found.offset, found.length))
        self._numbers.append(number)
        self._sums.append(xxhash.xxh3_64_intdigest(data))
        return None

    def _row(self, shard: ShardBytes, name: str) -> int | None:
        """The row of a sample in the table; None for one that is left out, since it has none."""
        table = self._table
        row = None if table is None else table.row_of(name)
        if table is None or row is not None:
            return row
        line = f"shard {shard.name}, sample {printable(name)}: has no row in {table.table.path}"
        if not self._skip_unmatched:
            raise UsageError(
                f"{line}, whose first file is {printable(table.table.files[0])}; add it, or pass --skip-unmatched to "
                "leave such samples out"
            )
        self._skipped.add(Skipped(1, [line]))
        return None

    def _bad(self, line: str) -> None:
        if not self._skip_bad:
            raise DataError(f"{line}; repair or remove it, or pass --skip-bad to leave bad samples out")
        self._skipped.add(Skipped(1, [line]))

    def _forget(self, first: int) -> None:
        for noted in (self._positions, self._numbers, self._sums):
            del noted[first:]

    def _index(self) -> SampleIndex | None:
        if not self._positions:
            return None
        shard, offset, length = np.array(self._positions, dtype=np.int64).T
        directory = SampleDirectory.empty(len(length))
        directory.write(0, shard, offset, length)
        return SampleIndex(
            directory=directory,
            label=np.array(self._numbers, dtype=np.int64),
            checksum=np.array(self._sums, dtype=np.uint64),
            shards=ShardTable.of(self._shards),
        )
