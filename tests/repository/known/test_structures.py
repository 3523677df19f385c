"""The cache of structures: asked for once, shared by processes, bounded; what is damaged is a miss."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import pack_blobs, service_of
from support.threads import at_once

from hapi.client.models import ClientModel, open_client_model
from hapi.client.settings import ModelSettings
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import BadRequestError
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.known.structures import StructureCache
from hapi.repository.opening import open_model
from hapi.repository.push import push
from hapi.repository.structure import ModelStructure
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.store.local import LocalStore
from hapi.wire import messages
from hapi.wire.transport.http import LoopbackTransport

SHAPE = (3, 32, 32)
SPEC = ModelSpec(architecture="resnet18", weights="random:0", input_shape=SHAPE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A store with a model and a fine-tune of it, which differs in its head's weights alone."""
    folder = tmp_path_factory.mktemp("structures")
    pack_blobs(folder, side=SHAPE[1])
    store, model = LocalStore(str(folder)), build(SPEC)
    push(store, "first", model, SPEC)
    with torch.no_grad():
        model.module.get_parameter("fc.bias").add_(1.0)
    push(store, "second", build_again(model.module.state_dict()), SPEC)
    return store


def build_again(state: dict[str, torch.Tensor]) -> Any:
    """The model with these weights, hashed anew."""
    model = build(SPEC)
    model.module.load_state_dict(state)
    return model


@pytest.fixture
def structure(store: LocalStore) -> ModelStructure:
    return open_model(store, "first").manifest.structure


@pytest.fixture(scope="module")
def service(store: LocalStore) -> Iterator[Service]:
    with service_of(Path(store.url)) as running:
        yield running


class Asked(LoopbackTransport):
    """Counts requests and the bytes of their answers, by the first parts of their paths."""

    def __init__(self, service: Service) -> None:
        handler = loopback_handler(service)
        self.answers: list[tuple[str, int]] = []

        def counting(method: str, path: str, body: bytes) -> Any:
            status, headers, buffers = handler(method, path, body)
            parts = [bytes(buffer) for buffer in buffers]
            self.answers.append((path, sum(map(len, parts))))
            return status, headers, iter(parts)

        super().__init__(counting)

    def load(self, name: str) -> ClientModel:
        """Open a model, and load all its weights."""
        settings = ModelSettings(model=f"store:{name}")
        model = open_client_model(settings, ServerPool([self]), None, seed=0, classes=1000, shape=SHAPE)
        model.load_from(0)
        return model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hapi" / "structures"


@pytest.mark.slow
def test_a_related_model_is_its_version_and_its_tensors_alone(
    service: Service, store: LocalStore, structure: ModelStructure
) -> None:
    asked = Asked(service)
    asked.load("first")
    path = f"{messages.STRUCTURES_PATH}/{structure.digest}"
    expected = [f"{messages.MODELS_PATH}/first", path, messages.TENSORS_PATH]
    assert [p for p, _ in asked.answers] == expected
    size = dict(asked.answers)[path]
    assert abs(size - len(structure.to_bytes())) < 0.2 * size  # json.dumps has spaces
    asked.answers.clear()
    asked.load("second")
    assert [p for p, _ in asked.answers] == [f"{messages.MODELS_PATH}/second", messages.TENSORS_PATH]
    tensors = open_model(store, "second").manifest.nbytes
    described, sent = (count for _, count in asked.answers)
    assert described < 20_000
    assert sent < 1.01 * tensors


@pytest.mark.slow
def test_another_process_finds_it(structure: ModelStructure, home: Path) -> None:
    StructureCache().find(structure.digest, lambda: structure)
    assert [path.name for path in home.iterdir()] == [f"{structure.digest}.json"]
    code = (
        "import sys; from hapi.repository.known.structures import StructureCache\n"
        "print(StructureCache().find(sys.argv[1], lambda: sys.exit('asked')).digest)"
    )
    command = [sys.executable, "-c", code, structure.digest]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.stdout.strip(), found.returncode) == (structure.digest, 0), found.stderr


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [flipped, folder_instead, lambda path: path.write_bytes(b""), lambda path: os.truncate(path, 100)],
    ids=["flipped", "folder", "empty", "cut"],
)
def test_what_is_damaged_is_a_miss(
    structure: ModelStructure, home: Path, damage: Callable[[Path], object]
) -> None:
    cache, asked = StructureCache(), list[str]()

    def ask() -> ModelStructure:
        asked.append(structure.digest)
        return structure

    assert cache.find(structure.digest, ask) == structure
    damage(home / f"{structure.digest}.json")
    assert cache.find(structure.digest, ask) == structure
    assert len(asked) == 2
    if damage is not folder_instead:  # mended
        assert cache.find(structure.digest, ask) == structure
        assert len(asked) == 2


def test_another_structure_than_asked_for_is_refused_and_not_kept(
    structure: ModelStructure, home: Path
) -> None:
    with pytest.raises(BadRequestError, match="instead of 0000"):
        StructureCache().find("0" * 32, lambda: structure)
    assert not home.exists()


@pytest.mark.parametrize("digest", ["../../x", "", "a/b", "A" * 32])
def test_what_is_no_digest_is_no_file(structure: ModelStructure, digest: str) -> None:
    with pytest.raises(BadRequestError):
        StructureCache().find(digest, lambda: structure)


def variants(structure: ModelStructure, count: int) -> list[ModelStructure]:
    """Structures of about the same length."""
    return [
        replace(structure, identities=(f"{number:064x}", *structure.identities[1:]))
        for number in range(count)
    ]


def test_the_bound_holds_and_the_longest_unused_goes_first(structure: ModelStructure, home: Path) -> None:
    one, two, three, four = variants(structure, 4)
    cache = StructureCache(max_bytes=int(3.2 * len(one.to_bytes())))
    for moment, found in enumerate((one, two, three)):
        cache.find(found.digest, lambda found=found: found)  # type: ignore[misc]
        os.utime(home / f"{found.digest}.json", (1000 + moment, 1000 + moment))
    cache.find(one.digest, lambda: pytest.fail("asked"))  # used just now
    cache.find(four.digest, lambda: four)
    assert {path.stem for path in home.iterdir()} == {one.digest, three.digest, four.digest}


def test_one_beyond_the_bound_is_not_kept(structure: ModelStructure, home: Path) -> None:
    assert StructureCache(max_bytes=100).find(structure.digest, lambda: structure) == structure
    assert not home.exists()


def test_a_disk_that_takes_nothing_is_no_error(structure: ModelStructure, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = StructureCache(tmp_path / "file" / "below")
    assert cache.find(structure.digest, lambda: structure) == structure


def test_many_at_once(structure: ModelStructure, home: Path) -> None:
    many = variants(structure, 6)

    def work(number: int) -> None:
        cache = StructureCache(max_bytes=int(3.2 * len(structure.to_bytes())))
        for turn in range(12):
            wanted = many[(number + turn) % len(many)]
            assert cache.find(wanted.digest, lambda: wanted) == wanted  # noqa: B023 - over within the turn

    at_once(4, work)
    assert 1 <= len(list(home.glob("*.json"))) <= 6
