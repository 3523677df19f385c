"""Two pushed models: what they share and the layers that differ, from their manifests alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.stores import CountingStore, is_weights

from hapi.cli.main import main
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.difference import Difference, LayerChange, compare
from hapi.repository.entries import SourceTensor
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import open_model
from hapi.repository.push import SourceLayer, push, push_tensors
from hapi.repository.relatives import relatives, relatives_of
from hapi.repository.versions import version_key
from hapi.store.local import LocalStore

SPEC = ModelSpec(architecture="resnet18", weights="random:4", input_shape=(3, 32, 32), num_classes=10)


def tune(model: LayeredModel, *names: str) -> None:
    with torch.no_grad():
        for name in names:
            model.tensors.get(name).add_(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model and relatives of it."""
    folder = tmp_path_factory.mktemp("store")
    store = LocalStore(str(folder))
    base = build(SPEC)
    push(store, "base", base, SPEC)
    push(store, "again", base, replace(SPEC, weights="random:9"))
    tune(base, "layer4.1.conv2.weight", "fc.bias")
    push(store, "tuned", base, SPEC)
    tune(base, "bn1.running_var")
    push(store, "early", base, SPEC)
    for name, spec in {
        "other-head": replace(SPEC, num_classes=7),
        "larger": replace(SPEC, input_shape=(3, 64, 64)),
        "deeper": replace(SPEC, architecture="resnet34"),
    }.items():
        push(store, name, build(spec), spec)
    model = build(SPEC)
    model.module.layer2[0].downsample[1].eps = 1e-3
    push(store, "settings", build(SPEC).over(model.module), SPEC)
    return folder


@pytest.fixture
def difference(folder: Path) -> Callable[[str, str], Difference]:
    store = LocalStore(str(folder))
    return lambda first, second: compare(
        open_model(store, first).manifest, open_model(store, second).manifest
    )


@pytest.mark.slow
def test_the_same_model_under_two_names(difference: Callable[[str, str], Difference]) -> None:
    found = difference("base", "again")
    assert found.same and found.changes == () and found.same_weights == found.layers[0] == found.layers[1]


def test_a_fine_tune_names_its_layers_and_tensors(difference: Callable[[str, str], Difference]) -> None:
    found = difference("base", "tuned")
    last = found.layers[0]
    assert not found.same and found.same_structure == last
    assert [(c.name, c.change, c.tensors, c.nbytes) for c in found.changes] == [
        ("layer4.1", "weights", ("layer4.1.conv2.weight",), 512 * 512 * 9 * 4),
        ("fc", "weights", ("fc.bias",), 40),
    ]
    assert found.same_weights == found.changes[0].layer - 1


def test_a_statistic_of_the_first_layers_leaves_nothing_to_share(
    difference: Callable[[str, str], Difference],
) -> None:
    found = difference("tuned", "early")
    assert (found.same_weights, found.changes[0].tensors) == (
        found.changes[0].layer - 1,
        ("bn1.running_var",),
    )
    assert found.same_weights < 3 and len(found.changes) == 1


def test_another_head_has_tensors_of_other_shapes(difference: Callable[[str, str], Difference]) -> None:
    found = difference("base", "other-head")
    assert [(c.name, c.change, c.tensors, c.nbytes) for c in found.changes] == [
        ("fc", "tensors", ("fc.weight", "fc.bias"), (512 * 7 + 7) * 4)
    ]
    assert found.same_structure == found.same_weights == found.layers[0] - 1


def test_the_size_of_images_is_no_difference(difference: Callable[[str, str], Difference]) -> None:
    assert difference("base", "larger").same


def test_another_depth(difference: Callable[[str, str], Difference]) -> None:
    found, back = difference("base", "deeper"), difference("deeper", "base")
    assert 0 < found.same_structure == back.same_structure < found.layers[0]
    only = {c.name for c in found.changes if c.change == "only in the second"}
    assert {"layer1.2", "layer3.5"} <= only
    assert only == {c.name for c in back.changes if c.change == "only in the first"}


