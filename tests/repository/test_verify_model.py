"""``hapi verify`` of pushed models: each defect is one line, and sound ones have none."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest
from torch import nn

from hapi.cli.main import main
from hapi.errors import NotFoundError
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.zoo.build import ModelSpec
from hapi.repository.opening import open_model
from hapi.repository.push import push
from hapi.repository.verify import verify_model
from hapi.repository.versions import add_tag, model_prefix
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

SPEC = ModelSpec(architecture="squeezenet1_1", weights="random:1", input_shape=(8,))


def small() -> LayeredModel:
    return layered(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (8,))


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pushed")
    push(open_store(str(folder)), "net", small(), SPEC)
    return folder


@pytest.fixture
def store(pushed: Path, tmp_path: Path) -> ObjectStore:
    return open_store(str(shutil.copytree(pushed, tmp_path / "store")))


def findings(store: ObjectStore) -> list[str]:
    return [str(damage) for damage in verify_model(store, "net").damages]


def test_a_sound_model(store: ObjectStore) -> None:
    told: list[tuple[int, int]] = []
    report = verify_model(store, "net", on_progress=lambda tensors, size: told.append((tensors, size)))
    manifest = open_model(store, "net").manifest
    assert (
        report.sound
        and report.samples == 4
        and report.size == manifest.nbytes == sum(size for _, size in told)
    )
    assert report.version == manifest.digest
    with pytest.raises(NotFoundError, match="has no model 'other'"):
        verify_model(store, "other")


def test_every_tensor_of_which_a_bit_is_flipped(store: ObjectStore) -> None:
    manifest = open_model(store, "net").manifest
    for name, entry in manifest.tensors.items():
        key, whole = entry.pack, store.get(entry.pack)
        data = bytearray(whole)
        data[entry.stop - 1] ^= 4
        store.put(key, data)
        (line,) = findings(store)
        place = f"tensor {name!r}, bytes {entry.start}..{entry.stop}"
        assert line == f"{key}: {place}: fails its digest"
        store.put(key, whole)


def test_every_bit_of_a_header(store: ObjectStore) -> None:
    """Tensors are loaded all the same, but no push finds them: one of the same model mends it."""
    model = small()
    key = push(store, "net", model, SPEC).model.manifest.packs[0]
    whole = store.get(key)
    for at in range(0, 8 + int.from_bytes(whole[:8], "little"), 5):
        data = bytearray(whole)
        data[at] ^= 1
        store.put(key, data)
        (line,) = findings(store)
        assert line.startswith(f"{key}: its header is damaged") and "\n" not in line
    assert not push(store, "net", model, SPEC, repair=True).new
    assert not findings(store)


def test_every_bit_of_a_tag(store: ObjectStore) -> None:
    add_tag(store, "net", "best", 1)
    assert not findings(store)
    key = f"{model_prefix('net')}/tags/best/00000001.json"
    whole = store.get(key)
    created = whole.index(b'"created"')
    for at in range(created):  # what is behind says when it was made
        data = bytearray(whole)
        data[at] ^= 1
        store.put(key, data)
        (line,) = findings(store)
        assert line.startswith("models/net/tags/best: ") and "hapi tag" in line and "\n" not in line
    store.put(key, b"damaged")
    assert main(["tag", f"{store.url}/net@1", "best"]) == 0  # as the lines say
    assert not findings(store)


def test_weights_that_are_cut_or_gone_and_what_belongs_to_nothing(store: ObjectStore) -> None:
    manifest = open_model(store, "net").manifest
    key = manifest.packs[-1]
    store.put("models/net/other.safetensors", b"123")
    assert findings(store) == [
        "models/net/other.safetensors: belongs to nothing (3 bytes); it can be removed"
    ]
    store.delete("models/net/other.safetensors")
    whole = store.get(key)
    store.put(key, whole[:-1])
    lost = list(manifest.tensors)[-1]
    assert findings(store) == [f"{key}: has {len(whole) - 1} bytes instead of {len(whole)}; lost: {lost!r}"]
    store.delete(key)
    assert findings(store) == [f"{key}: missing, with 2 tensors"]
    store.delete(manifest.structure.key)
    (line,) = findings(store)
    assert line.startswith(f"{manifest.key}: ") and line.endswith("is missing; push the model again")
    store.put(manifest.key, b"{")
    (line,) = findings(store)
    assert line.startswith(f"{manifest.key}: ") and "damaged" in line


def test_the_command(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ((), ("--model",), ("--quiet",)):
        assert main(["verify", f"{store.url}/net", *flags]) == 0
        assert "net: 4 tensors, 0.0 MB read" in (out := capsys.readouterr().out) and out.endswith(": sound\n")
    manifest = open_model(store, "net").manifest
    key = manifest.packs[-1]
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, data)
    assert main(["verify", f"{store.url}/net"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "fails its digest" in lines[0]
    assert lines[1].endswith("DAMAGED, 1 findings; push the model again with --repair")
    assert main(["verify", f"memory://{uuid.uuid4().hex}/net", "--model"]) == 1
    assert "has no model 'net'" in capsys.readouterr().err
