"""Damage, races and equal content in a repository of models: nothing needed goes, nothing damaged is believed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.lock_owners import dead, elsewhere
from support.stores import flip

from hapi.cli.main import main
from hapi.errors import ConflictError, DataError, NotFoundError
from hapi.ingest.removal import remove_model
from hapi.repository import opening
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.journal import JOURNAL, append, push_lock
from hapi.repository.packs.place import PACKS, pack_id
from hapi.repository.packs.pushes import COLLECTION, CONDEMNED
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.stored import StoredModel
from hapi.repository.verify import verify_model
from hapi.repository.versions import (
    add_tag,
    compressed,
    decompressed,
    drop_versions,
    list_tags,
    list_versions,
)
from hapi.store.local import LocalStore

LARGE = 512 << 10
ONE, TWO, THREE = (bytes([byte]) * LARGE for byte in (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def layer(name: str, *contents: bytes) -> SourceLayer:
    def tensor(number: int, content: bytes) -> SourceTensor:
        def pieces() -> Iterator[memoryview]:
            yield memoryview(content)

        return SourceTensor(f"{name}.{number}", "uint8", (len(content),), pieces)

    return SourceLayer(name, tuple(tensor(number, content) for number, content in enumerate(contents)))


def pushed(store: LocalStore, name: str, *layers: SourceLayer) -> StoredModel:
    return push_tensors(store, name, layers).model


def two_copies(store: LocalStore) -> tuple[StoredModel, StoredModel]:
    """Models ``one`` and ``two`` with a tensor of the same content in a pack each."""
    one = pushed(store, "one", layer("a", ONE))
    condemned = {"packs": [pack_id(one.manifest.packs[0])], "structures": []}
    store.put(CONDEMNED, json.dumps(condemned).encode())
    two = pushed(store, "two", layer("a", ONE), layer("b", TWO))
    store.delete(CONDEMNED)
    assert not set(one.manifest.packs) & set(two.manifest.packs)
    return one, two


class Meanwhile:
    """A store in which something else happens just before an object is deleted."""

    def __init__(self, store: LocalStore, happens: Any) -> None:
        self._store, self._happens = store, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete(self, key: str) -> None:
        if key.startswith("models/"):
            self._happens()
        self._store.delete(key)


def test_large_tensors_of_equal_content_are_stored_once_in_one_push(store: LocalStore) -> None:
    done = push_tensors(store, "m", [layer("a", ONE, b"1"), layer("b", ONE, b"2"), layer("c", ONE, ONE)])
    assert done.written == LARGE + 2
    assert not verify_model(store, "m").damages


def test_a_layer_that_lies_in_two_packs_is_found_there(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.repository.packs.layout.PACK_BYTES", LARGE)
    layers = [layer("a", b"small", ONE, b"after")]
    first = push_tensors(store, "m", layers)
    assert first.new and len(first.model.manifest.packs) == 3
    again = push_tensors(store, "m", layers)
    assert not again.new and again.written == 0
    tuned = push_tensors(store, "n", [*layers, layer("b", b"head")])
    assert tuned.written == len(b"head") and not verify_model(store, "n").damages


def test_a_header_that_is_damaged_says_nothing(store: LocalStore) -> None:
    key = pushed(store, "m", layer("a", ONE), layer("b", TWO)).manifest.packs[0]
    data = store.get(key)
    changed = bytes(data).replace(b"[524288,1048576]", b"[524287,1048575]")
    assert changed != data
    store.put(key, changed)
    pushed(store, "n", layer("b", TWO), layer("c", THREE))
    assert not verify_model(store, "n").damages


def test_a_pack_that_is_cut_short_does_not_stop_pushes(store: LocalStore) -> None:
    key = pushed(store, "m", layer("a", ONE), layer("b", TWO)).manifest.packs[0]
    store.put(key, store.get(key)[:-1000])
    pushed(store, "n", layer("b", TWO), layer("c", THREE))
    assert not verify_model(store, "n").damages and verify_model(store, "m").damages
    assert not push_tensors(store, "m", [layer("a", ONE), layer("b", TWO)], repair=True).new
    assert not verify_model(store, "m").damages


def test_a_repair_makes_up_no_bytes_of_what_a_cut_pack_lost(store: LocalStore) -> None:
    zeros = bytes(LARGE)
    both = pushed(store, "m", layer("a", ONE), layer("b", TWO), layer("c", THREE), layer("d", zeros)).manifest
    key, b, c = both.packs[0], both.tensors["b.0"], both.tensors["c.0"]
    whole = store.get(key)
    for cut in (b.start + 99, b.start, b.start - 99):
        store.put(key, whole[:cut])
        # nothing gives B, so that C and D cannot stand behind it; A is written again where it was cut too
        pushed(store, "n", layer("c", THREE), layer("d", zeros))
        tail = [layer("a", ONE), layer("c", THREE), layer("d", zeros)]
        repaired = push_tensors(store, "n", tail, repair=True)
        assert not verify_model(store, "n").damages and key not in repaired.model.manifest.packs
        assert store.get(key) == whole[: max(cut, b.start)]
        (damage,) = verify_model(store, "m").damages
        assert str(damage).endswith("lost: 'b.0', 'c.0', 'd.0'")
        assert verify_model(store, "m").samples == 1  # A is readable
    assert not push_tensors(store, "n", tail, repair=True).new
    push_tensors(
        store, "m", [layer("a", ONE), layer("b", TWO), layer("c", THREE), layer("d", zeros)], repair=True
    )
    assert store.get(key) == whole and c.stop < len(whole)
    assert not verify_model(store, "m@1").damages


def test_a_repair_writes_lost_padding_again(store: LocalStore) -> None:
    layers = [layer("a", b"small"), layer("b", ONE)]
    manifest = pushed(store, "m", *layers).manifest
    (key,) = manifest.packs
    whole, a, b = store.get(key), manifest.tensors["a.0"], manifest.tensors["b.0"]
    assert a.stop + 1 < b.start
    for cut in (a.stop - 1, a.stop, a.stop + 1, b.start, b.stop - 1):
        store.put(key, whole[:cut])
        assert not push_tensors(store, "m", layers, repair=True).new and store.get(key) == whole


@pytest.mark.parametrize("name", ["one", "two"])
def test_repair_mends_every_copy(store: LocalStore, name: str) -> None:
    entry = {m.manifest.name: m for m in two_copies(store)}[name].manifest.tensors["a.0"]
    flip(store, entry.pack, entry.start + 9)
    assert verify_model(store, name).damages
    layers = [layer("a", ONE)] if name == "one" else [layer("a", ONE), layer("b", TWO)]
    assert not push_tensors(store, name, layers, repair=True).new
    assert not verify_model(store, "one").damages and not verify_model(store, "two").damages


def test_a_model_whose_pack_is_lost_is_pushed_anew_though_its_content_is_elsewhere(store: LocalStore) -> None:
    one, _ = two_copies(store)
    store.delete(one.manifest.packs[0])
    assert push_tensors(store, "one", [layer("a", ONE)]).written == 0
    assert not verify_model(store, "one").damages


@pytest.mark.slow
def test_a_push_waits_for_no_collection_that_was_killed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("hapi.repository.push.time", SimpleNamespace(sleep=waits.append))
    structure = pushed(store, "m", layer("a", ONE)).manifest.structure
    remove_model(store, "m@1")
    killed = f"""