def test_other_settings_of_a_layer_without_tensors(difference: Callable[[str, str], Difference]) -> None:
    found = difference("base", "settings")
    assert [(c.name, c.change) for c in found.changes] == [("layer2.0", "operations")]
    assert found.same_structure == found.same_weights == found.changes[0].layer - 1


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{folder}/base", f"{folder}/tuned"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("of 14 and 14 layers the first 14 are the same, 11 with their weights")
    assert lines[1] == "  12 layer4.1: other weights (layer4.1.conv2.weight; 9.00 MiB)"
    assert len(lines) == 3
    assert main(["diff", f"{folder}/base", f"{folder}/again"]) == 0
    assert capsys.readouterr().out.endswith("the same model\n")
    assert main(["diff", f"{folder}/base", f"{folder}/other-head", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert LayerChange(**{**found["changes"][0], "tensors": ("fc.weight", "fc.bias")}).name == "fc"


def test_the_relatives_of_a_model(folder: Path) -> None:
    store = LocalStore(str(folder))
    found = {
        r.name: (r.same_structure, r.same_weights)
        for r in relatives(store, open_model(store, "base").manifest)
    }
    assert found == {
        "again": (14, 14), "larger": (14, 14), "other-head": (13, 13), "tuned": (14, 11), "settings": (6, 6),
        "deeper": (6, found["deeper"][1]), "early": (14, 1),
    }  # fmt: skip
    assert list(found)[:2] == ["again", "larger"]


def test_the_relatives_of_an_architecture_that_is_not_pushed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which models begin alike is known before anything is pushed, and without weights."""
    asked = ("layers", "resnet18", "--input-size", "32", "--relatives")
    assert main([*asked, str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["relatives"]
    same = dict.fromkeys(("again@1", "base@1", "early@1", "larger@1", "other-head@1", "tuned@1"), 13)
    assert found == {**same, "deeper@1": 6, "settings@1": 6} and list(found)[:6] == list(same)
    assert main([*asked, str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "settings@1 has its first 6 layers"
    assert (
        main(["layers", f"store:{folder}/tuned", "--input-size", "32", "--relatives", str(folder), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["relatives"] == {
        **dict.fromkeys(same, 14), "other-head@1": 13, "deeper@1": 6, "settings@1": 6,
    }  # fmt: skip
    assert main([*asked, str(tmp_path / "nothing")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_the_relatives_of_a_model_in_memory(folder: Path) -> None:
    found = {r.name: r.same_weights for r in relatives_of(LocalStore(str(folder)), build(SPEC).identities())}
    assert found["base"] == found["again"] == 14 and found["tuned"] == 11 and found["early"] == 1


def test_the_command_that_shows_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{folder}/tuned", "--relatives", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    layers = document["layers"]
    assert sum(layer["bytes"] for layer in layers) == document["bytes"]
    assert [layer["index"] for layer in layers] == list(range(1, 15)) and layers[-1]["name"] == "fc"
    assert {"name": "base", "version": 1, "same_structure": 14, "same_weights": 11} in document["relatives"]
    assert main(["show", f"{folder}/tuned"]) == 0
    assert "with the same weights" not in capsys.readouterr().out
    assert main(["show", f"{folder}/tuned", "--relatives"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tuned@1: resnet18, 14 layers, ") and lines[0].endswith(", 10 classes")
    assert lines[12 + 1].split()[:3] == ["12", "layer4.1", "512x1x1"]
    assert "base@1 has its first 14 layers, 11 with the same weights" in lines


def test_an_earlier_version_may_be_the_closest_relative(tmp_path: Path) -> None:
    """Which stored models begin alike is asked of all of them, not of the latest of each name."""
    store = LocalStore(str(tmp_path))

    def pushed(name: str, *values: float) -> ModelManifest:
        layers = [
            SourceLayer(f"l{n}", (SourceTensor.of(f"l{n}.weight", torch.full((n + 2,), value)),))
            for n, value in enumerate(values)
        ]
        return push_tensors(store, name, layers).model.manifest

    base = pushed("base", 0, 0, 0)
    for values in ((0, 0, 1), (0, 0, 2), (0, 3, 3), (4, 4, 4)):
        pushed("tuned", *values)
    pushed("base", 0, 5, 5)
    found = {r.reference: (r.same_structure, r.same_weights) for r in relatives(store, base)}
    assert found == {"tuned@2": (3, 2), "base@2": (3, 1)}  # the newest of those that share most
    store.delete(version_key("tuned", 2))
    assert [r.reference for r in relatives(store, base)] == ["tuned@1", "base@2"]


def test_only_manifests_are_read(folder: Path) -> None:
    store = CountingStore(folder, is_weights)
    relatives(store, open_model(store, "base").manifest)
    assert store.ranges == []


def test_a_damaged_neighbour_is_left_out(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "store"
    shutil.copytree(folder, copied)
    store = LocalStore(str(copied))
    store.put(version_key("again", 1), b"{}")
    store.delete(version_key("tuned", 1))
    names = [r.name for r in relatives(store, open_model(store, "base").manifest)]
    assert "larger" in names and not {"again", "tuned"} & set(names)


def test_a_model_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{folder}/base", f"{folder}/nowhere"]) == 1
    assert "has no model 'nowhere'" in capsys.readouterr().err
    assert main(["diff", f"{folder}/base"]) == 2
    assert main(["show", f"{folder}/nowhere"]) == 1
