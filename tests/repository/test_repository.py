"""Pushed models: written in layer order, read by range, verified; and what the server makes of a reference."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.stores import CountingStore, is_weights
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
from hapi.repository.manifest import ModelManifest
from hapi.repository.pushed import PushedModel
from hapi.repository.repository import (
    StoredModel,
    list_models,
    materialise,
    open_model,
    push,
    store_reference,
    zoo_reference,
)
from hapi.repository.weights_file import TensorEntry
from hapi.store.local import LocalStore
from hapi.store.locking.locks import LeaseLostError
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


def weights_file(folder: Path, name: str = "net") -> Path:
    return next((folder / "models" / name).glob("push-*/weights.safetensors"))


def test_the_file_is_safetensors_in_layer_order(store: CountingStore, pushed_folder: Path) -> None:
    model = net()
    by_library = load_file(weights_file(pushed_folder))
    assert all(torch.equal(by_library[n], model.tensors.get(n)) for n in model.tensor_names(0, len(model)))
    stored = open_model(store, "net")
    names = model.tensor_names(0, len(model))
    assert list(stored.manifest.tensors) == names
    entries = [stored.manifest.tensors[n] for n in names]
    assert all(a.stop == b.start for a, b in pairwise(entries))
    assert stored.manifest.default_freeze == 11 and stored.manifest.classes == 10
    assert list(stored.manifest.digests) == model.prefix_digests()


@pytest.mark.parametrize("split", [1, 4, 7, 11, 13])
def test_server_and_trainer_read_their_layers_and_no_others(store: CountingStore, split: int) -> None:
    original = net()
    stored = open_model(store, "net")
    client = stored.layered()
    reference = store_reference(stored, client, split)
    assert reference.digest == original.prefix_digest(split)
    front = materialise(ModelReference.from_json(reference.to_json()), split, store)
    wanted = [stored.manifest.tensors[n] for n in original.tensor_names(0, split)]
    assert (
        store.bytes_read
        == sum(e.nbytes for e in wanted)
        == prefix_bytes(front, split)
        == front.resident_bytes()
    )
    assert (
        min(r[1] for r in store.ranges) == wanted[0].start
        and max(r[2] for r in store.ranges) == wanted[-1].stop
    )
    assert len(store.ranges) < max(2, len(wanted) / 4)  # neighbours are read together

    store.ranges.clear()
    read = stored.load(client, split, len(client))
    rest = [stored.manifest.tensors[n] for n in original.tensor_names(split, len(original))]
    assert store.bytes_read == read == sum(e.nbytes for e in rest)

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
    monkeypatch.setattr("hapi.repository.pushed.resize_head", lambda *a: pytest.fail("a head was made"))
    with pytest.raises(ConflictError, match="was pushed with 13 layers, but resnet18 has 14"):
        PushedModel(replace(manifest, layers=manifest.layers[:-1])).layered(num_classes=3)


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
    front = materialise(reference, 11, store)
    assert front.output_shapes()[11] == (512, 2, 2)
    assert reference.digest != store_reference(stored, stored.layered(), 11).digest


def test_a_description_from_a_server_is_enough_for_the_trainer(store: CountingStore) -> None:
    stored = open_model(store, "net")
    remote = PushedModel.from_json(json.loads(json.dumps(stored.to_json())))
    client = remote.layered()

    def fetch(entries: object) -> object:
        for entry in entries:  # type: ignore[attr-defined]
            yield entry.name, stored.read_tensor(entry.name)

    remote.load_from(fetch, client, 11, 14)  # type: ignore[arg-type]
    assert torch.equal(client.tensors.get("fc.weight"), net().tensors.get("fc.weight"))
    entry = stored.tensor_spec("fc.weight")
    assert (entry.dtype, entry.shape) == ("float32", (10, 512))
    with pytest.raises(NotFoundError, match=r"no tensor 'fc\.nothing'"):
        stored.read_tensor("fc.nothing")
    with pytest.raises(DataError, match="did not come"):
        remote.load_from(lambda entries: [], remote.layered(), 11, 14)
    with pytest.raises(DataError, match=r"tensor 'fc\.\w+' .*damaged"):
        remote.load_from(
            lambda entries: [(e.name, memoryview(bytes(e.nbytes))) for e in entries], remote.layered(), 13, 14
        )


def test_a_flipped_byte_names_the_tensor(pushed_folder: Path, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    stored = push(store, "net", net(), SPEC)
    entry = stored.manifest.tensors["layer1.0.conv2.weight"]
    path = weights_file(tmp_path)
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
    with pytest.raises(DataError, match=r"has .* bytes, .* or more are needed; push the model again"):
        stored.load(stored.layered(), 0, 11)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_manifest_is_found(pushed_folder: Path, position: float, bit: int) -> None:
    data = bytearray((pushed_folder / "models/net/model.json").read_bytes())
    good = ModelManifest.from_bytes(bytes(data), "model.json")
    data[int(position * len(data))] ^= 1 << bit
    try:
        assert ModelManifest.from_bytes(bytes(data), "model.json") == good  # white space
    except DataError as error:
        assert str(error).startswith("model.json is ")


@pytest.mark.parametrize("document", [None, [], {}, {"format": 2}, "x"])
def test_other_documents_are_refused(document: object) -> None:
    with pytest.raises(BadRequestError):
        PushedModel.from_json(document)


@pytest.mark.parametrize("dtype", [[], {}, 3, None, "complex64"])
def test_an_entry_of_another_type_is_refused(dtype: object) -> None:
    entry = TensorEntry("a", "float32", (2,), 8, "0" * 32).to_json()
    assert TensorEntry.from_json("a", entry).nbytes == 8
    with pytest.raises(BadRequestError, match=r"dtype .* is not one of"):
        TensorEntry.from_json("a", {**entry, "dtype": dtype})


def test_replacing_needs_to_be_said_and_leaves_one_push(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    first = push(store, "net", net(), SPEC)
    with pytest.raises(ConflictError, match=r"'net' is already in .*--replace"):
        push(store, "net", net(), SPEC)
    other = ModelSpec(**{**SPEC.__dict__, "weights": "random:5"})
    second = push(store, "net", build(other), other, replace_existing=True)
    assert len(store.list_names("models/net")) == 1
    with pytest.raises(ConflictError, match=f"digest {second.digest} here, not {first.digest}"):
        open_model(store, "net", first.digest)
    with pytest.raises(ConflictError, match="was replaced while it was read"):
        first.load(first.layered(), 0, 1)
    assert open_model(store, "net", second.digest).digest == second.digest


def test_the_same_pushed_again_is_read_on(tmp_path: Path) -> None:
    """Also when its weights lie at other places, and repair of damage is one more push."""
    store = LocalStore(str(tmp_path))
    first = push(store, "net", net(), SPEC)
    weights = tmp_path / first.manifest.weights_key
    weights.write_bytes(weights.read_bytes()[:-1])
    model = first.layered()
    with pytest.raises(DataError, match=r"'net'.*are needed; push the model again with --replace"):
        first.load(model, 0, len(model))
    weights.unlink()
    with pytest.raises(DataError, match=r"'net'.*has 0 bytes"):
        first.load(first.layered(), 0, 1)
    push(store, "net", net(), SPEC, replace_existing=True)
    assert first.load(model, 0, len(model)) > 0 and not any(t.is_meta for t in model.module.parameters())
    store.delete("models/net/model.json")
    with pytest.raises(ConflictError, match="removed"):
        open_weights(first, store)


def open_weights(stored: StoredModel, store: LocalStore) -> None:
    """Read all weights after their file is gone."""
    store.delete(stored.manifest.weights_key)
    model = stored.layered()
    stored.load(model, 0, len(model))


def test_a_killed_push_leaves_no_model(tmp_path: Path) -> None:
    class Dying(LocalStore):
        def put_over(self, key: str, data: bytes, mark: str | None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push(Dying(str(tmp_path)), "net", net(), SPEC)
    store = LocalStore(str(tmp_path))
    with pytest.raises(NotFoundError, match="has no model 'net'"):
        open_model(store, "net")
    assert [m.problem for m in list_models(store)] == ["incomplete: push it again"]
    killed = tmp_path / "models" / "net" / "push-000000000000" / f".w.{'0' * 32}-1-1-1.{'0' * 12}.partial"
    killed.parent.mkdir()
    killed.write_bytes(b"half")
    push(store, "net", net(), SPEC)
    assert len(store.list_names("models/net")) == 1  # what the killed one left is gone
    assert not killed.parent.exists()
    (summary,) = list_models(store)
    assert (summary.name, summary.architecture, summary.layers) == ("net", "resnet18", 14)
    assert summary.to_json()["problem"] is None


def test_a_push_that_has_lost_its_lock_writes_and_removes_nothing_more() -> None:
    """Another one takes the lock by force, and is done, while this one writes the weights."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    put = store.put

    def meanwhile(key: str, data: bytes | bytearray | memoryview) -> None:
        put(key, data)
        if key.endswith("weights.safetensors"):
            store.put = put  # type: ignore[method-assign]
            push(store, "net", net(), SPEC, force_lock=True)
            put(key, data)  # late, after the other has cleaned up

    store.put = meanwhile  # type: ignore[method-assign]
    with pytest.raises(LeaseLostError, match=r"taken over by process|removed by another"):
        push(store, "net", net(), SPEC)
    assert open_model(store, "net").manifest.name == "net"
    left = sorted(info.key for info in store.list())
    assert left == ["models/net/model.json", open_model(store, "net").manifest.weights_key]
    push(store, "net", net(), SPEC, replace_existing=True)
    assert sorted(info.key.rpartition("/")[2] for info in store.list()) == [
        "model.json",
        "weights.safetensors",
    ]


