"""Pushed models written as safetensors: the whole network, parts, shards, damage, and interruptions."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models

from hapi.errors import DataError, HapiError, ModelError, UsageError
from hapi.models.model_file import read_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.pulling import files, reading
from hapi.repository.pulling.files import write_file, write_folder
from hapi.repository.pulling.selection import FileContent, layers, matching, whole
from hapi.repository.push import SourceLayer, push, push_tensors
from hapi.repository.sources.networks import build_network
from hapi.repository.sources.open import open_source
from hapi.repository.stored import StoredModel
from hapi.store.local import LocalStore

TENSOR_BYTES = 64 * 33 * 4
SPEC = ModelSpec(architecture="resnet18", weights="random:3", num_classes=5, input_shape=(3, 64, 64))


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return build(SPEC).module


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """ResNet18 with random weights, in a store."""
    store = LocalStore(tmp_path_factory.mktemp("store"))
    return push(store, "net", build(SPEC), SPEC).model


@pytest.fixture
def tensors_only(tmp_path: Path) -> StoredModel:
    """Twelve layers of tensors without a network."""
    state = {f"layers.{i}.{kind}": torch.randn(64, 33) for i in range(12) for kind in ("bias", "weight")}
    save_file(state, tmp_path / "given.safetensors")
    source = open_source(tmp_path / "given.safetensors")
    made = [SourceLayer(name, tuple(tensors)) for name, tensors in source.layers()]
    return push_tensors(LocalStore(tmp_path / "store"), "raw", made).model


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.slow
def test_a_whole_network_is_a_model_file_and_a_plain_state_dict(
    pushed: StoredModel, network: nn.Module, tmp_path: Path
) -> None:
    done: list[int] = []
    pulled = write_file(pushed, whole(pushed), tmp_path / "net.safetensors", done.append)
    assert pulled.nbytes == sum(done) == sum(t.nbytes for t in network.state_dict().values())
    plain = models.resnet18(num_classes=5)
    plain.load_state_dict(load_file(tmp_path / "net.safetensors"))
    assert same(plain.state_dict(), network.state_dict())
    module, card = read_model(tmp_path / "net.safetensors")
    assert same(module.state_dict(), network.state_dict())
    assert card.pushed is None and card.classes == ("0", "1", "2", "3", "4")
    assert card.transform is not None and card.transform.crop == 64
    assert not leftovers(tmp_path)


@pytest.mark.slow
def test_what_was_pulled_pushes_without_a_byte(pushed: StoredModel, tmp_path: Path) -> None:
    write_file(pushed, whole(pushed), tmp_path / "net.safetensors")
    spec = ModelSpec(**{**SPEC.__dict__, "weights": str(tmp_path / "net.safetensors")})
    assert push(pushed.store, "copy", build_network(spec), spec).written == 0


TIED = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.Flatten()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(self.flat(x)).relu())

def make():
    return Net()
"""


def test_tied_weights_stand_under_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tied_net.py").write_text(TIED)
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec(architecture="tied_net:make", weights="random:0", input_shape=(3, 2, 2))
    stored = push(LocalStore(tmp_path / "store"), "tied", build(spec, allow_import=True), spec).model
    write_file(stored, whole(stored, allow_import=True), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["a.weight"], found["b.weight"]) and len(found) == 4
    assert same(read_model(tmp_path / "m.safetensors", allow_import=True)[0].state_dict(), found)


def test_layers_and_names_choose_tensors(pushed: StoredModel, network: nn.Module, tmp_path: Path) -> None:
    own = pushed.manifest.layers
    found = layers(pushed, 1, 3)
    assert {t.name for t in found.tensors} == {name for layer in own[:3] for name in layer.tensors}
    write_file(pushed, found, tmp_path / "some.safetensors")
    state = network.state_dict()
    assert same(load_file(tmp_path / "some.safetensors"), {t.name: state[t.name] for t in found.tensors})
    assert {t.name for t in matching(pushed, "fc.*").tensors} == {"fc.weight", "fc.bias"}
    for first, last in ((0, 3), (3, 15), (3, 2)):
        with pytest.raises(UsageError, match=r"model 'net@1' has layers 1\.\.14"):
            layers(pushed, first, last)
    with pytest.raises(UsageError, match=r"no tensor of model 'net@1' matches 'none\*'; it has conv1"):
        matching(pushed, "none*")


