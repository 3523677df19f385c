"""Packs that are mostly dead: a collection keeps their live tensors alone, and nobody who uses these notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import flip

from hapi.cli.main import main
from hapi.ingest.removal import remove_model
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.repository.versions import add_tag
from hapi.store.local import LocalStore
from hapi.store.open import open_store

SIZE = 300 << 10


def layer(number: int, nbytes: int = SIZE) -> SourceLayer:
    content = bytes([number]) * nbytes

    def pieces() -> Iterator[memoryview]:
        yield memoryview(content)

    return SourceLayer(f"l{number}", (SourceTensor(f"t{number}", "uint8", (nbytes,), pieces),))


def packs(store: LocalStore) -> dict[str, int]:
    return {info.key: info.size for info in store.list("repository/packs")}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose first pack has five tensors, the second and fifth of which are needed by another model."""
    store = LocalStore(tmp_path / "store")
    push_tensors(store, "large", [layer(1), layer(2), layer(3, 5001), layer(4), layer(5)])
    push_tensors(store, "m", [layer(2), layer(5), layer(6)])
    add_tag(store, "m", "best", 1)
    return store


def test_the_live_tensors_of_a_mostly_dead_pack_are_kept_alone(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    push_tensors(store, "n", [layer(2), layer(5), layer(6), layer(7)])
    assert collect_packs(store) == ()  # all is needed
    opened = open_model(store, "n")
    before, old = packs(store), opened.manifest.tensors["t2"].pack
    document = open_model(store, "m@best").manifest.to_json()
    remove_model(store, "large")
    assert main(["gc", store.url]) == 0 and packs(store) == before
    told = capsys.readouterr().out
    assert "1 packs of 1.18 MiB, more than half of it dead, would be packed anew in 600." in told
    assert main(["gc", store.url, "--yes"]) == 0
    assert "were packed anew in 600." in capsys.readouterr().out
    now = packs(store)
    assert old not in now and len(now) == len(before)
    assert sum(before.values()) - sum(now.values()) == before[old] - max(
        now[key] for key in now.keys() - before.keys()
    )
    assert sum(now.values()) < 4 * SIZE + 2048
    assert {name: int(tensor[-1]) for name, tensor in opened.read(["t7", "t5", "t2"])} == {
        "t7": 7,
        "t5": 5,
        "t2": 2,
    }
    for reference in ("m@best", "n"):
        assert not verify_model(store, reference).damages
    changed = {
        key for key, value in open_model(store, "m@best").manifest.to_json().items() if value != document[key]
    }
    assert changed <= {"packs", "tensors", "checksum"}
    assert collect_packs(store) == ()
    assert push_tensors(store, "n", [layer(2), layer(5), layer(6), layer(7)]).new is False
    assert push_tensors(store, "k", [layer(5), layer(2)]).written == 0


def test_packs_of_an_object_store_are_packed_anew() -> None:
    remote = open_store("memory://")
    push_tensors(remote, "large", [layer(1), layer(2), layer(3, 5001), layer(4)])
    push_tensors(remote, "m", [layer(3, 5001), layer(2)])
    remove_model(remote, "large")
    lines: list[str] = []
    gone = [
        info.key for info in collect_packs(remote, note=lines.append) if info.key.endswith(".safetensors")
    ]
    assert len(gone) == len(lines) == 1 and not verify_model(remote, "m").damages
    assert sum(info.size for info in remote.list("repository/packs")) < SIZE + 5001 + 1024
    assert collect_packs(remote) == ()


def test_a_pack_that_is_half_needed_stays(store: LocalStore) -> None:
    push_tensors(store, "n", [layer(1), layer(2)])
    before = packs(store)
    remove_model(store, "large")
    assert not [info for info in collect_packs(store) if info.key in before] and packs(store) == before


def test_a_small_pack_that_is_mostly_header_stays(store: LocalStore) -> None:
    push_tensors(store, "small", [layer(9, 4)])
    assert collect_packs(store, dry_run=True) == () == collect_packs(store)


@pytest.mark.parametrize("damage", ["tensor", "header", "cut"])
def test_a_damaged_pack_is_left_for_a_repair(store: LocalStore, damage: str) -> None:
    entry = open_model(store, "m").manifest.tensors["t5"]
    remove_model(store, "large")
    if damage == "cut":
        store.put(entry.pack, store.get(entry.pack)[: entry.start + 5])
    else:
        flip(store, entry.pack, entry.start + 5 if damage == "tensor" else 40)
    before = packs(store)
    collect_packs(store)
    assert packs(store) == before
    if damage != "header":
        layers = [layer(2), layer(5), layer(6)]
        assert verify_model(store, "m").damages
        push_tensors(store, "m", layers, repair=True)
        assert not verify_model(store, "m").damages
        collect_packs(store)
        assert not verify_model(store, "m").damages


def test_a_damaged_pack_of_the_new_name_is_written_over(store: LocalStore, tmp_path: Path) -> None:
    remove_model(store, "large")
    other = LocalStore(tmp_path / "other")
    for info in store.list():
        other.put(info.key, store.get(info.key))
    collect_packs(other)
    entry = open_model(other, "m").manifest.tensors["t5"]
    store.put(entry.pack, other.get(entry.pack))
    flip(store, entry.pack, entry.start)
    collect_packs(store)
    assert open_model(store, "m").manifest.tensors["t5"] == entry and not verify_model(store, "m").damages


def test_a_verification_goes_on_where_tensors_were_packed_anew(store: LocalStore) -> None:
    remove_model(store, "large")
    read: list[int] = []

    def collect(tensors: int, nbytes: int) -> None:
        if not read:
            read.append(nbytes)
            collect_packs(store)

    assert not verify_model(store, "m", on_progress=collect).damages and read


@pytest.mark.slow
def test_a_pack_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 8 MiB at most, one at a time."""
    store, sizes = LocalStore(tmp_path), list[int]()
    push_tensors(store, "large", [layer(1, 40 << 20), layer(2, 20 << 20)])
    push_tensors(store, "m", [layer(2, 20 << 20)])
    remove_model(store, "large")
    real = LocalStore.put_pieces

    def put(self: LocalStore, key: str, size: int, pieces: Iterator[memoryview]) -> None:
        real(self, key, size, (piece for piece in pieces if sizes.append(len(piece)) is None))

    monkeypatch.setattr(LocalStore, "put_pieces", put)
    collect_packs(store)
    assert (
        not verify_model(store, "m").damages
        and max(sizes) == 8 << 20
        and sum(sizes) == sum(packs(store).values())
    )
    assert json.loads(bytes(store.get(next(iter(packs(store))))[8:200]).partition(b"}}")[0] + b"}}")
