"""Manifests, indexes and models that somebody has changed, with checksums that fit: an error of ours, or success."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hapi.cli.main import main
from hapi.data.dataset import find_dataset
from hapi.data.index import digest
from hapi.data.listing import list_datasets
from hapi.data.manifest import Manifest
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.data.verify import verify_dataset
from hapi.errors import HapiError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.models.graph.digest import content_digest
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.opening import list_models, open_model
from hapi.repository.packs.structure_key import structure_key
from hapi.repository.push import push
from hapi.repository.versions import decompressed, document_checksum
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

MANIFEST, MODEL = "datasets/d/manifest.json", "models/m/versions/00000001.json.gz"
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e308, float("inf"), float("nan"), "", "a" * 5000,
    "\ud800", "\x1b[2J", "../x", "U64", "F32", [], {}, [[]], [1], [None], [0, 0], [2**70, 1], [-1, 3], [2**40] * 2,
    [2**40] * 16, [0, 2**40], [2**39], {"a": 1},
)  # fmt: skip
Files = dict[str, bytes]


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        yield from places(document[key], (*path, key))


def changed(document: Any, rng: random.Random) -> Any:
    """A copy with one to three changes anywhere in it."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(places(document)) or [()])
        if not path:
            break
        owner = document
        for key in path[:-1]:
            owner = owner[key]
        value, kind = owner[path[-1]], rng.random()
        if kind < 0.15:
            del owner[path[-1]]
        elif kind < 0.25 and isinstance(owner, dict):
            owner[rng.choice(("x", "", "\ud800", "__metadata__"))] = copy.deepcopy(rng.choice(STRANGE))
        elif kind < 0.5 and type(value) is int:
            owner[path[-1]] = value + rng.choice((-1, 1, 8, -8, 64, 2**32, 2**63))
        else:
            owner[path[-1]] = copy.deepcopy(rng.choice(STRANGE))
    return document


def sealed(manifest: dict[str, Any]) -> bytes:
    """With the version that fits, where there is one."""
    with contextlib.suppress(HapiError):
        manifest["version"] = Manifest._from_json(manifest).version
    return json.dumps(manifest).encode()


def change_manifest(files: Files, rng: random.Random) -> None:
    files[MANIFEST] = sealed(changed(json.loads(files[MANIFEST]), rng))


