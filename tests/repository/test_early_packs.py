"""Packs of a large model are written while its later tensors are still hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.harness import wait_for
from support.stores import DyingStore, FullStore, Killed

from hapi.errors import DataError, NoRoomError
from hapi.models.graph.digest import content_digest
from hapi.repository.checksums import TensorChecksum
from hapi.repository.entries import SourceTensor
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.hashing import hashed_layers
from hapi.repository.packs.index import PackIndex
from hapi.repository.packs.journal import PUSHES
from hapi.repository.packs.layout import PackPlanner, plan_packs
from hapi.repository.push import Pushed, SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.store.local import LocalStore

SIZE = 300 << 10
PACKS = "repository/packs"
LIMIT = 240.0
"""Seconds in which something must happen that waits for nothing but processors and disks."""


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor each."""
    monkeypatch.setattr("hapi.repository.packs.layout.PACK_BYTES", SIZE)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def nothing() -> None:
    """Happens before the bytes of most tensors are read."""


def layer(number: int, before: Callable[[], None] = nothing) -> SourceLayer:
    content = bytes([number]) * SIZE

    def pieces() -> Iterator[memoryview]:
        before()
        yield memoryview(content)

    return SourceLayer(f"l{number}", (SourceTensor(f"t{number}", "uint8", (SIZE,), pieces),))


def push(store: Any, layers: Sequence[SourceLayer], name: str = "m") -> Pushed:
    return push_tensors(store, name, layers)


def check_end(store: LocalStore, name: str = "m") -> None:
    """The model is whole, nothing else is left, and no thread of a push lives."""
    assert not verify_model(store, name).damages
    collect_packs(store)
    assert collect_packs(store) == () and not store.list_keys(PUSHES)
    assert not list(store.root.rglob("*.partial"))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("hapi-packs", "hapi-hashing"))]


def test_packs_are_there_before_the_last_tensor_is_read(store: LocalStore) -> None:
    seen = []

    def last() -> None:
        wait_for(lambda: len(store.list_keys(PACKS)) >= 2, LIMIT, "the first packs")
        seen.append(len(store.list_keys(PACKS)))

    pushed = push(store, [*(layer(n) for n in range(1, 9)), layer(9, last)])
    assert seen[0] < 9 == len(store.list_keys(PACKS))
    assert pushed.new and pushed.written == 9 * SIZE and len(pushed.model.manifest.packs) == 9
    again = push(store, [layer(n) for n in range(1, 10)])
    assert not again.new and again.written == 0
    check_end(store)
    wait_for(lambda: not threads(), LIMIT, "the end of all threads")


def test_a_push_that_fails_late_has_written_what_the_next_one_need_not(store: LocalStore) -> None:
    """Nothing is written any more once it has failed."""

    def broken() -> None:
        wait_for(lambda: len(store.list_keys(PACKS)) >= 2, LIMIT, "the first packs")
        raise DataError("the source is gone")

    with pytest.raises(DataError, match="the source is gone"):
        push(store, [*(layer(n) for n in range(1, 9)), layer(9, broken)])
    wait_for(lambda: not threads(), LIMIT, "the end of all threads")
    there = len(store.list_keys(PACKS))
    assert 2 <= there < 9 and not list(store.root.rglob("*.partial")) and not store.list_keys(PUSHES)
    assert push(store, [layer(n) for n in range(1, 10)]).written == (9 - there) * SIZE
    check_end(store)


def test_a_tensor_of_other_bytes_when_it_is_written_is_found_early(store: LocalStore) -> None:
    reads = []

    def pieces() -> Iterator[memoryview]:
        reads.append(1)
        yield memoryview(bytes([len(reads)]) * SIZE)

    changing = SourceLayer("l1", (SourceTensor("t1", "uint8", (SIZE,), pieces),))
    with pytest.raises(DataError, match="tensor 't1' changed while it was pushed"):
        push(store, [changing, *(layer(n) for n in range(2, 9))])
    assert not list(store.root.rglob("*.partial")) and not store.list_names("models")


def test_a_full_disk_ends_the_push_in_its_middle(store: LocalStore) -> None:
    hashed = []
    layers = [layer(n, lambda: hashed.append(1)) for n in range(1, 60)]
    with pytest.raises(NoRoomError):
        push(FullStore(store), layers)
    wait_for(lambda: not threads(), LIMIT, "the end of all threads")
    assert len(hashed) < 60, "not all of it was read in vain"


@pytest.mark.slow
def test_a_push_that_dies_at_each_change_goes_on(tmp_path: Path) -> None:
    for changes in range(200):
        store = LocalStore(tmp_path / str(changes))
        layers = [layer(n) for n in range(1, 6)]
        try:
            push(DyingStore(store, changes), layers)
            assert changes > 10
            return
        except Killed:
            assert push(store, layers).new
            check_end(store)
    raise AssertionError


def test_the_plan_of_layers_that_come_one_by_one_is_that_of_all() -> None:
    layers = [layer(n).tensors for n in (1, 2, 3, 5, 4)]
    hashed = list(hashed_layers(layers, 2, lambda done, total: None))
    planner, early = PackPlanner(PackIndex()), []
    for each in hashed:
        early += planner.add(each)
    whole = plan_packs(hashed, PackIndex())
    assert planner.finish() == whole and [pack.id for pack in early] == [pack.id for pack in whole.packs[:-1]]


@pytest.mark.parametrize("processors", [1, 2, 16])
def test_tensors_are_hashed_in_their_order(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.repository.packs.hashing.processor_count", lambda: processors)
    monkeypatch.setattr("hapi.repository.packs.hashing._BATCH_BYTES", 5000)
    contents = [bytes([n % 251]) * (n * 37 % 9000) for n in range(200)]
    noted: list[tuple[int, int]] = []

    def source(number: int, content: bytes) -> SourceTensor:
        return SourceTensor(f"t{number}", "uint8", (len(content),), lambda: iter([memoryview(content)]))

    layers = [[source(n, content) for n, content in enumerate(contents)][i::3] for i in range(3)]
    found = list(hashed_layers(layers, 2, lambda done, total: noted.append((done, total))))
    assert [layer.ends_pack for layer in found] == [False, True, False]
    for layer, sources in zip(found, layers, strict=True):
        for tensor, given in zip(layer.tensors, sources, strict=True):
            content = contents[int(given.name[1:])]
            assert tensor.source is given and tensor.digest == content_digest(content)
            assert tensor.checksum == TensorChecksum(content).hexdigest()
    total = sum(map(len, contents))
    assert noted == sorted(noted) and noted[-1] == (total, total)


def test_nothing_is_read_after_the_hashing_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.repository.packs.hashing.processor_count", lambda: 4)
    monkeypatch.setattr("hapi.repository.packs.hashing._BATCH_BYTES", SIZE)
    read = []
    layers = [layer(n, lambda: read.append(1)).tensors for n in range(1, 200)]
    hashing = hashed_layers(layers, None, lambda done, total: None)
    next(hashing)
    hashing.close()
    after = len(read)
    wait_for(lambda: not threads(), LIMIT, "the end of all threads")
    assert len(read) == after < 199
