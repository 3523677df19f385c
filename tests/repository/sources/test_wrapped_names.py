"""Checkpoints whose names carry what wrappers put before them, and those with other values of the same tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_sources_safetensors import content, expected
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hapi.api.pushing import PushOptions, push_model
from hapi.errors import ModelError
from hapi.models.zoo.build import ModelSpec
from hapi.repository.opening import open_model
from hapi.repository.push import Pushed
from hapi.repository.sources.networks import build_network
from hapi.repository.sources.open import open_source
from hapi.store.local import LocalStore

NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
STATE: dict[str, torch.Tensor] = NET.state_dict()


def named(before: str) -> dict[str, torch.Tensor]:
    return {f"{before}{name}": tensor for name, tensor in STATE.items()}


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize(
    "before", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_wrappers_are_taken_off(tmp_path: Path, before: str) -> None:
    assert content(saved(tmp_path / "m.pth", named(before))) == expected(STATE)
    save_file(named(before), tmp_path / "m.safetensors")
    assert content(tmp_path / "m.safetensors") == expected(STATE)


def test_an_averaged_model_is_that_in_it(tmp_path: Path) -> None:
    averaged = AveragedModel(NET)
    averaged.update_parameters(NET)
    assert content(saved(tmp_path / "m.pth", averaged.state_dict())) == expected(STATE)
    alone = {"n_averaged": torch.tensor(3)}
    assert content(saved(tmp_path / "alone.pth", alone)) == expected(alone)
    others = {**alone, "module.weight": torch.ones(2), "bias": torch.ones(1)}
    assert content(saved(tmp_path / "others.pth", others)) == expected(others)


@pytest.mark.parametrize("names", [["module."], ["module.", "module.a"], ["module.a", "b"]])
def test_names_that_no_wrapper_made_stay(tmp_path: Path, names: list[str]) -> None:
    state = {name: torch.ones(2) for name in names}
    assert content(saved(tmp_path / "m.pth", state)) == expected(state)


def test_a_reserved_name_behind_a_wrapper(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pth", {"module.__metadata__": torch.ones(2), "module.a": torch.ones(1)})
    with pytest.raises(ModelError, match="no file of tensors can hold the name '__metadata__'"):
        open_source(path)


FACTORY = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

    def forward(self, x):
        return self.module(x)
"""


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod."])
def test_a_network_may_have_a_part_of_a_wrappers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    (tmp_path / "hapi_test_wrapped.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = ModelSpec(architecture="hapi_test_wrapped:Net", input_shape=(3, 8, 8), weights="random:3")
    state = {f"{before}{n}": t for n, t in build_network(spec, allow_import=True).module.state_dict().items()}
    path, other = saved(tmp_path / "m.pth", state), tmp_path / "half.pth"
    torch.save({name: tensor.double() for name, tensor in state.items()}, other)
    for weights in (path, other):  # streamed, and converted in memory
        pushed = push_model(
            "hapi_test_wrapped:Net", f"{tmp_path}/store/net", weights=str(weights), input_size=8
        )
        found = dict(pushed.model.read(pushed.model.manifest.tensors))
        assert {f"{before}{n}" for n in found} == state.keys()
        assert all(torch.equal(state[f"{before}{name}"], tensor) for name, tensor in found.items())


def test_what_was_pulled_of_it_is_pushed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hapi_test_wrapped_too.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    first = push_model("hapi_test_wrapped_too:Net", f"{tmp_path}/store/net", input_size=8)
    first.model.save(tmp_path / "pulled.safetensors", allow_import=True)
    options = PushOptions(allow_import=True)
    again = push_model(str(tmp_path / "pulled.safetensors"), f"{tmp_path}/store/other", options=options)
    assert again.written == 0 and again.model.digest == first.model.digest
    assert open_model(LocalStore(tmp_path / "store"), "other").manifest.tensors.keys() == {
        f"module.{layer}.{kind}" for layer in (0, 3) for kind in ("weight", "bias")
    }


@pytest.mark.slow
def test_a_network_may_be_a_part_of_what_was_saved(tmp_path: Path) -> None:
    """Lightning's checkpoints have a module around the network, which its author names as he likes."""
    spec = ModelSpec(architecture="resnet18", weights="random:2", input_shape=(3, 32, 32), num_classes=5)
    state = build_network(spec).module.state_dict()
    path = tmp_path / "last.ckpt"

    def pushed() -> Pushed:
        return push_model("resnet18", f"{tmp_path}/store/net", weights=str(path), input_size=32)

    torch.save(
        {
            "state_dict": {f"net.{n}": t for n, t in state.items()} | {"loss.weight": torch.ones(5)},
            "epoch": 2,
        },
        path,
    )
    found = dict(pushed().model.read(state.keys() - {n for n in state if n.endswith("num_batches_tracked")}))
    assert all(torch.equal(state[name], tensor) for name, tensor in found.items()) and len(found) > 100
    two = {f"{part}.{name}": tensor for part in ("student", "teacher") for name, tensor in state.items()}
    for others in (two, {f"net.{name}": tensor for name, tensor in state.items() if name != "bn1.bias"}):
        torch.save(others, path)
        with pytest.raises(ModelError, match="does not fit the model: missing conv1"):
            pushed()


@pytest.mark.parametrize("new_format", [True, False])
def test_averages_beside_the_weights_are_told(tmp_path: Path, new_format: bool) -> None:
    """Checkpoints of timm, torchvision and DeiT may have averages; the weights are taken, and a line says so."""
    path = tmp_path / "m.pth"
    others = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in STATE.items()}
    optimizer = torch.optim.Adam(NET.parameters()).state_dict()
    for key, average in (
        ("state_dict_ema", others),
        ("model_ema", AveragedModel(NET).state_dict()),
        ("ema", {"state_dict": others, "decay": 0.99}),
    ):
        value = {"state_dict": STATE, key: average, "optimizer": optimizer, "epoch": 3}
        torch.save(value, path, _use_new_zipfile_serialization=new_format)
        assert content(path) == expected(STATE)
        assert open_source(path).notes[-1].endswith(f"in '{key}'; save them alone to use them"), key
    criterion = {"center": torch.ones(3)}
    torch.save({"model": STATE, "same": STATE, "criterion": criterion, "optimizer": optimizer}, path)
    assert not open_source(path).notes
