"""What is fuzzed: readers of bytes that others wrote. A target takes any bytes; only a HapiError may come out of it.

Behind a checksum no mutation would get, so that a target that has one is given the content and makes the checksum
itself (``SEALED``). The first byte of such an input says whether it does: damaged checksums are inputs too.
"""

from __future__ import annotations

import itertools
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hapi.wire.samples import offsets_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fuzz_models  # noqa: F401  (registers its targets)
from fuzz_registry import TARGETS, attempt, seeds_of, target
from support.foreign_shards import example, masked_crc32c, mds_index, mds_shard, tfrecord
from support.formats_tools import samples, tar

from hapi.data.chunk_checksums import run_sums
from hapi.data.dataset import find_dataset
from hapi.data.index import SampleIndex, digest
from hapi.data.listing import describe
from hapi.data.manifest import Manifest, SampleLayout
from hapi.data.reading.chunk_cache import ChunkCache
from hapi.data.reading.reader import chunk_cache
from hapi.data.replaced import Replaced
from hapi.data.sample_directory import SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.errors import HapiError, from_problem
from hapi.ingest.formats import mds, webdataset
from hapi.ingest.formats import tfrecord as tfrecords
from hapi.ingest.formats.mds_index import listed_shards
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.ingest.in_place.scan import Run as RunOfShards
from hapi.ingest.in_place.scan import Scanned
from hapi.ingest.labels.matching import LabelledFiles
from hapi.ingest.labels.options import LabelOptions
from hapi.ingest.transaction import PackFolder, Packing
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.store.locking.locks import LockOwner
from hapi.store.open import open_store
from hapi.wire import messages
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import (
    PREFIX,
    TRAILER,
    FrameHeader,
    FrameLimits,
    StreamEnd,
    TensorSpec,
    byte_view,
    data_frame,
    end_frame,
    error_frame,
)
from hapi.wire.labels import LABEL_KINDS
from hapi.wire.report import RequestReport

__all__ = ["TARGETS", "attempt", "seeds_of"]

LIMITS = FrameLimits(header=1 << 16, payload=1 << 20)
RAW, SEALED = b"\0", b"\1"
"""First byte of an input whose checksums are as they come, or made right."""


@cache
def store() -> ObjectStore:
    return open_store("memory://fuzz")


@cache
def chunks() -> ChunkCache:
    return chunk_cache(store(), 1 << 20)


# -- the wire ------------------------------------------------------------------------------------------------


def _frame_seeds() -> list[bytes]:
    specs = (TensorSpec("features", "float32", (3, 2)), TensorSpec("labels", "int64", (3,)))
    header = FrameHeader(np.array([5, 0, 7]), specs)
    frame = b"".join(bytes(piece) for piece in data_frame(header, [bytes(24), bytes(24)]))
    ends = [end_frame(StreamEnd(frames, 3 * frames, {"wait": 1.0})) for frames in (0, 1)]
    error = error_frame(HapiError("no"))
    return [RAW + frame + ends[1], SEALED + frame + ends[1], SEALED + ends[0], SEALED + error, RAW + error]


@target(_frame_seeds)
def frames(data: bytes) -> None:
    stream = _sealed_frames(data[1:]) if data[:1] == SEALED else data[1:]
    reader = FrameReader(BufferSource(iter([stream])), LIMITS)
    while not isinstance(reader.next(_buffers), StreamEnd):
        pass


def _buffers(header: FrameHeader) -> list[memoryview]:
    assert sum(spec.nbytes for spec in header.tensors) <= LIMITS.payload
    return [byte_view(np.empty(spec.nbytes, np.uint8)) for spec in header.tensors]


def _sealed_frames(stream: bytes) -> bytes:
    """The stream with the right checksum behind each frame, as far as its lengths go."""
    out, at = bytearray(), 0
    while at + PREFIX.size <= len(stream):
        *_, header, payload = PREFIX.unpack_from(stream, at)
        stop = at + PREFIX.size + header + payload
        if stop + TRAILER.size > len(stream):
            break
        out += stream[at:stop] + TRAILER.pack(xxhash.xxh3_64_intdigest(stream[at:stop]))
        at = stop + TRAILER.size
    return bytes(out) + stream[at:]