import os, signal
from hapi.repository.packs.collect import collect_packs
from hapi.store.local import LocalStore
LocalStore.delete = lambda store, key: os.kill(os.getpid(), signal.SIGKILL)
collect_packs(LocalStore({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    assert structure.digest.encode() in store.get(CONDEMNED) and store.exists(COLLECTION)
    with store.lock(COLLECTION), pytest.raises(ConflictError, match="being removed by 'hapi gc'"):
        pushed(store, "m", layer("a", ONE))  # one that lives is waited for
    assert store.exists(CONDEMNED) and waits
    waits.clear()
    pushed(store, "m", layer("a", ONE))
    assert not waits and not store.exists(CONDEMNED) and not verify_model(store, "m").damages
    assert collect_packs(store) == () and store.exists(structure.key)


def test_nothing_is_collected_beside_a_version_whose_packs_are_misread(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pushed(store, "m", layer("a", ONE))
    pack = pack_id(model.manifest.packs[0])
    other = f"{(int(pack[0], 16) + 1) % 16:x}{pack[1:]}"
    document = json.loads(decompressed(store.get(model.manifest.key)))
    store.put(model.manifest.key, compressed({**document, "packs": [other]}))
    with pytest.raises(DataError, match="nothing can be removed"):
        collect_packs(store)
    assert store.exists(model.manifest.packs[0])
    assert main(["gc", store.url, "--yes"]) == 1
    told = capsys.readouterr().out
    assert "nothing can be removed" in told and "removed nothing" in told


@pytest.mark.parametrize("name", ["m", "n"])
def test_a_damaged_structure_is_written_by_the_push_that_its_error_asks_for(
    store: LocalStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortened one is written by any push of such a network, one with other bits by a push of the same model."""
    monkeypatch.setattr(opening, "_KEPT", 0)  # as in another process
    monkeypatch.setattr(opening, "_structures", OrderedDict())
    key = pushed(store, "m", layer("a", ONE)).manifest.structure.key
    whole = store.get(key)
    damaged = whole[:-1] if name == "n" else whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    store.put(key, damaged)
    with pytest.raises(DataError, match="push the model again"):
        open_model(store, "m")
    pushed(store, name, layer("a", ONE))
    assert store.get(key) == whole
    assert not verify_model(store, "m").damages and not verify_model(store, name).damages


def test_a_damaged_tag_is_named_anew(store: LocalStore) -> None:
    pushed(store, "m", layer("a", ONE))
    pushed(store, "m", layer("a", TWO))
    add_tag(store, "m", "best", 1)
    for damage in (b"", b"[]", b'{"version":"x"}'):
        newest = store.list_keys("models/m/tags/best")[-1]
        store.put(newest, damage)
        with pytest.raises(DataError, match=r"name a version with 'hapi tag .*/m@VERSION best'"):
            list_tags(store, "m")
        add_tag(store, "m", "best", 2)
        assert list_tags(store, "m")["best"].version == 2


def test_a_damaged_version_gets_no_tag(store: LocalStore) -> None:
    model = pushed(store, "m", layer("a", ONE))
    document = json.loads(decompressed(store.get(model.manifest.key)))
    store.put(model.manifest.key, compressed({**document, "created": "another day"}))
    with pytest.raises(DataError, match="its checksum does not fit"):
        add_tag(store, "m", "best", 1)
    assert list_tags(store, "m") == {}
    remove_model(store, "m@1")
    assert model.manifest.packs[0] in [info.key for info in collect_packs(store)]


def test_what_a_dead_push_left_damaged_does_not_stop_collections(store: LocalStore) -> None:
    pushed(store, "m", layer("a", ONE))
    key = f"{JOURNAL}/{len(store.list_keys(JOURNAL)) + 1:08}.json"
    for damage in (b"{", b"{}", b'{"push":[]}', b'{"versions":[]}', b'{"versions":{"m":["1"]},"created":0}'):
        store.put(key, damage)
        with store.lock(push_lock("a" * 24)), pytest.raises(DataError, match="wait until no push runs"):
            collect_packs(store)
    assert collect_packs(store) == ()
    with store.lock(push_lock("a" * 24)):
        assert collect_packs(store) == ()  # the entry is summed up


def test_a_look_at_what_a_dead_push_left_changes_nothing(store: LocalStore) -> None:
    """``hapi gc`` without ``--yes`` also looks into stores that take no write, and waits for nobody it cannot see."""
    for number, owner in enumerate((dead(), elsewhere(3600.0))):
        push = f"{number:024}"
        content = push_tensors(store, f"m{number}", [layer("a", (ONE, TWO)[number])]).model.manifest
        store.delete(content.key)
        append(store, {"push": push, "packs": [pack_id(content.packs[0])], "structures": []})
        store.put(push_lock(push), owner.to_bytes() + b"\n" + b"0" * 20)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    found = [info.key for info in collect_packs(store, dry_run=True)]
    assert content.packs[0] not in found and sum(key.startswith(PACKS) for key in found) == 1
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


def test_a_tag_never_names_a_later_version_of_the_same_number(store: LocalStore) -> None:
    pushed(store, "m", layer("a", ONE))
    second = pushed(store, "m", layer("a", TWO))
    add_tag(store, "m", "best", 2)
    store.delete(second.manifest.key)
    assert pushed(store, "m", layer("a", THREE)).reference == "m@2"
    with pytest.raises(NotFoundError, match=r"names version 2 of digest .* which is not in .*'hapi tag "):
        open_model(store, "m@best")
    assert [d.where for d in verify_model(store, "m").damages] == ["models/m/tags/best"]


@pytest.mark.parametrize("removing", ["rm", "replace"])
def test_a_version_that_is_tagged_while_it_is_removed(store: LocalStore, removing: str) -> None:
    """The tag waits for the removal, and says that there is no such version."""
    pushed(store, "m", layer("a", ONE))
    pushed(store, "m", layer("a", TWO))
    errors: list[Exception] = []

    def tag() -> None:
        try:
            add_tag(store, "m", "best", 1)
        except (NotFoundError, ConflictError) as error:
            errors.append(error)

    tagging = threading.Thread(target=tag)

    def meanwhile() -> None:
        tagging.start()
        tagging.join(0.3)
        assert tagging.is_alive() and not list_tags(store, "m")

    other: Any = Meanwhile(store, meanwhile)
    if removing == "rm":
        remove_model(other, "m@1")
    else:
        drop_versions(other, "m", 2)
    tagging.join(240)
    assert [type(error) for error in errors] == [NotFoundError]
    assert list_versions(store, "m") == [2] and not list_tags(store, "m")
