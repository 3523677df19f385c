"""Packing, reading and verifying, in one process and over local and memory stores."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from support.byte_source import SMALL, ByteSource
from support.stores import flip
from support.threads import at_once

from hapi.data.dataset import find_dataset
from hapi.data.index import SampleIndex, digest
from hapi.data.listing import list_datasets
from hapi.data.manifest import Manifest
from hapi.data.sample_directory import SampleDirectory
from hapi.data.transforms.pipeline import input_batch
from hapi.data.verify import verify_dataset
from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    NotFoundError,
    StoreError,
    UnprocessableError,
    UsageError,
)
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions, select
from hapi.ingest.sources.open import open_source
from hapi.ingest.sources.sklearn import ImageArraySource
from hapi.ingest.transaction import shard_name
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec


def test_pack_and_read(store: ObjectStore) -> None:
    source = ByteSource(500)
    manifest = pack(source, store, "d", SMALL)
    assert manifest.shards == 8 and manifest.count == 500 and manifest.total_bytes == 8000
    dataset = find_dataset(store, "d", manifest.version)
    ids = np.array([499, 0, 1, 2, 63, 64, 65, 0, 250])
    samples = dataset.read(ids)
    assert samples.ids.tolist() == ids.tolist() and samples.labels.tolist() == (ids % 4).tolist()
    assert np.array_equal(samples.data.reshape(-1, 16), source.values[ids])
    assert dataset.labels(ids).tolist() == (ids % 4).tolist() and dataset.lengths(ids).tolist() == [16] * 9
    assert samples.labels.dtype == samples.offsets.dtype == dataset.lengths(ids).dtype == np.int64
    assert len(dataset.read([])) == 0
    assert [i.key.rpartition("/")[2] for i in store.list("datasets/d") if "shard" not in i.key] == [
        "index.safetensors",
        "manifest.json",
    ]
    assert verify_dataset(store, "d").sound


@given(st.lists(st.binary(min_size=1, max_size=700), min_size=1, max_size=40), st.data())
def test_any_lengths_come_back(parts: list[bytes], data: st.DataObject) -> None:
    class Raw(ByteSource):
        def sample(self, number: int) -> bytes:
            return parts[number]

    store = open_store(f"memory://{uuid.uuid4().hex}")
    pack(Raw(len(parts)), store, "d", SMALL)
    ids = data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=60))
    samples = find_dataset(store, "d").read(np.array(ids, dtype=np.int64))
    assert [samples.sample(k).tobytes() for k in range(len(ids))] == [parts[i] for i in ids]
    assert verify_dataset(store, "d").sound


def test_a_sample_without_bytes_is_named_before_it_is_packed(store: ObjectStore) -> None:
    class Hollow(ByteSource):
        def sample(self, number: int) -> bytes:
            return b"" if number == 7 else super().sample(number)

    with pytest.raises(DataError, match=r"sample 7 .*has no bytes; repair or remove it"):
        pack(Hollow(10), store, "d", SMALL)
    with pytest.raises(NotFoundError):
        find_dataset(store, "d")


def rewritten(store: ObjectStore, change: Callable[[SampleIndex], None]) -> Manifest:
    """The dataset "d" with another index, its digest fitted: what no checksum can find."""
    manifest = pack(ByteSource(200), store, "d", SMALL, replace=True)
    index, _ = SampleIndex.from_buffer(np.frombuffer(store.get(manifest.index_key), dtype=np.uint8), "index")
    index = SampleIndex(
        SampleDirectory(index.directory.entries.copy()),
        index.label.copy(),
        index.checksum.copy(),
        index.shards,
    )
    change(index)
    encoded = index.to_bytes()
    manifest = replace(manifest, index_size=len(encoded), index_xxh3=digest(encoded))
    store.put(manifest.index_key, encoded)
    store.put("datasets/d/manifest.json", manifest.to_bytes())
    return manifest


def test_a_forged_index_is_one_error_with_file_shard_and_sample(store: ObjectStore) -> None:
    def sticking_out(index: SampleIndex) -> None:
        index.directory.entries["offset"][100] = 2000

    def hollow(index: SampleIndex) -> None:
        index.directory.entries["length"][100] = 0

    def strange_label(index: SampleIndex) -> None:
        index.label[100] = 4

    for change, message in (
        (sticking_out, "sample 100 in shard shard-00001.bin has bytes 2000..2016, but the shard only 1024"),
        (hollow, "sample 100 in shard shard-00001.bin has no bytes"),
        (strange_label, "sample 100 has label 4; expected the number of a class, 0 to 3"),
    ):
        manifest = rewritten(store, change)
        with pytest.raises(DataError) as raised:
            find_dataset(store, "d")
        assert manifest.index_key in str(raised.value) and message in str(raised.value)
        damages = verify_dataset(store, "d").damages
        assert len(damages) == 1 and message in str(damages[0])


def test_an_index_that_was_cut_off_is_told_by_its_size(store: ObjectStore) -> None:
    manifest = pack(ByteSource(20), store, "d", SMALL)
    store.put(manifest.index_key, store.get(manifest.index_key)[:-1])
    with pytest.raises(
        DataError, match=rf"has {manifest.index_size - 1} bytes instead of {manifest.index_size}"
    ):
        find_dataset(store, "d")


def test_a_data_set_of_an_older_version(store: ObjectStore) -> None:
    """Listed with what to do, opened and verified with one error, and packed again in its place."""
    pack(ByteSource(20), store, "d", SMALL)
    document = {**json.loads(store.get("datasets/d/manifest.json")), "format": 1}
    store.put("datasets/d/manifest.json", json.dumps(document).encode())
    advice = "format 1 is of an older Hapi, this one reads 3; pack the dataset again"
    with pytest.raises(DataError, match=advice):
        find_dataset(store, "d")
    (listed,) = list_datasets(store)
    assert listed.state == "damaged" and advice in str(listed.problem)
    assert [advice in str(damage) for damage in verify_dataset(store, "d").damages] == [True]
    pack(ByteSource(20), store, "d", SMALL, replace=True)
    assert verify_dataset(store, "d").sound


def test_places_of_samples(store: ObjectStore) -> None:
    pack(ByteSource(200), store, "d", SMALL)
    found = find_dataset(store, "d").locate([199, 0, 64, 65])
    assert found.shard.tolist() == [3, 0, 1, 1] and found.offset.tolist() == [112, 0, 0, 16]
    assert found.length.tolist() == [16] * 4


def test_samples_over_one_another_are_read_and_verified(store: ObjectStore) -> None:
    """Sample 1 is the shard's second half again, sample 2 lies before it and reaches into it."""
    source = ByteSource(200)

    def overlap(index: SampleIndex) -> None:
        whole = source.values[:64].tobytes()
        for number, (start, length) in {1: (512, 512), 2: (500, 100), 63: (0, 16)}.items():
            index.directory.write(number, 0, [start], [length])
            index.checksum[number] = xxhash.xxh3_64_intdigest(whole[start : start + length])

    rewritten(store, overlap)
    samples = find_dataset(store, "d").read([2, 1, 63, 3])
    whole = source.values[:64].tobytes()
    assert samples.data.tobytes() == whole[500:600] + whole[512:] + whole[:16] + whole[48:64]
    assert verify_dataset(store, "d").sound