REFERENCE = {"name": "digits", "version": "0" * 32}
TRANSFORM = {"resize": 73, "crop": 64, "mean": [0.5] * 3, "std": [0.5] * 3}
AUGMENTED = {
    **TRANSFORM,
    "seed": 7,
    "epoch": 3,
    "augment": {"scale": [0.1, 1.0], "ratio": [0.7, 1.3], "flip": 0.5},
}
PADDED = {**AUGMENTED, "augment": {"padding": 4, "hue": 0.1}}
MODEL = {"source": "zoo", "name": "resnet18", "weights": "random:0", "digest": "1" * 16, "blocks": ["a.b"]}
WINDOWS = {"seed": 0, "epoch": 1, "group": 512, "window": 64}


def _request_seeds() -> list[bytes]:
    extract = {"dataset": REFERENCE, "model": MODEL, "split": 4, "split_name": "maxpool", "ids": [1, 2, 3]}
    sequence = {"seed": 0, "epoch": 3, "shuffle": {"group": 5, "window": 6}}
    by_range = {"dataset": REFERENCE, "sequence": sequence, "start": 0, "stop": 9}
    found = [
        (0, {**extract, "transform": TRANSFORM}),
        (0, {**extract, "transform": AUGMENTED, "windows": WINDOWS, "time_layers": True}),
        (0, {**extract, "transform": PADDED, "job": "a1"}),
        (1, {"dataset": REFERENCE, "ids": [0], "windows": WINDOWS}),
        (1, by_range),
        (1, {**by_range, "sequence": {**sequence, "shuffle": "full"}}),
        (2, {"name": "pushed", "digest": "2" * 16, "names": ["a", "b"]}),
        (3, {"reference": REFERENCE, "count": 1, "classes": ["a"], "total_bytes": 1, "layout": {}, "transform": None,
             "group": 1, "window": 1}),
    ]  # fmt: skip
    return [bytes([kind]) + json.dumps(body).encode() for kind, body in found]


@target(_request_seeds)
def requests(data: bytes) -> None:
    kinds: tuple[Any, ...] = (messages.ExtractRequest, messages.SamplesRequest, messages.TensorsRequest,
                              messages.DatasetDescription)  # fmt: skip
    kind = kinds[data[0] % len(kinds)] if data else kinds[0]
    request = kind.from_json(messages.parse_body(data[1:]))
    told = json.dumps(request.to_json())
    assert json.dumps(kind.from_json(json.loads(told)).to_json()) == told


def _report_seeds() -> list[bytes]:
    tier = {"device": "cpu", "processors": 1, "threads": 1, "running": 1, "devices": 1, "reuse": True}
    pairs = {name: [0.0, 1.0] for name in ("busy", "work", "others", "process", "clock")}
    report = {"server": "a", "seconds": {"read": 1.0}, "cpu": {}, **pairs, "pages": 1, "first": 0.1, "cos_batch": 2,
              "layers": [0.1], "wait": 0.0, "tier": tier}  # fmt: skip
    return [json.dumps(report).encode(), json.dumps(HapiError("no", retry_after=1).to_problem()).encode()]


@target(_report_seeds)
def reports(data: bytes) -> None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    assert str(from_problem(document, 500)).isprintable()
    RequestReport.from_json(document).to_json()


# -- datasets -----------------------------------------------------------------------------------------------


def _index(lengths: list[int], shards: int = 1) -> SampleIndex:
    """An index of as many equal shards; sample and label counts fit."""
    offsets = offsets_of(np.array(lengths))
    parts = []
    for number in range(shards):
        directory = SampleDirectory.empty(len(lengths))
        directory.write(0, 0, offsets[:-1], lengths)
        body = bytes(sum(lengths))
        shard = Shard(
            key=f"shard-{number:05d}.bin",
            size=len(body),
            checksum=xxhash.xxh3_64_intdigest(body),
            count=len(lengths),
        )
        sums = [xxhash.xxh3_64_intdigest(bytes(length)) for length in lengths]
        parts.append(
            SampleIndex(
                directory=directory,
                label=np.arange(len(lengths), dtype=np.int64) % 2,
                checksum=np.array(sums, dtype=np.uint64),
                shards=ShardTable.of([shard]),
                run=run_sums(body, offsets),
            )
        )
    return SampleIndex.joined(parts)


def _manifest(index: bytes = b"1", count: int = 3, shards: int = 1, total: int = 9) -> Manifest:
    return Manifest(
        name="fuzzed", pack="p", count=count, classes=("a", "b"), layout=SampleLayout(kind="encoded"),
        transform=None, index_size=len(index), index_xxh3=digest(index), shards=shards, total_bytes=total,
        source="nowhere", created="today",
    )  # fmt: skip


