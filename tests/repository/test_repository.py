"""Pushed models: written in layer order, read by range, verified; and what the server makes of a reference."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.front_tools import loaded_front
from support.stores import CountingStore, DyingStore, Killed, is_weights
from torch import nn

from hapi.errors import (
    BadRequestError,
    ConflictError,
    DataError,
    ModelError,
    NotFoundError,
    UnprocessableError,
)
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.built import prefix_bytes
from hapi.repository.entries import TensorEntry, TensorForm
from hapi.repository.loading.load import Loaded, plan_of, verified
from hapi.repository.loading.plan import ReadTraits
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import list_models, open_model
from hapi.repository.prefix import store_reference, zoo_reference
from hapi.repository.push import push
from hapi.repository.pushed import PushedModel
from hapi.repository.stored import StoredModel
from hapi.repository.structure import ModelStructure
from hapi.repository.versions import (
    add_tag,
    compressed,
    decompressed,
    document_checksum,
    drop_versions,
    list_tags,
    version_key,
)
from hapi.store.local import LocalStore
from hapi.store.open import open_store
from hapi.wire.references import ModelReference

SPEC = ModelSpec(architecture="resnet18", weights="random:4", input_shape=(3, 32, 32), num_classes=10)


@cache
def net() -> LayeredModel:
    """The model of ``SPEC``, built once. It stays as it is."""
    return build(SPEC)


@pytest.fixture(scope="module")
def pushed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    push(LocalStore(str(folder)), "net", net(), SPEC)
    return folder


@pytest.fixture
def store(pushed_folder: Path) -> CountingStore:
    return CountingStore(pushed_folder, is_weights)


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "repository/packs").glob("*.safetensors"))


def test_packs_are_safetensors_in_layer_order(store: CountingStore, pushed_folder: Path) -> None:
    model = net()
    by_library = {path: load_file(path) for path in packs(pushed_folder)}
    stored = open_model(store, "net")
    names = model.tensor_names(0, len(model))
    assert list(stored.manifest.tensors) == names
    entries = [stored.manifest.tensors[n] for n in names]
    assert len(by_library) == 2  # up to the default freeze, and after it
    assert [e.pack for e in entries] == sorted((e.pack for e in entries), key=[e.pack for e in entries].index)
    assert all(0 <= b.start - a.stop < 64 for a, b in pairwise(entries) if a.pack == b.pack)
    for entry in entries:
        tensors = by_library[pushed_folder / entry.pack]
        (found,) = [t for n, t in tensors.items() if n.endswith(entry.digest)][:1]
        assert torch.equal(found, model.tensors.get(entry.name))
    assert stored.manifest.default_freeze == 11 and stored.manifest.classes == 10
    assert list(stored.manifest.digests) == model.prefix_digests()


def first_of_each_content(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Equal tensors are read once."""
    return list({entry.digest: entry for entry in reversed(entries)}.values())


@pytest.mark.parametrize("split", [1, 4, 7, 11, 13])
def test_server_and_trainer_read_their_layers_and_no_others(store: CountingStore, split: int) -> None:
    original = net()
    stored = open_model(store, "net")
    client = stored.layered()
    reference = store_reference(stored, client, split)
    assert reference.digest == original.prefix_digest(split)
    front = loaded_front(ModelReference.from_json(reference.to_json()), split, store)
    wanted = [stored.manifest.tensors[n] for n in original.tensor_names(0, split)]
    contents = first_of_each_content(wanted)
    assert store.bytes_read == sum(e.nbytes for e in contents)
    assert sum(e.nbytes for e in wanted) == prefix_bytes(front, split) == front.resident_bytes()
    for pack in {e.pack for e in contents}:
        stop = max(e.stop for e in contents if e.pack == pack)
        assert max(r[2] for r in store.ranges if r[0] == pack) == stop
    ranges = plan_of(wanted, ReadTraits(8 << 20, 8, 256 << 10)).ranges
    assert len(ranges) < max(2, len(wanted) / 4)  # neighbours are read together

    store.ranges.clear()
    read = stored.load(client, split, len(client))
    rest = [stored.manifest.tensors[n] for n in original.tensor_names(split, len(original))]
    assert read == sum(e.nbytes for e in rest)
    assert store.bytes_read == sum(e.nbytes for e in first_of_each_content(rest))

    x = torch.rand(2, 3, 32, 32)
    middle = front.segment(0, split, frozen=True)(x)
    out = client.segment(split, len(client), frozen=True)(middle)
    assert torch.equal(out, original.segment(0, len(original), frozen=True)(x))