def test_wrong_ids(store: ObjectStore) -> None:
    pack(ByteSource(10), store, "d", SMALL)
    dataset = find_dataset(store, "d")
    for ids in ([10], [-1], [0, 2**62], np.array([2**64 - 1], dtype=np.uint64)):
        for call in (dataset.read, dataset.labels, dataset.lengths):
            with pytest.raises(NotFoundError, match="it has 10, 0 to 9"):
                call(ids)
    for wrong in ([[1]], [1.5], ["1"], 3, [2**70]):
        with pytest.raises(UnprocessableError):
            dataset.read(wrong)


def test_versions_and_names(store: ObjectStore) -> None:
    manifest = pack(ByteSource(10), store, "d", SMALL)
    with pytest.raises(ConflictError, match=manifest.version):
        find_dataset(store, "d", "0" * 32)
    with pytest.raises(NotFoundError, match="there are d"):
        find_dataset(store, "e")
    for name in ("../d", "a/b", "", ".", "a\0", "x" * 200):
        with pytest.raises(HapiError):
            find_dataset(store, name)
        with pytest.raises(HapiError):
            pack(ByteSource(1), store, name)


def test_every_flipped_byte_is_found(store: ObjectStore) -> None:
    manifest = pack(ByteSource(200), store, "d", SMALL)
    for shard, position in ((0, 0), (1, 500), (3, 127)):
        key = f"datasets/d/{manifest.pack}/{shard_name(shard)}"
        flip(store, key, position)
        sample = shard * 64 + position // 16
        report = verify_dataset(store, "d")
        assert len(report.damages) == 1
        line = str(report.damages[0])
        start = position // 16 * 16
        assert f"sample {sample}" in line and key in line and f"{start}..{start + 16}" in line
        with pytest.raises(DataError, match=rf"'d'.*sample {sample} in shard shard-0000{shard}"):
            find_dataset(store, "d").read([0 if sample else 1, sample])
        flip(store, key, position)
    assert verify_dataset(store, "d").sound