def _manifest_seeds() -> list[bytes]:
    document = json.loads(_manifest().to_bytes())
    tensor = {"kind": "tensor", "sample_shape": [3, 8, 8], "sample_dtype": "uint8"}
    more = [
        document | tensor,
        document | {"transform": TRANSFORM, "in_place": {"format": "mds", "folder": "a/b"}},
    ]
    replaced = Replaced(_manifest(), 1e9).to_bytes()
    return [mark + json.dumps(one).encode() for mark in (RAW, SEALED) for one in (document, *more)] + [
        b"\2" + replaced
    ]


@target(_manifest_seeds)
def manifests(data: bytes) -> None:
    if data[:1] == b"\2":
        str(Replaced.from_bytes(data[1:], "fuzzed", "here"))
        return
    body = _with_version(data[1:]) if data[:1] == SEALED else data[1:]
    store().put("datasets/fuzzed/manifest.json", body)
    summary = describe(store(), "fuzzed")
    assert summary is not None and (summary.problem or "").isprintable()
    manifest = Manifest.from_bytes(body, "fuzzed", "here")
    assert Manifest.from_bytes(manifest.to_bytes(), "fuzzed", "here") == manifest


def _with_version(body: bytes) -> bytes:
    """With the version that its own content has, if it has any."""
    try:
        document = json.loads(body)
        version = Manifest._from_json(document).version
    except (HapiError, ValueError, RecursionError):
        return body
    return json.dumps({**document, "version": version}).encode()


def _index_seeds() -> list[bytes]:
    runs = _index([3] * 3, 2)
    without = SampleIndex(runs.directory, runs.label, runs.checksum, runs.shards)
    small = _index([3, 2, 4])
    return [bytes(index.to_bytes({"k": "v"})) for index in (small, runs, without)]


@target(_index_seeds)
def indexes(data: bytes) -> None:
    """A dataset with this index, its manifest as it belongs to it; every sample is read."""
    index, _ = SampleIndex.from_buffer(np.frombuffer(data, dtype=np.uint8), "here")
    manifest = _manifest(
        data, max(1, len(index)), max(1, len(index.shards)), max(1, index.shards.total_bytes)
    )
    store().put("datasets/fuzzed/manifest.json", manifest.to_bytes())
    store().put(manifest.index_key, data)
    for number in range(2):
        store().put(f"datasets/fuzzed/p/shard-{number:05d}.bin", bytes(9))
    dataset = find_dataset(store(), "fuzzed", cache=chunks())
    lengths = dataset.lengths(np.arange(dataset.count))
    dataset.read(np.flatnonzero(lengths < 1 << 16)[:100])


def _packing_seeds() -> list[bytes]:
    packing = Packing.new("file a", "0" * 32, "1" * 32).to_bytes()
    owner = LockOwner.new().to_bytes()
    run = json.dumps(["numbers", [], [0, []]])
    part = _index([3, 2, 4]).to_bytes({"done": "3", "skipped": "[0, []]", "run": run, "seal": "0"})
    return [b"\0" + packing, b"\1" + owner, b"\2" + bytes(part)]


@target(_packing_seeds)
def packings(data: bytes) -> None:
    """What an interrupted packing or indexing left: its description, its lock, a part of the index (sealed)."""
    body = data[1:]
    store().put("datasets/unfinished/packing.json", body)
    if data[:1] == b"\1":
        owner = LockOwner.from_bytes(body)
        assert str(owner) and LockOwner.from_bytes(owner.to_bytes()).lease == owner.lease
    if data[:1] != b"\2":
        Packing.load(store(), "unfinished")
        return
    lease: Any = None  # nothing is done that needs one
    folder = PackFolder(store(), "unfinished", "p", lease)
    index, metadata = SampleIndex.from_buffer(np.frombuffer(body, dtype=np.uint8), "here")
    metadata.pop("seal", None)
    folder.write_part("run-a", index, metadata)
    Scanned.read(folder, RunOfShards((), "a"))


# -- foreign formats -----------------------------------------------------------------------------------------


def _scanned(
    scan: Callable[[ShardBytes, Fields], Iterator[Found | Bad]], data: bytes, info: ObjectInfo | None = None
) -> None:
    """Scan a shard as ``hapi index`` does; each sample lies in it."""
    key = "folder/a" if info is None else info.key
    store().put(key, data)
    for fields in (Fields(), Fields(image="image", label="label")):
        shard = ShardBytes(store(), info or ObjectInfo(key, len(data)), "a")
        try:
            for item in scan(shard, fields):
                if isinstance(item, Found):
                    assert 0 <= item.offset <= item.offset + item.length <= len(data), item
            shard.checksum()
        except HapiError as error:
            assert str(error).isprintable()