def test_weights_that_go_before_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    put = store.put

    def without(key: str, data: bytes | bytearray | memoryview) -> None:
        put(key, data if not key.endswith("weights.safetensors") else bytes(data)[:-1])

    monkeypatch.setattr(store, "put", without)
    with pytest.raises(DataError, match=r"weights.safetensors has \d+ bytes instead of \d+"):
        push(store, "net", net(), SPEC)
    assert not store.exists("models/net/model.json")


def test_zoo_references(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    model = net()
    reference = ModelReference.from_json(zoo_reference(SPEC, model, 11).to_json())
    front = materialise(reference, 11, store)
    assert front.resident_bytes() == prefix_bytes(front, 11) == prefix_bytes(model, 11)
    assert front.tensors.get("fc.weight").is_meta and front.tensors.get("layer4.1.bn1.running_mean").is_meta
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(front.segment(0, 11, frozen=True)(x), model.segment(0, 11, frozen=True)(x))
    other = ModelReference(**{**reference.__dict__, "weights": "random:5"})
    with pytest.raises(
        ConflictError, match=rf"digest [0-9a-f]{{32}} here, but the request expects {reference.digest}"
    ):
        materialise(other, 11, store)
    with pytest.raises(ConflictError):
        materialise(reference, 10, store)
    with pytest.raises(UnprocessableError, match="resnet18 has layers 1 to 14"):
        materialise(reference, 15, store)
    with pytest.raises(ModelError, match="a file cannot be named in a request"):
        materialise(ModelReference(**{**reference.__dict__, "weights": "x.pth"}), 11, store)
    with pytest.raises(ModelError, match="--allow-model"):
        materialise(ModelReference(**{**reference.__dict__, "name": "os:getcwd"}), 11, store)
    with pytest.raises(NotFoundError, match=r"has no model 'none'"):
        materialise(ModelReference(**{**reference.__dict__, "source": "store", "name": "none"}), 1, store)
    with pytest.raises(ModelError, match="push the model into the store"):
        zoo_reference(ModelSpec(**{**SPEC.__dict__, "weights": "/tmp/x.pth"}), model, 11)


def test_two_fronts_of_one_model_are_apart(store: CountingStore) -> None:
    stored = open_model(store, "net")
    reference = store_reference(stored, stored.layered(), 4)
    one, two = materialise(reference, 4, store), materialise(reference, 4, store)
    with torch.no_grad():
        one.tensors.get("conv1.weight").zero_()
    assert not torch.equal(one.tensors.get("conv1.weight"), two.tensors.get("conv1.weight"))


def test_a_model_that_is_not_loaded_is_not_pushed(store: CountingStore, tmp_path: Path) -> None:
    stored: StoredModel = open_model(store, "net")
    with pytest.raises(ModelError, match="is not loaded"):
        push(LocalStore(str(tmp_path)), "other", stored.layered(), SPEC)
    with pytest.raises(BadRequestError):
        push(LocalStore(str(tmp_path)), "../x", layered(nn.Linear(2, 2), (2,)), SPEC)