def test_a_model_of_tensors_only_is_pulled_as_it_was(tensors_only: StoredModel, tmp_path: Path) -> None:
    write_file(tensors_only, whole(tensors_only), tmp_path / "back.safetensors")
    assert same(load_file(tmp_path / "back.safetensors"), load_file(tmp_path / "given.safetensors"))
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(open_source(tmp_path / "back.safetensors").tensors) == list(tensors_only.manifest.tensors)


def test_shards_are_read_by_others_and_come_back_equal(tensors_only: StoredModel, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    pulled = write_folder(tensors_only, whole(tensors_only), folder, 40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(pulled.files) == 7 and index["metadata"]["total_size"] == pulled.nbytes == 24 * 64 * 33 * 4
    merged = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert same(merged, load_file(tmp_path / "given.safetensors"))
    assert all(path.stat().st_size < 42_000 for path in folder.glob("*.safetensors"))
    source = open_source(folder)
    assert list(source.tensors) == list(tensors_only.manifest.tensors)


@pytest.mark.slow
def test_one_shard_is_one_file_as_the_library_names_it(pushed: StoredModel, tmp_path: Path) -> None:
    assert write_folder(pushed, whole(pushed), tmp_path).files == (tmp_path / "model.safetensors",)
    assert read_model(tmp_path / "model.safetensors")[1].spec.architecture == "resnet18"


def test_an_interrupted_pull_goes_on_behind_its_whole_shards(
    tensors_only: StoredModel, tmp_path: Path
) -> None:
    folder, content = tmp_path / "shards", whole(tensors_only)
    folder.mkdir()
    seen = 0

    def interrupt(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        if seen > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tensors_only, content, folder, 40_000, interrupt)
    assert [path.name for path in sorted(folder.iterdir())] == [
        "model-00001-of-00006.safetensors",
        "model-00002-of-00006.safetensors",
        "model-00003-of-00006.safetensors.partial",
    ]
    damaged = folder / "model-00002-of-00006.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    pulled = write_folder(tensors_only, content, folder, 40_000)
    assert pulled.kept == 8 * TENSOR_BYTES
    assert same(
        {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()},
        load_file(tmp_path / "given.safetensors"),
    )
    assert write_folder(tensors_only, content, folder, 40_000).kept == 24 * TENSOR_BYTES


def test_no_old_index_describes_shards_that_are_replaced(tensors_only: StoredModel, tmp_path: Path) -> None:
    folder, content = tmp_path / "shards", whole(tensors_only)
    folder.mkdir()
    write_folder(tensors_only, content, folder, 40_000)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"another model's")

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tensors_only, content, folder, 40_000, interrupt)
    with pytest.raises(ModelError):
        open_source(folder)


@pytest.mark.parametrize("ending", ["", ".partial"])
def test_a_folder_with_another_checkpoint_is_left_alone(
    tensors_only: StoredModel, tmp_path: Path, ending: str
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / f"model-00001-of-00099.safetensors{ending}").write_bytes(b"")
    (folder / "config.json").write_text("{}")
    for shard_bytes in (40_000, 10**9):
        with pytest.raises(UsageError, match="of another checkpoint; give an empty folder"):
            write_folder(tensors_only, whole(tensors_only), folder, shard_bytes)


@pytest.mark.parametrize("window", [1 << 10, 1 << 25])
def test_any_window_gives_the_same_file(
    pushed: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, network: nn.Module
) -> None:
    monkeypatch.setattr(reading, "WINDOW_BYTES", window)
    content = matching(pushed, "layer1.*")
    write_file(pushed, content, tmp_path / "m.safetensors")
    state = network.state_dict()
    assert same(load_file(tmp_path / "m.safetensors"), {t.name: state[t.name] for t in content.tensors})


def test_a_damaged_tensor_is_named_and_nothing_is_left(tensors_only: StoredModel, tmp_path: Path) -> None:
    entry = tensors_only.manifest.tensors["layers.7.weight"]
    path = tensors_only.store.local_path(entry.pack)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[entry.start + 5] ^= 1
    path.write_bytes(data)
    (tmp_path / "m.safetensors").write_bytes(b"what was there")
    with pytest.raises(DataError, match=r"tensor 'layers\.7\.weight'"):
        write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == b"what was there"
    data[entry.start + 5] ^= 1
    path.write_bytes(data)  # repaired
    assert write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors").kept == 15 * TENSOR_BYTES
    assert same(load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "given.safetensors"))


class Stopped(Exception):
    """An interruption."""


