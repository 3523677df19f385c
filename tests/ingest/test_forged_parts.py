"""Pieces of an unfinished packing or indexing that others wrote, under a seal that fits: they are made again."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from support.formats_tools import memory_store, samples, tar
from test_pack_dataset import SMALL, ByteSource

from hapi.data.dataset import find_dataset
from hapi.data.index import SampleIndex
from hapi.errors import DataError
from hapi.ingest.in_place import scan as index_runs
from hapi.ingest.in_place.discover import find_folder
from hapi.ingest.in_place.indexer import IndexOptions, index_folder
from hapi.ingest.pack import pack
from hapi.ingest.skipped import Skipped
from hapi.ingest.transaction import _seal
from hapi.store.base import ObjectStore

DEEP = "[" * 100_000


def parts(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("datasets/d") if info.key.endswith(".part.safetensors")]


def forge(store: ObjectStore, key: str, **known: str | None) -> None:
    """Change what a part says beside its arrays (None: leave it out), and seal it again."""
    index, metadata = SampleIndex.from_buffer(np.frombuffer(store.get(key), dtype=np.uint8), key)
    del metadata["seal"]
    told = {name: text for name, text in {**metadata, **known}.items() if text is not None}
    store.put(key, index.to_bytes({**told, "seal": _seal(index, told)}))


@pytest.mark.parametrize(
    "known",
    [{"skipped": text} for text in (None, "1", "[1]", '["a", []]', "[-1, []]", "[true, []]", "[0, 7]", DEEP, "[5, []]")]
    + [{"done": text} for text in (None, "x", "-1", "63", "99999999999", "9" * 5000)],
)  # fmt: skip
def test_parts_of_a_packing(known: dict[str, str | None]) -> None:
    store = memory_store()
    with pytest.raises(KeyboardInterrupt):
        pack(ByteSource(300, fail_at=200), store, "d", SMALL)
    assert len(parts(store)) == 3
    forge(store, parts(store)[1], **known)
    begun: list[int] = []
    source = ByteSource(300)
    pack(source, store, "d", SMALL, on_start=lambda total, samples, size: begun.append(samples))
    assert begun == [64], "the first part is as it was"
    assert np.array_equal(find_dataset(store, "d").read(range(300)).data.reshape(300, 16), source.values)


@pytest.mark.parametrize(
    "text",
    [None, "1", "[]", DEEP, '["numbers", [], 7]', '["colours", [], [0, []]]', '["numbers", "ab", [0, []]]',
     '["names", [7], [0, []]]'],
)  # fmt: skip
def test_parts_of_an_indexing(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_runs, "RUN_SHARDS", 1)
    store = memory_store()
    for number in range(3):
        store.put(f"wds/{number}.tar", tar(samples(range(2 * number, 2 * number + 2))))
    options = IndexOptions(workers=1)

    def stop(samples: int, size: int) -> None:
        if len(parts(store)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(store, "d", find_folder(store, "wds"), options, on_progress=stop)
    for key in parts(store):
        forge(store, key, run=text)
    index_folder(store, "d", find_folder(store, "wds"), options)
    assert find_dataset(store, "d").count == 6


@pytest.mark.parametrize("write", [lambda: DEEP.encode(), lambda: json.dumps(DEEP).encode()])
def test_an_unfinished_packing_that_is_none(write: Callable[[], bytes]) -> None:
    store = memory_store()
    store.put("datasets/d/packing.json", write())
    with pytest.raises(DataError, match="--restart"):
        pack(ByteSource(100), store, "d", SMALL)
    pack(ByteSource(100), store, "d", SMALL, restart=True)
    assert find_dataset(store, "d").count == 100


def test_what_was_left_out_is_read_as_it_was_written() -> None:
    skipped = Skipped(7, ["a", "b"])
    assert Skipped.from_json(json.loads(json.dumps(skipped.to_json()))) == skipped
