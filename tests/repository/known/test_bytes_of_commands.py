"""Bytes and requests of pushes, ``hapi show`` and ``hapi ls`` in stores that have grown, on machines old and new."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.stores import CountingRemote, flip

from hapi.cli import ls
from hapi.cli.main import main
from hapi.cli.models import show
from hapi.repository import opening
from hapi.repository.entries import SourceTensor
from hapi.repository.known.shared_heads import MIN_ADDED
from hapi.repository.opening import list_models, open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.index import HEAD_BYTES, PackIndex
from hapi.repository.packs.place import PACKS
from hapi.repository.push import Pushed, SourceLayer, push_tensors
from hapi.repository.relatives import relatives
from hapi.repository.verify import verify_model
from hapi.repository.versions import version_key
from hapi.store.base import ObjectStore
from hapi.store.local import LocalStore

TAIL, BACKBONE = 20_000, 400_000


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_structures", type(opening._structures)())


def fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", tempfile.mkdtemp(dir=tmp_path))
    another_process(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> CountingRemote:
    return CountingRemote(tmp_path / "store")


def layer(name: str, nbytes: int, mark: int) -> SourceLayer:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(mark.to_bytes(8, "little"))
        yield memoryview(bytes(nbytes - 8))

    return SourceLayer(name, (SourceTensor(f"{name}.weight", "uint8", (nbytes,), pieces),))


def fine_tune(store: ObjectStore, number: int) -> Pushed:
    layers = [*(layer(f"l{n}", BACKBONE, n) for n in range(3)), layer("head", TAIL, 1000 + number)]
    return push_tensors(store, f"tune{number}", layers)


def counts_of(store: CountingRemote, number: int) -> tuple[int, dict[str, int]]:
    store.reset()
    assert fine_tune(store, number).written == TAIL
    return store.bytes_read, dict(store.requests)


@pytest.mark.parametrize(
    ("first", "last"), [(4, 14), pytest.param(10, 50, marks=pytest.mark.slow)], ids=["15th", "51st"]
)
def test_a_late_push_reads_no_more_than_an_early_one(
    store: CountingRemote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    written = [fine_tune(store, number).written for number in range(first)]
    assert written == [3 * BACKBONE + TAIL, *[TAIL] * (first - 1)]
    early, early_requests = counts_of(store, first)
    for number in range(first + 1, last):
        fine_tune(store, number)
    late, requests = counts_of(store, last)
    early_requests["list"] += last >= MIN_ADDED  # of headers that are kept together
    assert requests == early_requests and sum(requests.values()) < 45, (early_requests, requests)
    assert "range" not in requests and late <= early + 200 < TAIL / 10, (early, late)

    fresh_machine(tmp_path, monkeypatch)
    read, requests = counts_of(store, last + 1)
    count = last + 1
    assert read <= min(count, MIN_ADDED) * HEAD_BYTES + count * 600  # beginnings of packs, headers together
    assert requests["range"] <= min(count, MIN_ADDED) and requests["get"] <= 3, requests
    print(f"read {read} bytes in {sum(requests.values())} requests")


def test_a_push_believes_neither_a_pack_that_is_gone_nor_one_that_was_cut(store: CountingRemote) -> None:
    fine_tune(store, 0)
    known = PackIndex.read(store)
    (backbone,) = {place.pack for places in known.layers.values() for place in places.values()}
    key = f"{PACKS}/{backbone}.safetensors"
    whole = store.get(key)
    store.put(key, whole[:-1])
    assert fine_tune(store, 1).written > BACKBONE
    store.delete(key)
    assert fine_tune(store, 2).written >= TAIL
    assert not verify_model(store, "tune2").damages


def test_a_pack_that_is_gone_and_still_listed(store: CountingRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    fine_tune(store, 0)
    fine_tune(store, 1)
    listed, list_now = store.list(PACKS), store.list
    store.delete(max(listed, key=lambda info: info.size).key)
    monkeypatch.setattr(store, "list", lambda prefix="": listed if prefix == PACKS else list_now(prefix))
    assert fine_tune(store, 2).written == 3 * BACKBONE + TAIL
    assert not verify_model(store, "tune2").damages


def test_a_push_after_a_collection_relies_on_nothing_that_went(store: CountingRemote) -> None:
    fine_tune(store, 0)
    store.delete(version_key("tune0", 1))
    collect_packs(store)
    assert not store.list(PACKS)
    assert fine_tune(store, 1).written == 3 * BACKBONE + TAIL
    assert not verify_model(store, "tune1").damages


def test_a_store_made_anew_at_its_place_is_another_one(store: CountingRemote) -> None:
    for number in range(3):
        fine_tune(store, number)
    for info in store.list():
        store.delete(info.key)
    for number in range(3):
        assert fine_tune(store, number).model.reference == f"tune{number}@1"
    assert not verify_model(store, "tune2").damages


def test_a_repair_reads_all_headers(store: CountingRemote) -> None:
    fine_tune(store, 0)
    fine_tune(store, 1)
    store.reset()
    PackIndex.read(store)
    assert store.bytes_read == 0
    PackIndex.read(store, cut_short=True)
    assert store.requests["range"] == 2


def test_a_damaged_header_is_never_kept(store: CountingRemote, home: Path) -> None:
    fine_tune(store, 0)
    (info,) = store.list(PACKS)
    flip(store, info.key, 20)
    for path in home.rglob("*.log"):
        path.unlink()
    assert not PackIndex.read(store).sizes
    flip(store, info.key, 20)
    assert PackIndex.read(store).sizes


def copies(store: ObjectStore, count: int) -> None:
    """A model and others of its content, as their pushes leave them."""
    manifest = fine_tune(store, 0).model.manifest
    for number in range(1, count):
        named = replace(manifest, name=f"tune{number}")
        store.put(named.key, named.to_bytes())


def shown(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, object]:
    monkeypatch.setattr(show, "open_store", lambda url: store)
    assert main(["show", "store/tune0", "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_show_reads_as_much_of_200_models_as_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = []
    for count in (1, 200):
        store = CountingRemote(tmp_path / f"of{count}")
        copies(store, count)
        fresh_machine(tmp_path, monkeypatch)
        for _ in range(2):
            store.reset()
            assert shown(store, monkeypatch, capsys)["relatives"] is None
            read.append((store.bytes_read, sum(store.requests.values())))
    alone, alone_warm, many, many_warm = read
    assert many[0] <= alone[0] + 50 and many_warm[0] <= alone_warm[0] + 50
    assert many[1] == alone[1] < 15 and many_warm[1] == alone_warm[1]
    assert many[0] < 10_000


def test_a_related_model_is_opened_without_its_structure(
    store: CountingRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        fine_tune(store, number)
    structure = open_model(store, "tune0").manifest.structure
    whole = store.get(structure.key)
    store.delete(structure.key)
    another_process(monkeypatch)
    assert open_model(store, "tune1").manifest.structure == structure
    # Those who rely on what the store has now see that it is gone.
    assert "is missing" in str(verify_model(store, "tune1").damages[0])
    store.put(structure.key, whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    assert "is damaged" in str(verify_model(store, "tune1").damages[0])
    assert fine_tune(store, 1).written == 0
    assert store.get(structure.key) == whole and verify_model(store, "tune1").sound


@pytest.mark.slow
def test_relatives_are_read_once(
    store: CountingRemote, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies(store, 200)
    store.reset()
    first = shown(store, monkeypatch, capsys, "--relatives")["relatives"]
    cold = store.bytes_read
    store.reset()
    assert shown(store, monkeypatch, capsys, "--relatives")["relatives"] == first
    assert isinstance(first, list) and len(first) == 199
    assert store.bytes_read < cold / 20


@pytest.mark.slow
def test_a_list_reads_each_description_once(
    store: CountingRemote, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copies(store, 60)
    monkeypatch.setattr(ls, "open_store", lambda url: store)

    def listed() -> list[dict[str, object]]:
        store.reset()
        assert main(["ls", "store", "--json"]) == 0
        found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["models"]
        return found

    first, cold = listed(), store.bytes_read
    assert listed() == first and len(first) == 60
    assert store.bytes_read == 0 < cold
    changed = replace(open_model(store, "tune7").manifest, parent="tune0@1", name="tune8")
    store.put(changed.key, changed.to_bytes())
    assert {m["name"] for m in listed() if m["parent"]} == {"tune8"}
    assert [found.problem for found in list_models(store)] == [None] * 60


def test_a_collection_that_packs_anew_is_seen(store: CountingRemote) -> None:
    layers = [layer(f"l{n}", 400_000, n) for n in range(4)]
    push_tensors(store, "large", layers)
    push_tensors(store, "small", layers[:1])
    manifest = open_model(store, "large").manifest
    assert relatives(store, manifest)[0].name == "small"
    store.delete(version_key("large", 1))
    collect_packs(store)
    assert [found.problem for found in list_models(store)] == [None]
    assert relatives(store, manifest)[0].name == "small"


class SparseStore(LocalStore):
    """A folder whose packs are files of zeros behind their headers: they take no room."""

    def put_pieces(self, key: str, size: int, pieces: Iterable[memoryview]) -> None:
        found = iter(pieces)
        self.put(key, bytes(next(found)))
        for _ in found:
            pass
        with self.path_of(key).open("r+b") as file:
            file.truncate(size)


@pytest.mark.slow
def test_a_pushed_model_of_four_billion_parameters_is_shown_under_100_kb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zeros, count = memoryview(bytes(8 << 20)), 0

    def weight(name: str, *shape: int) -> SourceLayer:
        nonlocal count
        count += 1
        mark, nbytes = count, 1
        for side in shape:
            nbytes *= side

        def pieces() -> Iterator[memoryview]:
            yield memoryview(mark.to_bytes(8, "little"))
            for start in range(8, nbytes, len(zeros)):
                yield zeros[: nbytes - start]

        return SourceLayer(name, (SourceTensor(f"{name}.weight", "int8", shape, pieces),))

    width, inner = 2560, 9728
    layers = [weight("model.embed_tokens", 151_936, width)]
    for n in range(36):
        at = f"model.layers.{n}"
        layers += [
            weight(f"{at}.self_attn.{x}_proj", rows, width)
            for x, rows in (("q", 4096), ("k", 1024), ("v", 1024))
        ]
        layers += [weight(f"{at}.self_attn.o_proj", width, 4096)]
        layers += [weight(f"{at}.self_attn.{x}_norm", 128) for x in "qk"]
        layers += [weight(f"{at}.mlp.{x}_proj", inner, width) for x in ("gate", "up")]
        layers += [weight(f"{at}.mlp.down_proj", width, inner)]
        layers += [weight(f"{at}.{x}_layernorm", width) for x in ("input", "post_attention")]
    layers.append(weight("model.norm", width))
    pushed = push_tensors(SparseStore(tmp_path / "store"), "tune0", layers)
    assert pushed.model.manifest.nbytes > 4e9
    fresh_machine(tmp_path, monkeypatch)
    store = CountingRemote(tmp_path / "store")
    found = shown(store, monkeypatch, capsys)
    assert found["bytes"] == pushed.model.manifest.nbytes and found["problem"] is None
    assert store.bytes_read < 50_000 and store.requests["range"] == 0
    print(f"read {store.bytes_read} bytes in {sum(store.requests.values())} requests")