def _tar_seeds() -> list[bytes]:
    members = [
        *samples(range(2)),
        ("y" * 60 + "/" + "x" * 60 + ".png", b"1"),
        ("ü.json", b'{"label": 1}'),
        ("d/e.txt", b"cat"),
    ]
    found = [tar(members, form) for form in (0, 1, 2)]
    return [_trimmed(data) for data in (*found, _trimmed(tar(samples([1]))) + tar(samples([2])))]


def _trimmed(archive: bytes) -> bytes:
    """Without most of the zeros at its end."""
    return archive[: -(-len(archive.rstrip(b"\0")) // 512) * 512 + 1024]


@target(_tar_seeds)
def tars(data: bytes) -> None:
    """With the right checksum in each header that is at a block's beginning, or as it comes."""
    _scanned(webdataset.scan, data)
    fixed = bytearray(data)
    for at in range(0, min(len(fixed), 64 * 512) - 511, 512):
        if fixed[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    _scanned(webdataset.scan, bytes(fixed))


def _record_seeds() -> list[bytes]:
    found = [
        {"image/encoded": b"jpeg", "image/class/label": 3},
        {"image": b"png", "label": [1, 2]},
        {"image/encoded": [b"a", b"b"], "image/class/text": b"cat", "f": 1.5},
    ]
    records = [example(one, packed=packed) for one in found for packed in (True, False)]
    return [SEALED + b"".join(struct.pack("<H", len(r)) + r for r in records), RAW + tfrecord(records)] + [
        SEALED + struct.pack("<H", len(r)) + r for r in records
    ]


@target(_record_seeds)
def tfrecord_files(data: bytes) -> None:
    """A file as it comes, or records behind their lengths (u16), which are made a file."""
    body = data[1:]
    if data[:1] == SEALED:
        out, at = bytearray(), 0
        while at + 2 <= len(body):
            (length,) = struct.unpack_from("<H", body, at)
            record = body[at + 2 : at + 2 + length]
            head = struct.pack("<Q", len(record))
            out += (
                head
                + struct.pack("<I", masked_crc32c(head))
                + record
                + struct.pack("<I", masked_crc32c(record))
            )
            at += 2 + length
        body = bytes(out)
    _scanned(tfrecords.scan, body)


def _table_seeds() -> list[bytes]:
    tables = [
        "path,y\na.png,cat\nb.png,dog\n",
        "a.png 1.0 mono\n",
        'f;y\r\n"a";1\r\n',
        "name\tx\ty\n1\t0\t1\n",
    ]
    return [text.encode() for text in tables] + [
        b'{"file": "a", "y": ["cat", "dog"]}\n',
        "f,y\né,1".encode("utf-16"),
    ]


@target(_table_seeds)
def label_tables(data: bytes) -> None:
    """A table of labels, as text and as JSON-lines, of every kind."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix, kind in itertools.product((".csv", ".jsonl"), LABEL_KINDS):
            path = Path(folder, f"t{suffix}")
            path.write_bytes(data)
            try:
                LabelledFiles.read(LabelOptions(labels=path, label_kind=kind), None).row_of("a.png")
            except HapiError as error:
                assert str(error).isprintable(), error


COLUMNS = {"image": "jpeg", "label": "int"}


def _mds_seeds() -> list[bytes]:
    found = []
    for columns, label in (
        (COLUMNS, 3),
        ({"image": "png", "label": "str"}, "cat"),
        ({"image": "bytes", "label": "uint8"}, 9),
    ):
        shard = mds_shard(columns, [{"image": b"jpeg%d" % n, "label": label} for n in range(3)])
        index = mds_index(columns, {"shard.00000.mds": shard}, hashes=("sha1", "xxh64"))
        found.append(struct.pack("<H", len(index)) + index + shard)
    return found


@target(_mds_seeds)
def mds_folders(data: bytes) -> None:
    """``index.json`` behind its length (u16), and a shard: the shard also by itself, as the index may refuse it."""
    length = int.from_bytes(data[:2], "little")
    index, shard = data[2 : 2 + length], data[2 + length :]
    store().put("mds/index.json", index)
    store().put("mds/shard.00000.mds", shard)
    _scanned(mds.scan, shard)
    listed = [ObjectInfo("mds/index.json", len(index)), ObjectInfo("mds/shard.00000.mds", len(shard))]
    for info in listed_shards(store(), "mds", listed):
        _scanned(mds.scan, shard, info)
