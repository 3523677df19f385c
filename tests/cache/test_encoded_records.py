"""Encoded records: they come back to the bit or not at all, take fewer bytes, and any process reads them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_tools import size
from support.disks import small_disk
from support.encoded_tools import ROW_BYTES, WIDE, WIDTH, encoded_at, found_rows, put_rows, rectified
from support.feature_tools import COUNT, KEY, labels

from hapi.arrays import Bytes, IntArray
from hapi.cache.feature_key import WireRounding
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.cache.inventory import count_records, verify
from hapi.codecs.choose import CodecFigures
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.names import AT_REST, EXACT, LOSSY, NONE
from hapi.codecs.rows import encode_rows
from hapi.wire.labels import SINGLE
from hapi.wire.samples import Samples

ALL = set(range(COUNT))


@pytest.mark.parametrize("codec", EXACT)
def test_what_one_codec_wrote_any_other_setting_reads(tmp_path: Path, codec: str) -> None:
    with encoded_at(tmp_path, codec) as cache:
        put_rows(cache, range(40))
        assert found_rows(cache) == set(range(40))
        assert cache._records.stored_bytes < 0.75 * 40 * ROW_BYTES
    for other in ("auto", NONE, *EXACT):
        for memory in (0, 1 << 20):
            with encoded_at(tmp_path, other, memory=memory) as cache:
                assert found_rows(cache) == found_rows(cache) == set(range(40))


def test_records_of_one_key_may_be_mixed(tmp_path: Path) -> None:
    """Two jobs fill one key from its two ends, each with a codec of its own."""
    caches = [encoded_at(tmp_path, codec) for codec in ("zeros+planes", "none")]

    def fill(cache: FeatureCache, order: list[int]) -> None:
        for start in range(0, COUNT, 4):
            put_rows(cache, order[start : start + 4])
            cache.flush()
            assert found_rows(cache) >= set(order[: start + 4])

    orders = list(range(COUNT)), list(range(COUNT))[::-1]
    threads = [threading.Thread(target=fill, args=both) for both in zip(caches, orders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    for cache in caches:
        cache.close()
    with encoded_at(tmp_path) as cache:
        assert found_rows(cache) == ALL
        lengths = cache._records.find(np.arange(COUNT)).length
        assert (lengths == ROW_BYTES).any() and (lengths < ROW_BYTES).any()
    (folder,) = tmp_path.glob("*@*")
    assert count_records(folder).records >= COUNT


def test_more_fits_into_the_same_budget(tmp_path: Path) -> None:
    held = {}
    for codec in ("none", "zeros+planes"):
        with encoded_at(tmp_path / codec, codec, budget=40_000) as cache:
            put_rows(cache, range(COUNT))
            held[codec] = len(found_rows(cache))
        assert size(tmp_path / codec) <= 40_000
    assert 0 < held["none"] < 0.7 * held["zeros+planes"] < COUNT


def test_what_does_not_shrink_is_raw(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(1, 256, (COUNT, ROW_BYTES)).astype(np.uint8)
    ids = np.arange(COUNT)
    with encoded_at(tmp_path, "zeros+planes") as cache:
        cache.put(ids, rows, labels(ids))
        lengths = cache._records.find(ids).length
        assert (lengths <= ROW_BYTES).all() and (lengths == ROW_BYTES).any()
        found, kept = np.empty_like(rows), np.empty(COUNT, np.int64)
        assert cache.read(ids, found, kept).all() and (found == rows).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_what_was_rounded_on_the_wire_is_kept_in_its_small_form(tmp_path: Path, codec: Any) -> None:
    """And comes back in every bit; what was not rounded stays raw."""
    ids, exact = np.arange(COUNT), rectified(np.arange(COUNT))
    rounded = np.concatenate([_rounded(codec, row) for row in exact])
    number, width = AT_REST.index(codec), WIDTH * (1 if codec == "int8" else 2)
    encoded = encode_rows(codec, [row.data for row in rounded], 4)
    small = encoded.codecs == number
    assert small.all() or (codec == "int8" and small.mean() > 0.9)
    assert (encoded.lengths[small] == width + 4 * (codec == "int8")).all()
    assert (encode_rows(codec, [row.data for row in exact], 4).codecs == 0).all()
    key = replace(WIDE, rounding=WireRounding(codec, WIDE.cut))
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 20), key, COUNT, SINGLE, codec="auto") as cache:
        cache.codec.name = codec
        cache.put(ids, rounded, labels(ids))
        out, kept = np.empty_like(rounded), np.empty(COUNT, np.int64)
        assert cache.read(ids, out, kept).all() and (out == rounded).all()
        assert cache._records.stored_bytes < 0.6 * rounded.nbytes
        cache.put(
            ids, exact, labels(ids)
        )  # of a server that did not round: nothing that is there is replaced
        assert cache.read(ids, out, kept).all() and (out == rounded).all()


def _rounded(codec: Any, row: Bytes) -> Bytes:
    """A sample as it comes over the wire; uint8 [1, bytes]."""
    out = np.empty_like(row)
    decode_into(codec, b"".join(encode(codec, row.data, 4) or []), out.data, 4)
    return out[None]


@pytest.mark.parametrize("split", [WIDE.cut, WIDE.cut - 1])
def test_auto_takes_the_small_form_of_what_came_in_it_alone(tmp_path: Path, split: int) -> None:
    key = replace(WIDE, rounding=WireRounding("int8", split))
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 20), key, COUNT, SINGLE, codec="auto") as cache:
        assert ("int8" in cache.codec._codecs) == (split == WIDE.cut)
        cache.codec.expect((CodecFigures(name="planes", ratio=1.1, encode_rate=1e9, decode_rate=1e9),))
        cache.codec.follow("bf16")  # a plan's choice for another key
        assert cache.codec.name == NONE


# -- any rows ----------------------------------------------------------------------------------------------------

KINDS = st.sampled_from(["zeros", "dense", "noise", "constant", "sparse"])
PUTS = st.lists(
    st.tuples(
        st.sampled_from((NONE, *EXACT)),
        KINDS,
        st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=8, unique=True),
    ),
    min_size=1,
    max_size=6,
)


def made(kind: str, ids: list[int], width: int) -> Bytes:
    """Rows of ``width`` bytes."""
    random = np.random.default_rng(ids)
    dense = random.standard_normal((len(ids), -(-width // 4))).astype(np.float32)
    if kind == "sparse":
        dense[random.random(dense.shape) < 0.9] = 0
    rows = np.ascontiguousarray(dense.view(np.uint8)[:, :width])
    if kind == "noise":
        rows[:] = random.integers(0, 256, rows.shape)
    elif kind in ("zeros", "constant"):
        rows[:] = 0 if kind == "zeros" else 7
    return rows


@pytest.mark.slow
@given(
    PUTS,
    st.sampled_from([("uint8", 1), ("float16", 2), ("bfloat16", 2), ("float32", 4), ("int64", 8)]),
    st.integers(1, 700),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), max_size=2),
)
def test_any_rows_come_back_or_miss(
    tmp_path_factory: pytest.TempPathFactory,
    puts: list[tuple[Any, str, list[int]]],
    dtype: tuple[str, int],
    elements: int,
    flips: list[tuple[int, int]],
) -> None:
    path = tmp_path_factory.mktemp("records")
    key = replace(KEY, shape=(elements,), dtype=dtype[0])
    width = elements * dtype[1]
    truth: dict[int, bytes] = {}
    for codec, kind, ids in puts:
        with FeatureCache(CacheFolder.open(path, 1 << 22), key, COUNT, SINGLE, codec=codec) as cache:
            rows = made(kind, ids, width)
            cache.put(np.array(ids), rows, labels(np.array(ids)))
            for sample, row in zip(ids, rows, strict=True):
                truth.setdefault(sample, row.tobytes())
            assert cache._records.stored_bytes <= width * cache._records.samples
    for where, bit in flips:
        for segment in path.glob("*@*/segment-*"):
            content = bytearray(segment.read_bytes())
            content[where % len(content)] ^= 1 << bit
            segment.write_bytes(content)
    wanted = np.arange(COUNT)
    with FeatureCache(CacheFolder.open(path, 1 << 22), key, COUNT, SINGLE) as cache:
        rows, kept = np.empty((COUNT, width), np.uint8), np.empty(COUNT, np.int64)
        present = np.flatnonzero(cache.read(wanted, rows, kept)).tolist()
        assert all(rows[sample].tobytes() == truth[sample] for sample in present)
        assert (kept[present] == labels(wanted[present])).all()
        assert flips or set(present) == set(truth)


# -- damage ------------------------------------------------------------------------------------------------------


def flipped(path: Path, where: int) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 16]))


def test_a_flipped_bit_costs_one_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with encoded_at(tmp_path, budget=1 << 24) as cache:
        put_rows(cache, range(COUNT))
        start = int(cache._records.find(np.array([7])).start[0])
    (segment,) = tmp_path.glob("*@*/segment-*")
    flipped(segment, start + 300)
    with encoded_at(tmp_path, memory=1 << 20) as cache:
        assert found_rows(cache) == found_rows(cache) == ALL - {7} and len(caplog.records) == 1
        put_rows(cache, [7])
        assert found_rows(cache) == ALL
    flipped(segment, int(start + 40))
    folder = CacheFolder.open(tmp_path, 1 << 20)
    (version,) = folder.versions()
    assert verify(folder, version.name).damaged == 0, "it was dropped before"


@pytest.mark.parametrize("number", [0, 1, 3, 4, 255])
def test_a_sound_record_that_decodes_to_nothing_is_a_miss(tmp_path: Path, number: int) -> None:
    """As another version of the codecs may have written it: its checksum fits, its blocks do not."""
    ids = np.arange(3)
    with encoded_at(tmp_path) as cache:
        put_rows(cache, [0, 1])
        cache._records.put(
            Samples(
                ids=ids[2:], data=np.ones(90, np.uint8), offsets=np.array([0, 90]), labels=labels(ids[2:])
            ),
            np.array([number], np.uint8),
        )
        assert cache.held(ids).all()
        assert found_rows(cache, [0, 1, 2]) == {0, 1} and not cache.held(ids[2:]).any()
        put_rows(cache, [2])
        assert found_rows(cache, [0, 1, 2]) == {0, 1, 2}


_FILLER = """
import sys
from pathlib import Path
from support import encoded_tools as t
import numpy as np
cache = t.encoded_at(Path(sys.argv[1]), "zeros+planes")
for start in range(0, t.COUNT, 4):
    t.put_rows(cache, range(start, start + 4))
    print(start, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_had_encoded_counts(tmp_path: Path) -> None:
    search = [str(Path(__file__).parents[1]), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", _FILLER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(8):
        assert process.stdout.readline()
    process.kill()
    process.communicate()
    with encoded_at(tmp_path, "none") as cache:
        assert found_rows(cache) >= set(range(32))
        assert cache._records.stored_bytes < 0.65 * ROW_BYTES * cache._records.samples


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
@pytest.mark.slow
def test_an_encoded_cache_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        small_disk(tmp_path / "disk", 40) as disk,
        encoded_at(disk / "cache", budget=1 << 30) as cache,
    ):
        for start in range(0, COUNT, 5):
            put_rows(cache, range(start, start + 5))
        assert 0 < len(found_rows(cache)) < COUNT
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


def test_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are encoded and decoded a bounded number of bytes at a time."""
    monkeypatch.setattr("hapi.cache.features._PART_BYTES", 3 * ROW_BYTES)
    ids: IntArray = np.random.default_rng(0).permutation(COUNT)
    with encoded_at(tmp_path, "planes") as cache:
        cache.put(ids, rectified(ids), labels(ids))
        assert found_rows(cache, ids.tolist()) == ALL
    assert WIDE.shape == (ROW_BYTES // 4,)
