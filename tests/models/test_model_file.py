"""Model files: written whole, read by PyTorch without Hapi, and never believed when they are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from hapi.errors import BadRequestError, HapiError, ModelError
from hapi.models.model_file import ModelCard, read_card, read_model, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.wire.references import DatasetReference, TransformSpec

SPEC = ModelSpec(
    architecture="squeezenet1_1", num_classes=3, weights="random:7", input_shape=(3, 64, 64), head_seed=5
)
CARD = ModelCard(
    spec=SPEC,
    classes=("bee", "wasp", "ant"),
    transform=TransformSpec.for_image_size(64),
    freeze=4,
    dataset=DatasetReference(name="insects", version="0" * 32),
    epoch=3,
    metrics={"accuracy": 0.75, "loss": 0.5},
)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return build(SPEC).module.eval()


@pytest.fixture
def file(module: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_model(path, module.state_dict(), CARD)
    return path


def test_what_is_read_is_what_was_written(module: nn.Module, file: Path) -> None:
    found, card = read_model(file)
    assert card == CARD == read_card(file)
    assert not found.training
    inputs = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(found(inputs), module(inputs))


@pytest.mark.slow
def test_plain_pytorch_reads_it_without_hapi(module: nn.Module, file: Path, tmp_path: Path) -> None:
    inputs = torch.rand(2, 3, 64, 64)
    torch.save(inputs, tmp_path / "inputs.pt")
    code = f"""
import sys
sys.modules["hapi"] = None
import json, safetensors, torch, torchvision
from safetensors.torch import load_file
model = torchvision.models.squeezenet1_1(num_classes=3)
model.load_state_dict(load_file({str(file)!r}))
with safetensors.safe_open({str(file)!r}, "pt") as opened:
    print(json.loads(opened.metadata()["classes"]))
with torch.no_grad():
    torch.save(model.eval()(torch.load("inputs.pt")), "outputs.pt")
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['bee', 'wasp', 'ant']\n"
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "outputs.pt"), module(inputs))


def test_tied_weights_have_both_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    write_model(tmp_path / "m.safetensors", module.state_dict(), CARD)
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["0.weight"], found["1.weight"])


def test_it_is_a_file_like_any_other_and_durable(
    module: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may read it where they may read new files, and what was made durable is what is there."""
    (tmp_path / "new").touch()
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), real(file)))
    path = tmp_path / "m.safetensors"
    write_model(path, module.state_dict(), CARD)
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode
    assert path.stat().st_ino in synced
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.safetensors", "new"]


def test_tensors_of_all_types_and_forms(tmp_path: Path) -> None:
    state = {
        "odd": torch.arange(7, dtype=torch.uint8), "half": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.rand(4, 6).T, "steps": torch.tensor(5), "none": torch.zeros(0, 3), "part": torch.rand(9)[2:5],
        "flag": torch.tensor([True, False, True]),
    }  # fmt: skip
    write_model(tmp_path / "m.safetensors", state, CARD)
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == state.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in state.items()
    )
    with pytest.raises(ModelError, match=r"'wave' is torch\.complex128, which a model file cannot hold"):
        write_model(tmp_path / "m.safetensors", {"wave": torch.zeros(2, dtype=torch.complex128)}, CARD)


def test_a_folder_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"is a folder; give a model file in it, such as .*/best.safetensors"
    ):
        read_card(tmp_path)


def test_metadata_of_any_card(tmp_path: Path) -> None:
    plain = ModelCard(spec=SPEC, classes=(), transform=None, freeze=0)
    assert ModelCard.from_metadata({**plain.to_metadata(), "digest": '"0"'}).transform is None
    for name, wrong in (
        ("classes", "[1]"),
        ("metrics", '{"loss": "low"}'),
        ("freeze", "-1"),
        ("epoch", "true"),
    ):
        with pytest.raises(BadRequestError, match=name):
            ModelCard.from_metadata({**CARD.to_metadata(), "digest": '"0"', name: wrong})
    with pytest.raises(BadRequestError, match="spec"):
        ModelCard.from_metadata({})


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="not a model file of Hapi"):
        read_model(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors at all, but a letter to a friend")
    with pytest.raises(ModelError, match="not a"):
        read_card(tmp_path / "text.safetensors")
    with pytest.raises(ModelError, match="does not exist"):
        read_card(tmp_path / "none.safetensors")


@pytest.mark.parametrize("place", range(8))
def test_a_damaged_file_is_refused(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + place * (len(data) - start - 1) // 7] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        read_model(file)


@pytest.mark.parametrize("kept", [0, 4, 8, 200, 100_000])
def test_a_file_that_was_cut_off_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError):
        read_model(file)


def test_weights_of_another_model_are_refused(file: Path, tmp_path: Path) -> None:
    state = load_file(file)
    with safe_open(file, framework="pt") as opened:
        spec = {**json.loads(opened.metadata()["spec"]), "architecture": "squeezenet1_0"}
    other = ModelCard(spec=ModelSpec.from_json(spec), classes=CARD.classes, transform=None, freeze=4)
    write_model(tmp_path / "other.safetensors", state, other)
    with pytest.raises(ModelError, match="does not fit the model"):
        read_model(tmp_path / "other.safetensors")


def test_what_cannot_be_written_leaves_what_was_there(module: nn.Module, file: Path) -> None:
    before = file.read_bytes()
    state = {**module.state_dict(), "classifier.1.bias": torch.empty(3, device="meta")}
    with pytest.raises(ModelError, match=r"classifier\.1\.bias"):
        write_model(file, state, CARD)
    assert file.read_bytes() == before
    with pytest.raises(HapiError, match="cannot be written"):
        write_model(file / "inside", module.state_dict(), CARD)


def test_a_factory_is_imported_only_when_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hapi_test_out.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_out:make", num_classes=3, input_shape=(3, 2, 2))
    module = build(spec, allow_import=True).module
    card = ModelCard(spec=spec, classes=("a", "b", "c"), transform=None, freeze=1)
    write_model(tmp_path / "own.safetensors", module.state_dict(), card)
    with pytest.raises(ModelError):
        read_model(tmp_path / "own.safetensors")
    found, _ = read_model(tmp_path / "own.safetensors", allow_import=True)
    assert torch.equal(found[1].weight, module[1].weight)
