"""Fuzzed readers of the model repository; :mod:`fuzz_targets` brings them."""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import tempfile
import uuid
from functools import cache
from pathlib import Path

import xxhash
from fuzz_registry import target

from hapi.models.graph.architecture import ArchitectureGraph
from hapi.models.graph.digest import content_digest
from hapi.models.zoo.build import ModelSpec
from hapi.repository.entries import TensorEntry, TensorForm
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import list_models, open_model
from hapi.repository.packs.index import PackIndex, tensor_name
from hapi.repository.packs.place import pack_key
from hapi.repository.sources.open import open_source
from hapi.repository.structure import LayerEntry, ModelStructure
from hapi.repository.versions import document_checksum, version_key
from hapi.store.base import ObjectStore
from hapi.store.open import open_store
from hapi.store.safetensors import encode_header

RAW, SEALED = b"\0", b"\1"


@cache
def store() -> ObjectStore:
    return open_store(f"memory://{uuid.uuid4().hex}")


def _model_structure() -> ModelStructure:
    return ModelStructure(
        layers=(LayerEntry("conv1", (3, 4, 4), ("a",)),),
        forms=(TensorForm("a", "float32", (2, 3)),),
        identities=("0" * 32, "1" * 32),
        graph=ArchitectureGraph(("[]",), ((0,),)),
    )


def _model_seeds() -> list[bytes]:
    held = bytes(24)
    entry = TensorEntry(
        "a", "float32", (2, 3), content_digest(held), xxhash.xxh3_64_hexdigest(held), pack_key("a" * 32), 64
    )
    manifest = ModelManifest(
        name="fuzzed", version=1, created="", parent=None, structure=_model_structure(),
        spec=ModelSpec(architecture="resnet18"), digests=("0" * 32, "1" * 32), contents=("0" * 32, "1" * 32),
        classes=10, default_freeze=1, tensors={"a": entry},
    )  # fmt: skip
    return [mark + json.dumps(manifest.to_json()).encode() for mark in (RAW, SEALED)]


@target(_model_seeds)
def models(data: bytes) -> None:
    """A version of a model, opened from a store, and each of its tensors read."""
    body = data[1:]
    if data[:1] == SEALED:
        try:
            document = json.loads(body)
            content = {key: value for key, value in document.items() if key != "checksum"}
            body = json.dumps({**content, "checksum": document_checksum(content)}).encode()
        except (ValueError, RecursionError, AttributeError):
            pass
    structure = _model_structure()
    store().put(structure.key, structure.to_stored())
    store().put(version_key("fuzzed", 1), gzip.compress(body, 1) if data[:1] == SEALED else body)
    store().put(pack_key("a" * 32), bytes(64 + 24))
    for summary in list_models(store()):
        json.dumps(summary.to_json())
    model = open_model(store(), "fuzzed")
    json.dumps(model.manifest.to_json())
    for name, entry in list(model.manifest.tensors.items())[:5]:
        if entry.nbytes < 1 << 20:
            model.tensor_spec(name)
            model.read_tensor(name)


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hapi-fuzz-"))


atexit.register(lambda: shutil.rmtree(folder(), ignore_errors=True))


def _checkpoint_seeds() -> list[bytes]:
    head = encode_header([("a.weight", "F32", (2, 3), 24), ("b", "BF16", (), 2)], {"format": "pt"})
    return [head + bytes(26)]


@target(_checkpoint_seeds)
def checkpoints(data: bytes) -> None:
    """A safetensors file that is pushed."""
    (folder() / "m.safetensors").write_bytes(data)
    source = open_source(folder() / "m.safetensors")
    assert sum(len(piece) for tensor in source.tensors.values() for piece in tensor.pieces()) == source.nbytes


def _index_seeds() -> list[bytes]:
    index = {
        "metadata": {"total_size": 26},
        "weight_map": dict.fromkeys(("a.weight", "b"), "shard.safetensors"),
    }
    return [json.dumps(index).encode()]


@target(_index_seeds)
def shard_indices(data: bytes) -> None:
    """The index of a sharded checkpoint that is pushed."""
    (folder() / "shard.safetensors").write_bytes(_checkpoint_seeds()[0])
    (folder() / "m.index.json").write_bytes(data)
    assert open_source(folder() / "m.index.json").nbytes == 26


def _structure_seeds() -> list[bytes]:
    return [_model_structure().to_bytes()]


@target(_structure_seeds)
def structures(data: bytes) -> None:
    """The structure of models, by its digest."""
    structure = ModelStructure.from_bytes(data, content_digest(data), "it")
    assert ModelStructure.from_bytes(structure.to_bytes(), structure.digest, "it") == structure


def _pack_seeds() -> list[bytes]:
    names = [tensor_name("a" * 32, number, 2, f"{number}" * 32) for number in range(2)]
    return [encode_header([(name, "F32", (2, 3), 24) for name in names])]


@target(_pack_seeds)
def packs(data: bytes) -> None:
    """A pack's header, from which pushes tell what a store has."""
    PackIndex().add("a" * 32, data)