def change_index(files: Files, rng: random.Random) -> None:
    """Its header, its arrays, or any bytes; length and digest in the manifest are those of what came of it."""
    (key,) = (key for key in files if key.endswith("index.safetensors"))
    raw, manifest = bytearray(files[key]), json.loads(files[MANIFEST])
    header = 8 + int.from_bytes(raw[:8], "little")
    kind = rng.randrange(3)
    if kind == 0:
        text = json.dumps(changed(json.loads(raw[8:header]), rng)).encode()
        raw[:header] = len(text).to_bytes(8, "little") + text
    elif kind == 1:
        for _ in range(rng.choice((1, 2, 8))):
            at = header + 8 * rng.randrange((len(raw) - header) // 8)
            word = rng.choice((0, 1, 2**16, 2**32, 2**48, 2**63, 2**64 - 1, rng.getrandbits(64)))
            raw[at : at + 8] = word.to_bytes(8, "little")
    else:
        for _ in range(rng.choice((1, 3, 10))):
            raw[rng.randrange(len(raw))] = rng.getrandbits(8)
        del raw[rng.randrange(1, 2 * len(raw)) :]
    manifest["index_size"], manifest["index_xxh3"] = len(raw), digest(bytes(raw))
    for name in ("count", "shards", "total_bytes"):
        if rng.random() < 0.1:
            manifest[name] = rng.choice((1, 19, 21, 2**40))
    files[key], files[MANIFEST] = bytes(raw), sealed(manifest)


def change_model(files: Files, rng: random.Random) -> None:
    """The places or the forms of the tensors that are read first, or anything."""
    document = json.loads(decompressed(files[MODEL]))
    (key,) = (key for key in files if key.startswith("repository/structures/"))
    structure, kind = json.loads(decompressed(files[key])), rng.random()
    if kind < 0.3:
        document["tensors"][:3] = [changed(tensor, rng) for tensor in document["tensors"][:3]]
    elif kind < 0.6:
        structure["tensors"][:3] = [changed(form, rng) for form in structure["tensors"][:3]]
    elif kind < 0.8:
        structure = changed(structure, rng)
    else:
        document = changed(document, rng)
    if kind < 0.8:  # as a liar's would, its digest fits
        text = json.dumps(structure).encode()
        document["structure"] = content_digest(text)
        files[structure_key(document["structure"])] = gzip.compress(text)
    document["checksum"] = document_checksum(document)
    files[MODEL] = gzip.compress(json.dumps(document).encode())


def use_dataset(store: ObjectStore) -> None:
    list_datasets(store)
    for damage in verify_dataset(store, "d").damages:
        str(damage).encode(errors="strict")
    dataset = find_dataset(store, "d")
    input_shape(dataset.layout, dataset.transform)
    samples = dataset.read([0, dataset.count - 1])
    assert len(dataset.labels([0])) == 1
    input_batch(samples, dataset.layout, dataset.transform)


def use_model(store: ObjectStore) -> None:
    json.dumps([summary.to_json() for summary in list_models(store)])
    stored = open_model(store, "m")
    for name in list(stored.manifest.tensors)[:3]:
        stored.tensor_spec(name)
        stored.key(name)
        stored.read_tensor(name)
    model = stored.layered()
    stored.load(model, 0, 3)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """Of images, of tensors, and of a model."""
    arrays = tmp_path_factory.mktemp("arrays") / "xy.npz"
    np.savez(arrays, x=np.random.default_rng(0).random((20, 3, 8, 8)), y=np.arange(20) % 3)
    found = []
    for source in ("sklearn:digits", str(arrays)):
        store = open_store(f"memory://{uuid.uuid4().hex}")
        pack(open_source(source), store, "d", PackOptions(limit=20, shard_bytes=2000))
        found.append({info.key: store.get(info.key) for info in store.list()})
    spec = ModelSpec(architecture="squeezenet1_1", weights="random:1", input_shape=(3, 64, 64))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    push(store, "m", build(spec), spec)
    return [*found, {info.key: store.get(info.key) for info in store.list()}]


CASES = [
    (0, change_manifest, use_dataset, 200),
    (1, change_manifest, use_dataset, 200),
    (0, change_index, use_dataset, 300),
    (1, change_index, use_dataset, 300),
    (2, change_model, use_model, 40),
]


@pytest.mark.slow
@pytest.mark.parametrize(("base", "change", "use", "tries"), CASES)
def test_changed_stores_are_told_of_or_work(
    bases: list[Files],
    base: int,
    change: Callable[[Files, random.Random], None],
    use: Callable[[ObjectStore], None],
    tries: int,
) -> None:
    refused = 0
    for seed in range(tries):
        rng = random.Random(seed)
        files = dict(bases[base])
        change(files, rng)
        store = open_store(f"memory://{uuid.uuid4().hex}")
        for key, data in files.items():
            store.put(key, data)
        try:
            use(store)
        except HapiError as error:
            refused += 1
            assert str(error).isprintable(), seed
        except Exception as error:
            raise AssertionError(f"{change.__name__} of base {base}, seed {seed}") from error
    assert refused > tries // 4


@pytest.mark.slow
def test_changed_stores_are_listed(
    bases: list[Files], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All in one folder, by name: whatever is in them, a line each, and nothing that steers the terminal."""
    store = open_store(str(tmp_path))
    for seed in range(150):
        files = dict(bases[seed % 3])
        (change_model if seed % 3 == 2 else change_manifest)(files, random.Random(seed))
        name = MODEL if seed % 3 == 2 else MANIFEST
        for key in files.keys() - bases[seed % 3].keys():
            store.put(key, files[key])
        store.put(name.replace("/m/", f"/m{seed}/").replace("/d/", f"/d{seed}/"), files[name])
    for address in ("", "/d0", "/m2"):
        for flag in ([], ["--json"]):
            assert main(["ls", f"{tmp_path}{address}", *flag]) == 0
            shown = capsys.readouterr().out
            assert all(line.isprintable() for line in shown.splitlines())
    assert main(["ls", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 150 + 2