def test_another_head_is_fresh_and_not_read(store: CountingStore) -> None:
    stored = open_model(store, "net")
    client = stored.layered(num_classes=3, head_seed=5)
    assert client.output_shapes()[-1] == (3,) and client.fresh == {"fc.weight", "fc.bias"}
    assert stored.load(client, 13, 14) == 0 and store.ranges == []
    twin = stored.layered(num_classes=3, head_seed=5)
    assert torch.equal(client.tensors.get("fc.weight"), twin.tensors.get("fc.weight"))
    assert client.prefix_digest(13) == open_model(store, "net").layered().prefix_digest(13)


MANY = 2**31 - 1
"""Classes of a head that no memory holds."""


def test_a_number_of_classes_that_the_pushed_head_does_not_have(store: CountingStore) -> None:
    manifest = replace(open_model(store, "net").manifest, classes=MANY)
    with pytest.raises(
        ConflictError, match=rf"says that it has {MANY} classes, but tensor 'fc.\w+' .* has 10"
    ):
        PushedModel(manifest).layered(num_classes=3)
    headless = {name: entry for name, entry in manifest.tensors.items() if not name.startswith("fc.")}
    with pytest.raises(ConflictError, match="was pushed without tensor 'fc"):
        PushedModel(replace(manifest, tensors=headless)).layered()