@given(st.data())
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    pack(ByteSource(100), store, "d", SMALL)
    info = data.draw(st.sampled_from(store.list("datasets/d")))
    content = bytearray(store.get(info.key))
    position = data.draw(st.integers(0, len(content) - 1))
    line = content[content.rfind(b"\n", 0, position) + 1 :].split(b"\n")[0]
    # Where and when it was packed, and how many were left out, is no content: what no checksum is on.
    told = (b' "source"', b' "created"', b' "skipped"')
    assume(not info.key.endswith("manifest.json") or not line.startswith(told))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    store.put(info.key, bytes(content))
    assert not verify_dataset(store, "d").sound


def test_missing_cut_and_extra_objects(store: ObjectStore) -> None:
    manifest = pack(ByteSource(200), store, "d", SMALL)
    second = find_dataset(store, "d").shard_key(1)
    whole = store.get(second)
    store.put(second, whole[:100])
    report = verify_dataset(store, "d")
    assert "has 100 bytes instead of 1024" in str(report.damages[0])
    assert [d.sample for d in report.damages[1:]] == list(range(70, 128))
    with pytest.raises(DataError, match="100 bytes"):
        find_dataset(store, "d").read([80])
    store.put(second, whole + b"x")
    assert "1025" in str(verify_dataset(store, "d").damages[0])
    store.delete(second)
    assert "missing, with samples 64 to 127" in str(verify_dataset(store, "d").damages[0])
    with pytest.raises(DataError, match="gone"):
        find_dataset(store, "d").read([80])
    store.put(second, whole)
    store.put("datasets/d/other/shard-00000.bin", b"123")
    report = verify_dataset(store, "d")
    assert len(report.damages) == 1 and "belongs to nothing" in str(report.damages[0])
    store.put(manifest.index_key, store.get(manifest.index_key)[:-1])
    assert any("index.safetensors" in str(d) for d in verify_dataset(store, "d").damages)
    store.delete(manifest.index_key)
    with pytest.raises(DataError, match="missing"):
        find_dataset(store, "d")


def test_store_errors_stay_store_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    pack(ByteSource(10), store, "d", SMALL)
    dataset = find_dataset(store, "d")

    def dead(*_: object) -> None:
        raise StoreError("no answer")

    monkeypatch.setattr(store, "read_many", dead)
    with pytest.raises(StoreError, match="no answer"):
        dataset.read([1])