def interrupted(stored: StoredModel, content: FileContent, path: Path, after: int) -> None:
    """Pull, and be interrupted when so many bytes are written."""
    seen = 0

    def interrupt(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        if seen >= after:
            raise Stopped

    with pytest.raises(Stopped):
        write_file(stored, content, path, interrupt)


@pytest.mark.parametrize("damage", ["none", "a bit", "cut", "longer", "other", "empty"])
def test_an_interrupted_file_goes_on_behind_its_last_whole_tensor(
    tensors_only: StoredModel, tmp_path: Path, damage: str
) -> None:
    content, path = whole(tensors_only), tmp_path / "m.safetensors"
    partial = tmp_path / "m.safetensors.partial"
    interrupted(tensors_only, content, path, 10 * TENSOR_BYTES)
    assert not path.exists() and not leftovers(tmp_path)
    data, kept = bytearray(partial.read_bytes()), 10
    if damage == "a bit":
        data[-3 * TENSOR_BYTES + 7] ^= 1
        kept = 7
    elif damage == "cut":
        del data[-5:]
        kept = 9
    elif damage == "longer":
        data += bytes(TENSOR_BYTES * 30)
    elif damage == "other":
        data[20] ^= 1
        kept = 0
    elif damage == "empty":
        data, kept = bytearray(), 0
    partial.write_bytes(data)
    done: list[int] = []
    assert write_file(tensors_only, content, path, done.append).kept == kept * TENSOR_BYTES
    assert sum(done) == 24 * TENSOR_BYTES and not partial.exists()
    assert same(load_file(path), load_file(tmp_path / "given.safetensors"))


def test_one_process_writes_a_file_at_a_time(tensors_only: StoredModel, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"

    def second(nbytes: int) -> None:
        with pytest.raises(
            HapiError, match=r"m\.safetensors: cannot be written: another process is writing it"
        ):
            write_file(tensors_only, whole(tensors_only), path)

    write_file(tensors_only, whole(tensors_only), path, second)
    assert same(load_file(path), load_file(tmp_path / "given.safetensors"))


def test_one_process_fills_a_folder_at_a_time(tensors_only: StoredModel, tmp_path: Path) -> None:
    """Shards of two models or versions have the same names: the index of one would describe those of the other."""
    folder = tmp_path / "shards"
    folder.mkdir()

    def second(nbytes: int) -> None:
        with pytest.raises(HapiError, match=r"shards: cannot be written: another process is writing into it"):
            write_folder(tensors_only, whole(tensors_only), folder, 30_000)

    write_folder(tensors_only, whole(tensors_only), folder, 40_000, second)
    found = write_folder(tensors_only, whole(tensors_only), folder, 40_000)
    assert found.kept == found.nbytes and len(found.files) > 2


def test_no_link_or_pipe_stands_in_for_the_unfinished_file(tensors_only: StoredModel, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    partial = tmp_path / "m.safetensors.partial"
    partial.symlink_to(tmp_path / "victim")
    with pytest.raises(HapiError, match=r"m\.safetensors: cannot be written"):
        write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")
    assert (tmp_path / "victim").read_bytes() == b"mine"
    partial.unlink()
    os.mkfifo(partial)
    with pytest.raises(HapiError, match="is there, and no plain file"):
        write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")


class FullDisk:
    """A file on a disk that is full after some bytes."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, 100_000

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_is_one_line_and_what_was_written_is_kept(
    tensors_only: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.growing

    @contextmanager
    def filling(path: Path) -> Iterator[Any]:
        with real(path) as file:
            yield FullDisk(file)

    with monkeypatch.context() as patch:
        patch.setattr(files, "growing", filling)
        with pytest.raises(HapiError, match=r"m\.safetensors: cannot be written: No space left on device"):
            write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
    assert write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors").kept == 11 * TENSOR_BYTES


def test_too_little_room_is_told_before_a_byte_is_read(
    tensors_only: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(HapiError, match=r"needs 199\.9 KiB, and 1000 B are free there"):
        write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["given.safetensors"]


def test_a_pack_that_is_gone_is_named(tensors_only: StoredModel, tmp_path: Path) -> None:
    (pack,) = tensors_only.manifest.packs
    tensors_only.store.delete(pack)
    with pytest.raises(DataError, match=f"{pack} has 0 bytes"):
        write_file(tensors_only, whole(tensors_only), tmp_path / "m.safetensors")
