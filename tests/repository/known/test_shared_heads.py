"""Headers of packs that a store has together: machines that know nothing, damage, room, and several writers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import CountingRemote, FullStore, flip
from support.threads import at_once

from hapi.ingest.removal import remove_model
from hapi.models.graph.digest import content_digest
from hapi.repository.entries import SourceTensor
from hapi.repository.known import shared_heads
from hapi.repository.known.record_log import encoded
from hapi.repository.known.shared_heads import HEADS, MIN_ADDED, MOST_OBJECTS, SharedHeads
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.index import PackIndex
from hapi.repository.packs.place import PACKS
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.repository.versions import model_names
from hapi.store.local import LocalStore

BACKBONE, TAIL = 300_000, 1000


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"home{number}"))


@pytest.fixture
def store(tmp_path: Path) -> CountingRemote:
    return CountingRemote(tmp_path / "store")


def layer(name: str, nbytes: int, mark: int) -> SourceLayer:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(mark.to_bytes(8, "little") + bytes(nbytes - 8))

    return SourceLayer(name, (SourceTensor(f"{name}.weight", "uint8", (nbytes,), pieces),))


def fine_tune(store: CountingRemote, number: int) -> int:
    layers = [layer("backbone", BACKBONE, 1), layer("head", TAIL, 1000 + number)]
    return push_tensors(store, f"tune{number}", layers).written


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(45, 80), pytest.param((45, 200), marks=pytest.mark.slow)])
def test_a_push_from_a_machine_that_knows_nothing_does_not_grow(
    store: CountingRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    pushed, requests = 0, []
    for count in counts:
        for pushed in range(pushed, count):  # noqa: B020  goes on
            fine_tune(store, pushed)
        for _ in range(2):
            pushed += 1
            new_machine(tmp_path, monkeypatch, pushed)
            store.reset()
            assert fine_tune(store, pushed) == TAIL
            requests.append(sum(store.requests.values()))
            assert store.requests["range"] < 2 * MIN_ADDED
        pushed += 1
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert max(requests) <= 2 * MIN_ADDED + 60, requests
    assert len(store.list_keys(HEADS)) <= MOST_OBJECTS
    assert not verify_model(store, f"tune{pushed - 1}").damages


def headers(count: int) -> dict[str, bytes]:
    made = [f"header {number}".encode() for number in range(count)]
    return {content_digest(header): header for header in made}


def added(store: CountingRemote, known: dict[str, bytes]) -> dict[str, bytes]:
    """What a machine that knows these finds, and adds."""
    shared = SharedHeads(store, known.keys())
    found = shared.read()
    shared.add(known)
    return found


def test_many_objects_are_put_together_without_what_is_gone(
    store: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = headers(MIN_ADDED * 20)
    monkeypatch.setattr(shared_heads, "MOST_BYTES", 5000)
    for count in range(MIN_ADDED, len(everything) + 1, MIN_ADDED):
        known = (
            dict(list(everything.items())[count // 2 : count])
            if count > 300
            else dict(list(everything.items())[:count])
        )
        added(store, known)
        assert SharedHeads(store, known.keys()).read() == known or len(known) < MIN_ADDED
    sizes = [len(store.get(key)) for key in store.list_keys(HEADS)]
    assert max(sizes) <= 5000 and sum(size < 2500 for size in sizes) <= MOST_OBJECTS


def test_few_are_neither_looked_for_nor_added(store: CountingRemote) -> None:
    known = headers(MIN_ADDED - 1)
    assert added(store, known) == {} and not store.list_keys(HEADS)
    store.reset()
    assert not SharedHeads(store, known.keys()).is_behind and not store.requests


def test_what_is_damaged_or_false_is_not_believed(store: CountingRemote) -> None:
    known = headers(MIN_ADDED)
    added(store, known)
    (key,) = store.list_keys(HEADS)
    whole = store.get(key)
    for position in range(0, len(whole), 37):
        flip(store, key, position)
        found = SharedHeads(store, known.keys()).read()
        assert found.items() <= known.items() and len(found) < len(known)
        store.put(key, whole)
    store.put(key, whole[:-1])
    assert len(SharedHeads(store, known.keys()).read()) == MIN_ADDED - 1
    store.put(key, encoded(dict.fromkeys(known, b"another header")))
    assert SharedHeads(store, known.keys()).read() == {}
    for name in ("00000002-00004.txt", "x.log", "00000003.log"):
        store.put(f"{HEADS}/{name}", b"of others")
    assert SharedHeads(store, known.keys()).read() == {}


@pytest.mark.slow
def test_a_damaged_one_costs_requests_alone(
    store: CountingRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MIN_ADDED + 3):
        fine_tune(store, number)
    new_machine(tmp_path, monkeypatch, 1)
    whole = PackIndex.read(store)
    assert store.list_keys(HEADS) and len(whole.sizes) == MIN_ADDED + 4 - 1
    for key in store.list_keys(HEADS):
        flip(store, key, 40)
    new_machine(tmp_path, monkeypatch, 2)
    assert PackIndex.read(store).sizes == whole.sizes
    assert fine_tune(store, 99) == TAIL and not verify_model(store, "tune99").damages


@pytest.mark.slow
def test_a_store_that_takes_none(
    store: CountingRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MIN_ADDED):
        fine_tune(store, number)
    for key in store.list_keys(HEADS):
        store.delete(key)

    class Refusing(FullStore):
        def put_new(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            return True

    new_machine(tmp_path, monkeypatch, 1)
    index = PackIndex.read(Refusing(store))  # type: ignore[arg-type]
    assert len(index.sizes) == MIN_ADDED and not store.list_keys(HEADS)


def test_several_machines_at_once(store: CountingRemote) -> None:
    drawn = random.Random(3)
    everything = headers(MIN_ADDED * 12)

    def work(number: int) -> None:
        del number
        for count in range(MIN_ADDED, len(everything) + 1, MIN_ADDED):
            known = dict(drawn.sample(list(everything.items()), count))
            assert added(store, known).items() <= everything.items()

    at_once(4, work)
    added(store, everything)
    found = SharedHeads(store, everything.keys()).read()
    assert found.items() <= everything.items() and len(found) > len(everything) - MIN_ADDED


@pytest.mark.slow
def test_with_the_last_pack_they_go(store: CountingRemote) -> None:
    for number in range(MIN_ADDED + 1):
        fine_tune(store, number)
    assert store.list_keys(HEADS)
    for name in model_names(store):
        remove_model(store, name)
    collect_packs(store)
    assert not store.list(PACKS) and not store.list_keys(HEADS)


def test_a_folder_has_none(tmp_path: Path) -> None:
    local = LocalStore(tmp_path / "local")
    for number in range(MIN_ADDED + 2):
        push_tensors(local, f"m{number}", [layer("l", TAIL, number)])
    assert not local.list_keys(HEADS) and len(PackIndex.read(local).sizes) == MIN_ADDED + 2