def test_threads_read_the_same(store: ObjectStore) -> None:
    source = ByteSource(300)
    pack(source, store, "d", SMALL)
    dataset = find_dataset(store, "d")

    def work(seed: int) -> None:
        for _ in range(20):
            ids = np.random.default_rng(seed).integers(0, 300, 50)
            assert np.array_equal(dataset.read(ids).data.reshape(-1, 16), source.values[ids])

    at_once(6, work)


def test_listing(store: ObjectStore) -> None:
    store.put("datasets/broken/manifest.json", b"{")
    pack(ByteSource(10), store, "d", SMALL)
    store.put("datasets/nothing/pack.lock", b"{}")
    found = {s.name: s.state for s in list_datasets(store)}
    assert found == {"broken": "damaged", "d": "whole"}


def images(count: int = 12) -> ImageArraySource:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 30, 20, 3), dtype=np.uint8)
    return ImageArraySource("images", pixels, np.zeros(count, dtype=np.int64), ("only",))


def test_preprocessed_tensors_give_the_same_input(store: ObjectStore) -> None:
    spec = TransformSpec.for_image_size(16)
    batches = []
    for kind in ("none", "uint8", "float32"):
        pack(images(), store, kind, PackOptions(transform=spec, preprocess=kind))  # type: ignore[arg-type]
        dataset = find_dataset(store, kind)
        assert dataset.kind == ("encoded" if kind == "none" else "tensor")
        batches.append(input_batch(dataset.read(range(12)), dataset.layout, dataset.transform))
    assert batches[0].equal(batches[1]) and batches[0].equal(batches[2])
    with pytest.raises(UsageError, match="--preprocess"):
        pack(ByteSource(3), store, "no", PackOptions(preprocess="uint8"))
    with pytest.raises(UnprocessableError, match="shape"):
        pack(ByteSource(3), store, "no", PackOptions(transform=spec))


def test_broken_image_is_named_before_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "bad.jpg").write_bytes(b"no image")
    source = open_source(str(tmp_path / "src"))
    for options in (PackOptions(), PackOptions(preprocess="uint8")):
        with pytest.raises(DataError, match=r"bad\.jpg.*repair"):
            pack(source, open_store(f"memory://{uuid.uuid4().hex}"), "d", options)


@given(st.integers(1, 400), st.floats(0.01, 0.99))
def test_parts_divide_the_source(count: int, fraction: float) -> None:
    parts: list[list[int]] = []
    for part in ("train", "validation"):
        try:
            parts.append(select(count, PackOptions(part=part, validation_fraction=fraction)).tolist())  # type: ignore[arg-type]
        except UsageError:
            parts.append([])
    assert sorted(parts[0] + parts[1]) == list(range(count))


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_limit_is_spread_evenly(count: int, limit: int) -> None:
    chosen = select(count, PackOptions(limit=limit))
    assert len(chosen) == min(limit, count) and chosen[0] == 0
    gaps = np.diff(chosen)
    assert len(gaps) == 0 or (gaps.max() - gaps.min() <= 1 and gaps.min() >= 1)


@pytest.mark.parametrize(
    "options",
    [{"shard_bytes": 1}, {"shard_bytes": 2**40}, {"limit": 0}, {"validation_fraction": 1.0}, {"workers": 0}],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pack(ByteSource(3), open_store("memory://wrong"), "d", PackOptions(**options))


def test_damaged_manifest_may_be_replaced(store: ObjectStore) -> None:
    pack(ByteSource(30), store, "d", SMALL)
    store.put("datasets/d/manifest.json", b"{")
    with pytest.raises(ConflictError, match="--replace"):
        pack(ByteSource(30), store, "d", SMALL)
    manifest = pack(ByteSource(30), store, "d", SMALL, replace=True)
    assert Manifest.from_bytes(store.get("datasets/d/manifest.json"), "d", "x") == manifest