def test_layers_of_other_names_are_refused_before_a_head_is_made(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = open_model(store, "net").manifest
    shorter = replace(manifest.structure, layers=manifest.layers[:-1])
    monkeypatch.setattr("hapi.repository.pushed.resize_head", lambda *a: pytest.fail("a head was made"))
    with pytest.raises(ConflictError, match="was pushed with 13 layers, but resnet18 has 14"):
        PushedModel(replace(manifest, structure=shorter)).layered(num_classes=3)


def test_the_pushed_head_takes_no_memory_before_it_is_loaded(store: CountingStore) -> None:
    """However large it is said to be: it is loaded for as many classes as the data has, or not at all."""
    manifest = open_model(store, "net").manifest
    tensors = {
        name: replace(entry, shape=(MANY, *entry.shape[1:])) if name.startswith("fc.") else entry
        for name, entry in manifest.tensors.items()
    }
    huge = PushedModel(replace(manifest, classes=MANY, tensors=tensors))
    with pytest.raises(ConflictError, match=r"no longer makes layer 14 \(fc\)"):
        huge.layered()
    client = huge.layered(num_classes=3, head_seed=5)
    usual = open_model(store, "net").layered(num_classes=3, head_seed=5)
    assert torch.equal(client.tensors.get("fc.weight"), usual.tensors.get("fc.weight"))


def test_another_input_shape_than_pushed(store: CountingStore) -> None:
    stored = open_model(store, "net")
    client = stored.layered(input_shape=(3, 64, 64))
    reference = store_reference(stored, client, 11)
    front = loaded_front(reference, 11, store)
    assert front.output_shapes()[11] == (512, 2, 2)
    assert reference.digest != store_reference(stored, stored.layered(), 11).digest


def test_a_description_from_a_server_is_enough_for_the_trainer(store: CountingStore) -> None:
    stored = open_model(store, "net")
    structure = ModelStructure.from_json(json.loads(json.dumps(stored.manifest.structure.to_json())))
    document = json.loads(json.dumps(stored.manifest.to_json()))
    remote = PushedModel(ModelManifest.from_json(document, structure, answer=True))
    later = {**document, "of_later": 1, "spec": {**document["spec"], "of_later": 1}}
    later["checksum"] = document_checksum(later)
    assert ModelManifest.from_json(later, structure, answer=True) == remote.manifest
    with pytest.raises(BadRequestError, match="unknown field 'of_later'"):
        ModelManifest.from_json(later, structure)
    client = remote.layered()

    def fetch(entries: Sequence[TensorEntry]) -> Iterator[Loaded]:
        for entry in entries:
            raw = torch.frombuffer(bytearray(stored.read_tensor(entry.name)), dtype=torch.uint8)
            yield entry, verified(entry, raw, remote.damaged)

    remote.load_from(fetch, client, 11, 14)
    assert torch.equal(client.tensors.get("fc.weight"), net().tensors.get("fc.weight"))
    entry = stored.tensor_spec("fc.weight")
    assert (entry.dtype, entry.shape) == ("float32", (10, 512))
    with pytest.raises(NotFoundError, match=r"no tensor 'fc\.nothing'"):
        stored.read_tensor("fc.nothing")
    with pytest.raises(DataError, match="did not come"):
        remote.load_from(lambda entries: [], remote.layered(), 11, 14)
    with pytest.raises(DataError, match=r"tensor 'fc\.\w+' .*damaged"):
        remote.load_from(
            lambda entries: (
                (e, verified(e, torch.zeros(e.nbytes, dtype=torch.uint8), remote.damaged)) for e in entries
            ),
            remote.layered(),
            13,
            14,
        )


def test_a_flipped_byte_names_the_tensor(pushed_folder: Path, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    stored = push(store, "net", net(), SPEC).model
    entry = stored.manifest.tensors["layer1.0.conv2.weight"]
    path = tmp_path / entry.pack
    data = bytearray(path.read_bytes())
    data[entry.start + 11] ^= 0x10
    path.write_bytes(data)
    stored = open_model(store, "net")
    with pytest.raises(
        DataError, match=r"tensor 'layer1\.0\.conv2\.weight' .* damaged; push the model again"
    ):
        stored.load(stored.layered(), 0, 11)
    stored.load(stored.layered(), 0, 4)  # the layers before it are whole
    path.write_bytes(bytes(data[: entry.start]))
    with pytest.raises(DataError, match=r"it lost \d+ tensors from 'layer1\.0\.conv2\.weight' on; push the"):
        stored.load(stored.layered(), 0, 11)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_manifest_is_found(pushed_folder: Path, position: float, bit: int) -> None:
    good = open_model(LocalStore(str(pushed_folder)), "net").manifest
    data = bytearray((pushed_folder / good.key).read_bytes())
    assert ModelManifest.from_bytes(bytes(data), good.structure, "model.json") == good
    data[int(position * len(data))] ^= 1 << bit
    try:
        assert (
            ModelManifest.from_bytes(bytes(data), good.structure, "model.json") == good
        )  # in gzip's own header
    except DataError as error:
        assert str(error).startswith("model.json is ")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_structure_is_found(pushed_folder: Path, position: float, bit: int) -> None:
    structure = open_model(LocalStore(str(pushed_folder)), "net").manifest.structure
    data = bytearray((pushed_folder / structure.key).read_bytes())
    assert ModelStructure.from_stored(bytes(data), structure.digest, "it") == structure
    data[int(position * len(data))] ^= 1 << bit
    try:
        found = ModelStructure.from_stored(bytes(data), structure.digest, "it")
    except DataError as error:
        assert str(error).startswith("it is damaged")
    else:  # of gzip's header, such as the time
        assert found == structure and position * len(data) < 10
    plain = bytearray(structure.to_bytes())
    plain[int(position * len(plain))] ^= 1 << bit
    with pytest.raises(DataError, match=r"^it is damaged"):
        ModelStructure.from_bytes(bytes(plain), structure.digest, "it")


@pytest.mark.parametrize("document", [None, [], {}, {"format": 3}, "x"])
def test_other_documents_are_refused(store: CountingStore, document: object) -> None:
    with pytest.raises(BadRequestError):
        ModelManifest.from_json(document, open_model(store, "net").manifest.structure)
    with pytest.raises(BadRequestError):
        ModelStructure.from_json(document)


@pytest.mark.parametrize(
    ("other", "advice"), [(1, "a newer hapi wrote it: update this one"), (-1, "push it again")]
)
def test_a_version_of_another_format_says_what_to_do(store: CountingStore, other: int, advice: str) -> None:
    key = version_key("net", 1)
    sound = store.get(key)
    document = json.loads(decompressed(sound))
    document["format"] += other
    store.put(key, compressed({**document, "checksum": document_checksum(document)}))
    try:
        with pytest.raises(DataError, match=advice) as caught:
            open_model(store, "net")
    finally:
        store.put(key, sound)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [[], {}, 3, None, "complex128"])
def test_an_entry_of_another_type_is_refused(dtype: object) -> None:
    assert TensorForm.from_json(["a", "float32", [2]]).nbytes == 8
    with pytest.raises(BadRequestError, match=r"dtype .* is not one of"):
        TensorForm.from_json(["a", dtype, [2]])


def test_a_push_adds_a_version(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    first = push(store, "net", net(), SPEC)
    again = push(store, "net", net(), SPEC)
    assert first.new and not again.new and again.written == 0
    assert again.model.manifest == first.model.manifest
    other = ModelSpec(**{**SPEC.__dict__, "weights": "random:5"})
    second = push(store, "net", build(other), other)
    assert [m.reference for m in (first.model, second.model)] == ["net@1", "net@2"]
    assert open_model(store, "net").digest == second.model.digest
    assert open_model(store, "net@1").digest == first.model.digest
    assert open_model(store, f"net@{first.model.digest[:8]}").reference == "net@1"
    with pytest.raises(ConflictError, match=f"digest {second.model.digest} here, not {first.model.digest}"):
        open_model(store, "net", first.model.digest)
    with pytest.raises(NotFoundError, match=r"has no version 3 in .* it has 1 to 2"):
        open_model(store, "net@3")
    assert first.model.load(first.model.layered(), 0, 1) > 0
    assert drop_versions(store, "net", before=2) == [1]
    with pytest.raises(NotFoundError, match="no version 1"):
        open_model(store, "net@1")


def test_a_file_under_another_name_adds_no_version(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    names = ("model.safetensors", "elsewhere/best.safetensors")
    pushes = [push(store, "net", net(), replace(SPEC, weights=name)) for name in names]
    assert [pushed.new for pushed in pushes] == [True, False]
    assert push(
        store, "net", net(), SPEC
    ).new  # other weights by the library's name: what a reader is told differs


@pytest.mark.slow
def test_tags_are_appended(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    push(store, "net", net(), SPEC)
    other = ModelSpec(**{**SPEC.__dict__, "weights": "random:5"})
    push(store, "net", build(other), other)
    add_tag(store, "net", "best", 1)
    assert open_model(store, "net@best").reference == "net@1"
    assert drop_versions(store, "net", before=2) == []  # the tag holds it
    add_tag(store, "net", "best", 2)
    assert open_model(store, "net@best").reference == "net@2"
    assert {tag.name: tag.version for tag in list_tags(store, "net").values()} == {"best": 2}
    assert len(store.list_keys("models/net/tags/best")) == 2  # the history stays
    for tag in ("3", "0badc0de", "../x", ""):
        with pytest.raises(BadRequestError):
            add_tag(store, "net", tag, 1)
    with pytest.raises(NotFoundError, match="no tag or digest 'last'"):
        open_model(store, "net@last")
    (summary,) = list_models(store)
    assert (summary.name, summary.architecture, summary.layers) == ("net", "resnet18", 14)
    assert (summary.version, summary.tags, summary.to_json()["problem"]) == (2, ("best",), None)


def test_models_that_share_layers_store_them_once(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    backbone = push(store, "base", net(), SPEC)
    tuned = build(SPEC)
    with torch.no_grad():
        tuned.tensors.get("fc.weight").add_(1)
    pushed = push(store, "tuned", tuned, SPEC, parent="base@1")
    entry = pushed.model.manifest.tensors["fc.weight"]
    assert pushed.written == entry.nbytes + pushed.model.manifest.tensors["fc.bias"].nbytes  # the layer of it
    assert len(packs(tmp_path)) == 3 and pushed.model.manifest.parent == "base@1"
    assert {e.pack for e in backbone.model.manifest.tensors.values()} < {
        e.pack for e in (*backbone.model.manifest.tensors.values(), *pushed.model.manifest.tensors.values())
    }
    model = open_model(store, "tuned").layered()
    open_model(store, "tuned").load(model, 0, len(model))
    assert all(torch.equal(model.tensors.get(n), tuned.tensors.get(n)) for n in tuned.tensor_names(0, 14))


@pytest.mark.slow
def test_repair_mends_what_the_store_has_for_all_models(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    first = push(store, "net", net(), SPEC).model
    whole = {path: path.read_bytes() for path in packs(tmp_path)}
    entry = first.manifest.tensors["layer1.0.conv2.weight"]
    for damaged in (
        flipped(tmp_path / entry.pack, entry.start + 5),
        (tmp_path / entry.pack).read_bytes()[:-900_000],
    ):
        (tmp_path / entry.pack).write_bytes(damaged)
        model = first.layered()
        with pytest.raises(DataError, match=r"'net.*; push the model again with --repair"):
            first.load(model, 0, len(model))
        pushed = push(store, "net", net(), SPEC, repair=True)
        assert not pushed.new and {path: path.read_bytes() for path in packs(tmp_path)} == whole
        assert first.load(first.layered(), 0, len(model)) > 0
    (tmp_path / entry.pack).write_bytes(flipped(tmp_path / entry.pack, entry.start + 5))
    assert not push(store, "net", net(), SPEC).new  # it does not look, and nothing is mended
    assert {path: path.read_bytes() for path in packs(tmp_path)} != whole
    push(store, "net", net(), SPEC, repair=True)
    (tmp_path / entry.pack).unlink()
    with pytest.raises(DataError, match=r"'net.*has 0 bytes.* from 'conv1.weight' on"):
        first.load(first.layered(), 0, 1)
    push(store, "net", net(), SPEC)
    assert {path: path.read_bytes() for path in packs(tmp_path)} == whole
    store.delete(version_key("net", 1))
    (tmp_path / entry.pack).unlink()
    with pytest.raises(ConflictError, match="removed"):
        first.load(first.layered(), 0, 1)


def flipped(path: Path, position: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    return bytes(data)


@pytest.mark.slow
def test_a_push_that_dies_at_any_change_leaves_no_model_and_goes_on(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    written = []
    for changes in range(20):
        try:
            push(DyingStore(store, changes), "net", net(), SPEC)  # type: ignore[arg-type]
            break
        except Killed:
            with pytest.raises(NotFoundError, match="has no model 'net'"):
                open_model(store, "net")
            written.append(len(packs(tmp_path)))
    assert written == sorted(written) and max(written) == 2 and len(written) >= 4
    stored = open_model(store, "net")
    assert stored.load(stored.layered(), 0, 14) > 0


def test_a_pack_that_goes_before_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    put = store.put_pieces

    def without(key: str, size: int, pieces: Iterable[memoryview]) -> None:
        put(key, size, pieces)
        store.delete(key)

    monkeypatch.setattr(store, "put_pieces", without)
    with pytest.raises(DataError, match=r"is gone or too short"):
        push(store, "net", net(), SPEC)
    assert store.list_keys("models/net/versions") == []


def test_zoo_references(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    model = net()
    reference = ModelReference.from_json(zoo_reference(SPEC, model, 11).to_json())
    front = loaded_front(reference, 11, store)
    assert front.resident_bytes() == prefix_bytes(front, 11) == prefix_bytes(model, 11)
    assert front.tensors.get("fc.weight").is_meta and front.tensors.get("layer4.1.bn1.running_mean").is_meta
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(front.segment(0, 11, frozen=True)(x), model.segment(0, 11, frozen=True)(x))
    other = ModelReference(**{**reference.__dict__, "weights": "random:5"})
    with pytest.raises(
        ConflictError, match=rf"digest [0-9a-f]{{32}} here, but the request expects {reference.digest}"
    ):
        loaded_front(other, 11, store)
    with pytest.raises(ConflictError):
        loaded_front(reference, 10, store)
    with pytest.raises(UnprocessableError, match="resnet18 has layers 1 to 14"):
        loaded_front(reference, 15, store)
    with pytest.raises(ModelError, match="a file cannot be named in a request"):
        loaded_front(ModelReference(**{**reference.__dict__, "weights": "x.pth"}), 11, store)
    with pytest.raises(ModelError, match="--allow-model"):
        loaded_front(ModelReference(**{**reference.__dict__, "name": "os:getcwd"}), 11, store)
    with pytest.raises(NotFoundError, match=r"has no model 'none'"):
        loaded_front(ModelReference(**{**reference.__dict__, "source": "store", "name": "none"}), 1, store)
    with pytest.raises(ModelError, match="push the model into the store"):
        zoo_reference(ModelSpec(**{**SPEC.__dict__, "weights": "/tmp/x.pth"}), model, 11)


def test_two_fronts_of_one_model_are_apart(store: CountingStore) -> None:
    stored = open_model(store, "net")
    reference = store_reference(stored, stored.layered(), 4)
    one, two = loaded_front(reference, 4, store), loaded_front(reference, 4, store)
    with torch.no_grad():
        one.tensors.get("conv1.weight").zero_()
    assert not torch.equal(one.tensors.get("conv1.weight"), two.tensors.get("conv1.weight"))


def test_a_model_that_is_not_loaded_is_not_pushed(store: CountingStore, tmp_path: Path) -> None:
    stored: StoredModel = open_model(store, "net")
    with pytest.raises(ModelError, match="is not loaded"):
        push(LocalStore(str(tmp_path)), "other", stored.layered(), SPEC)
    with pytest.raises(BadRequestError):
        push(LocalStore(str(tmp_path)), "../x", layered(nn.Linear(2, 2), (2,)), SPEC)
