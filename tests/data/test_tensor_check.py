"""Stored tensors: values that are not finite are refused when they are packed, and told of when they are verified."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hapi.data.index import SampleIndex, digest
from hapi.data.index_file import read_index
from hapi.data.manifest import SampleLayout, load_manifest
from hapi.data.shards import MAX_SHARD_SIZE, Shard, ShardTable
from hapi.data.tensor_check import tensor_check
from hapi.data.verify import verify_dataset
from hapi.errors import DataError
from hapi.ingest import pack as packing
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.base import Source
from hapi.ingest.sources.open import open_source
from hapi.store.open import open_store


def arrays(folder: Path, dtype: str, value: float) -> Source:
    """20 samples, of which number 7 has a ``value`` in it."""
    samples = np.random.default_rng(0).random((20, 3, 4)).astype(dtype)
    samples[7, 1, 2] = value
    np.savez(folder / "xy.npz", x=samples, y=np.arange(20) % 3)
    return open_source(str(folder / "xy.npz"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(tmp_path: Path, dtype: str, value: float) -> None:
    source, store = arrays(tmp_path, dtype, value), open_store(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(DataError, match=r"xy\.npz, sample 7 holds a value that is not finite .*--skip-bad"):
        pack(source, store, "d")
    left = pack(source, store, "d", PackOptions(skip_bad=True))
    assert left.count == 19 and left.skipped == 1 and verify_dataset(store, "d").sound


def test_verify_tells_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset that was packed by an earlier version, or elsewhere."""
    source, store = arrays(tmp_path, "float32", float("nan")), open_store(f"memory://{uuid.uuid4().hex}")
    with monkeypatch.context() as patched:
        patched.setattr(packing, "tensor_check", lambda layout: lambda data: None)
        pack(source, store, "d")
    report = verify_dataset(store, "d")
    (damage,) = report.damages
    assert damage.sample == 7 and "not finite" in str(damage) and report.samples == 20


def test_bytes_of_another_length() -> None:
    check = tensor_check(SampleLayout(kind="tensor", sample_shape=(2, 3), sample_dtype="float16"))
    assert check(memoryview(bytes(12))) is None
    assert check(memoryview(bytes(11))) == "has 11 bytes, a tensor of this dataset has 12"
    assert tensor_check(SampleLayout(kind="encoded"))(memoryview(b"")) is None


def test_largest_floats_are_finite(tmp_path: Path) -> None:
    source = arrays(tmp_path, "float64", float(np.finfo(np.float64).max))
    assert pack(source, open_store(f"memory://{uuid.uuid4().hex}"), "d").count == 20


def test_a_shard_that_claims_to_be_huge_is_verified_at_once(tmp_path: Path) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    pack(arrays(tmp_path, "float32", 0.5), store, "d")
    manifest = load_manifest(store, "d")
    index = read_index(store, manifest)
    shard = index.shards[0]
    huge = ShardTable.of([Shard(key=shard.key, size=MAX_SHARD_SIZE, checksum=0, count=shard.count)])
    index.directory.entries["offset"][-1] = MAX_SHARD_SIZE - 4096
    forged = SampleIndex(index.directory, index.label, index.checksum, huge)
    data = forged.to_bytes()
    store.put(manifest.index_key, data)
    changed = replace(manifest, index_size=len(data), index_xxh3=digest(data), total_bytes=MAX_SHARD_SIZE)
    store.put("datasets/d/manifest.json", changed.to_bytes())
    began = time.monotonic()
    report = verify_dataset(store, "d")
    assert time.monotonic() - began < 200 and report.damages[-1].problem == "cut off"
