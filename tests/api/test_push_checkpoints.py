"""Checkpoints of any form pushed: streamed into a network, built where they must be, or as tensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.thin_resnet import THIN_LAYERS, THIN_RESNET
from torch import nn

import hapi
from hapi.api import pushing
from hapi.api.pushing import PushOptions, push_model
from hapi.errors import ConflictError, ModelError, UsageError
from hapi.models.zoo.build import ModelSpec, build

SPEC = ModelSpec(
    architecture=THIN_RESNET, weights="random:3", num_classes=5, input_shape=(3, 64, 64), blocks=THIN_LAYERS
)
NETWORK: dict[str, Any] = {"input_size": 64, "blocks": THIN_LAYERS}
"""What :func:`hapi.push` is told of it."""


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return dict(build(SPEC, allow_import=True).module.state_dict())


def write(folder: Path, kind: str, state: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of one kind; return what a user would name."""
    if kind == "safetensors":
        save_file(state, folder / "m.safetensors")
        return folder / "m.safetensors"
    if kind == "sharded":
        homes = {}
        for number, start in enumerate(range(0, len(state), 50)):
            part = {name: state[name] for name in list(state)[start : start + 50]}
            save_file(part, folder / f"{number}.safetensors")
            homes |= dict.fromkeys(part, f"{number}.safetensors")
        (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
        return folder
    path = folder / f"m.{kind.removeprefix('old ')}"
    torch.save({"state_dict": state}, path, _use_new_zipfile_serialization=not kind.startswith("old"))
    return path


@pytest.fixture
def never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is built in memory."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was built in memory")

    monkeypatch.setattr(pushing, "build", refuse)


@pytest.mark.slow_except("pth")
@pytest.mark.usefixtures("never_built")
@pytest.mark.parametrize(
    "kind",
    ["safetensors", "pth", *(pytest.param(k, marks=pytest.mark.slow) for k in ("sharded", "bin", "old pt"))],
)
def test_a_checkpoint_is_streamed_and_has_the_digests_of_the_built_network(
    tmp_path: Path, state: dict[str, torch.Tensor], kind: str
) -> None:
    notes: list[str] = []
    weights = str(write(tmp_path, kind, state))
    pushed = push_model(
        THIN_RESNET, f"{tmp_path}/store/net", weights=weights, on_note=notes.append, **NETWORK
    ).model
    model = build(SPEC, allow_import=True)
    assert pushed.manifest.digests == tuple(model.prefix_digests())
    assert pushed.manifest.identities == tuple(model.identities())
    assert pushed.manifest.classes == 5 and pushed.manifest.parent is None
    assert bool(notes) == kind.startswith("old")
    assert str(tmp_path) not in json.dumps(pushed.manifest.to_json())
    found = pushed.layered(allow_import=True)
    pushed.load(found, 0, len(found))
    assert all(torch.equal(found.module.state_dict()[name], tensor) for name, tensor in state.items())


def test_other_types_are_converted_in_memory(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    weights = str(write(tmp_path, "sharded", half))
    pushed = hapi.push(THIN_RESNET, f"{tmp_path}/store/net", weights=weights, **NETWORK)
    assert {entry.dtype for entry in pushed.manifest.tensors.values()} == {"float32", "int64"}
    ((_, weight),) = pushed.read(["conv1.weight"])
    assert torch.equal(weight, state["conv1.weight"].half().float())


@pytest.mark.slow
def test_a_fresh_head_and_a_wrong_checkpoint_are_as_before(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    weights = str(write(tmp_path, "safetensors", state))
    pushed = hapi.push(THIN_RESNET, f"{tmp_path}/store/net", weights=weights, num_classes=7, **NETWORK)
    assert pushed.manifest.classes == 7
    with pytest.raises(ModelError, match="does not fit the model"):
        hapi.push("squeezenet1_1", f"{tmp_path}/store/other", weights=weights, input_size=64)
    assert [found.name for found in hapi.list_models(f"{tmp_path}/store")] == ["net"]


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "pth"])
def test_any_checkpoint_is_pushed_as_tensors(
    tmp_path: Path, state: dict[str, torch.Tensor], kind: str
) -> None:
    given = str(write(tmp_path, kind, state))
    pushed = push_model(given, f"{tmp_path}/store/raw", options=PushOptions(tag="first")).model
    assert {entry.name for entry in pushed.manifest.tensors.values()} == state.keys()
    assert pushed.manifest.spec is None and "layer1.0.conv1" in [la.name for la in pushed.manifest.layers]
    assert hapi.verify(f"{tmp_path}/store/raw").sound
    found = dict(hapi.open_model(f"{tmp_path}/store/raw@first").read(state))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with pytest.raises(ConflictError, match="without an architecture"):
        pushed.layered()


@pytest.mark.slow
def test_tensors_and_network_share_their_bytes(tmp_path: Path) -> None:
    """Of a network with large layers: small ones are written again with others."""
    network = build(ModelSpec(architecture="resnet18", weights="random:3", input_shape=(3, 64, 64)))
    given = str(write(tmp_path, "safetensors", dict(network.module.state_dict())))
    push_model("resnet18", f"{tmp_path}/store/net", weights=given, input_size=64)
    raw = push_model(given, f"{tmp_path}/store/raw")
    assert raw.written < 0.02 * raw.model.manifest.nbytes


def test_flags_that_need_an_architecture_say_so(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    given = str(write(tmp_path, "safetensors", state))
    with pytest.raises(UsageError, match="pushed as tensors only"):
        hapi.push(given, f"{tmp_path}/store/raw", num_classes=3)
    with pytest.raises(UsageError, match="has weights already"):
        hapi.push(given, f"{tmp_path}/store/raw", weights="random:0")


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


@pytest.mark.usefixtures("never_built")
def test_of_tied_names_the_later_one_counts_as_in_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tied_push.py").write_text(TIED)
    monkeypatch.syspath_prepend(tmp_path)
    made = build(ModelSpec(architecture="tied_push:make", input_shape=(3, 2, 2)), allow_import=True).module
    state = {name: torch.randn_like(tensor) for name, tensor in made.state_dict().items()}
    made.load_state_dict(state)
    save_file(state, tmp_path / "m.safetensors")
    pushed = push_model(
        "tied_push:make", f"{tmp_path}/store/tied", weights=f"{tmp_path}/m.safetensors", input_size=2
    )
    found = pushed.model.layered(allow_import=True)
    pushed.model.load(found, 0, len(found))
    assert isinstance(made, nn.Module)
    assert torch.equal(found.module.state_dict()["a.weight"], made.state_dict()["a.weight"])
    assert torch.equal(load_file(tmp_path / "m.safetensors")["b.weight"], made.state_dict()["a.weight"])


@pytest.mark.usefixtures("never_built")
def test_a_saved_model_file_is_streamed_back(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    given = str(write(tmp_path, "safetensors", state))
    hapi.push(THIN_RESNET, f"{tmp_path}/store/net", weights=given, **NETWORK)
    hapi.open_model(f"{tmp_path}/store/net").save(tmp_path / "net.safetensors", allow_import=True)
    again = push_model(
        f"{tmp_path}/net.safetensors", f"{tmp_path}/store/net", options=PushOptions(allow_import=True)
    )
    assert again.written == 0 and again.model.manifest.card is not None
    assert again.model.manifest.digest == hapi.open_model(f"{tmp_path}/store/net@1").digest
