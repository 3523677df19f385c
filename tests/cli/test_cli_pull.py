"""``hapi pull``, and ``hapi show`` and ``hapi push`` of checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import ServerProcess
from support.killed_pulling import killed_pulling
from support.train_cli import FAST, refused

from hapi.api.model_files import load_model
from hapi.cli import train as command
from hapi.cli.main import main
from hapi.errors import ModelError, UsageError
from hapi.models.model_file import ModelCard, read_card, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.opening import open_model
from hapi.store.open import open_store
from hapi.train.init_from import started
from hapi.train.outputs.from_checkpoint import _stored
from hapi.train.settings import TrainSettings
from hapi.wire.references import TransformSpec

SPEC = ModelSpec(architecture="squeezenet1_1", num_classes=3, input_shape=(3, 64, 64))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A model file as a training writes it."""
    card = ModelCard(
        spec=SPEC, pushed="base@1", classes=("ant", "bee", "fly"), transform=TransformSpec.for_image_size(64), freeze=9,
        epoch=4, metrics={"accuracy": 0.5},
    )  # fmt: skip
    write_model(tmp_path / "tuned.safetensors", build(SPEC).module.state_dict(), card)
    return tmp_path / "tuned.safetensors"


@pytest.mark.slow
def test_a_model_file_comes_back_as_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_file: Path
) -> None:
    base = ("push", "squeezenet1_1", f"{tmp_path}/store/base", "--weights", "random:0", "--input-size", 64)
    assert run(capsys, *base)[0] == 0
    code, out, _ = run(capsys, "push", model_file, f"{tmp_path}/store/net", "--quiet")
    assert code == 0 and "of which" in out and "are new to the store" in out
    code, out, _ = run(capsys, "show", f"{tmp_path}/store/net")
    assert code == 0 and "fine-tuned from base@1 behind layer 9" in out
    back = tmp_path / "back.safetensors"
    code, out, _ = run(capsys, "pull", f"{tmp_path}/store/net@1", "--output", back)
    assert code == 0 and out.startswith(f"{back}: 52 tensors, ") and "of 'net@1' from" in out
    card, before = read_card(back), read_card(model_file)
    assert (card.classes, card.freeze, card.epoch, card.metrics) == (before.classes, 9, 4, {"accuracy": 0.5})
    assert card.transform == before.transform and card.pushed == "base@1"
    code, out, _ = run(capsys, "push", back, f"{tmp_path}/store/net")
    assert code == 0 and "already, as 'net@1'" in out  # whatever the file's name
    assert run(capsys, "pull", f"{tmp_path}/store/net", "--output", tmp_path / "folder")[0] == 0
    code, out, _ = run(capsys, "push", tmp_path / "folder", f"{tmp_path}/store/again")
    assert code == 0 and "pushed squeezenet1_1 as 'again@1'" in out
    code, _, _ = run(capsys, "export", back, "--output", tmp_path / "net.pth")
    assert code == 0
    state = build(SPEC).module.state_dict()
    exported = torch.load(tmp_path / "net.pth", weights_only=True)
    assert all(torch.equal(exported[name], state[name]) for name in state)


def test_parts_and_shards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.randn(300, 1000) for i in range(4)}
    save_file(state, tmp_path / "given.safetensors")
    code, out, _ = run(capsys, "push", tmp_path / "given.safetensors", f"{tmp_path}/store/raw")
    assert code == 0 and "pushed tensors as 'raw@1'" in out and "but not trained" in out
    address = f"{tmp_path}/store/raw"
    code, out, _ = run(capsys, "pull", address, "--output", tmp_path / "shards", "--shard-size", "2MB")
    assert code == 0 and "as 5 files" in out
    code, out, _ = run(capsys, "pull", address, "--output", tmp_path / "shards", "--shard-size", "2MB")
    assert code == 0 and "as 5 files, 4.58 MiB of them kept from an earlier pull" in out
    code, out, _ = run(capsys, "show", tmp_path / "shards")
    assert code == 0 and "sharded in 4 files, 4 layers, 4 tensors" in out and "layers.3  1" in out
    document = json.loads(run(capsys, "show", tmp_path / "given.safetensors", "--json")[1])
    assert document["tensors"][0] == {"name": "layers.0.weight", "dtype": "float32", "shape": [300, 1000]}
    for flags, names in (
        (("--layers", "2..3"), [1, 2]),
        (("--layers", "4"), [3]),
        (("--tensors", "*.0.*"), [0]),
    ):
        code, _, _ = run(capsys, "pull", address, "--output", tmp_path / "some.safetensors", *flags)
        assert code == 0
        assert load_file(tmp_path / "some.safetensors").keys() == {f"layers.{i}.weight" for i in names}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--output", "m.safetensors", "--layers", "3..9"), "has layers 1..1"),
        (("--output", "m.safetensors", "--layers", "x"), "expected A..B"),
        (("--output", "m.safetensors", "--tensors", "x*"), "no tensor of model 'raw@1' matches 'x*'"),
        (("--output", "m.safetensors", "--shard-size", "5GB"), "is one file; give a folder"),
        (("--output", "given.safetensors/x"), "cannot be made"),
        (("--output", "m.pth"), "hapi export writes others"),
        (("--output", ""), "--output is empty"),
        (("--output", "no/such/\0.safetensors"), "cannot be written"),
    ],
)
def test_wrong_pulls_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.ones(2)}, tmp_path / "given.safetensors")
    assert run(capsys, "push", "given.safetensors", "store/raw")[0] == 0
    code, _, err = run(capsys, "pull", "store/raw", *flags)
    assert code in (1, 2) and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "m.safetensors").exists()
    code, _, err = run(capsys, "pull", "store/other", "--output", "m.safetensors")
    assert code == 1 and "has no model 'other'" in err
    for call in (
        ("pull", "none/raw", "--output", "m.safetensors"),
        ("show", "none/raw"),
        ("verify", "none/raw"),
    ):
        code, _, err = run(capsys, *call)
        assert code == 1 and f"there is no folder {tmp_path}/none; check" in err, err
    for call in (("verify", "store/other"), ("rm", "store/other", "--yes")):
        code, _, err = run(capsys, *call)
        assert code == 1 and "there is no dataset or model 'other' in" in err and "hapi ls" in err, err


def in_folder_with_factory(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``folder`` the current one, with ``net`` in the module ``name``."""
    (folder / f"{name}.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])


def test_code_that_a_store_names_is_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who can write into a store chooses the factories in it, as for hapi layers and hapi-train."""
    in_folder_with_factory("hapi_test_pulled", tmp_path, monkeypatch)
    pushed = ("push", "hapi_test_pulled:net", "store/net", "--input-size", 2, "--quiet")
    assert run(capsys, *pushed)[0] == 0
    monkeypatch.delitem(sys.modules, "hapi_test_pulled")
    pull = ("pull", "store/net", "--output", "net.safetensors", "--quiet")
    code, _, err = run(capsys, *pull)
    assert code == 2 and "--allow-model hapi_test_pulled:net" in err and err.count("\n") == 1
    assert "hapi_test_pulled" not in sys.modules and not Path("net.safetensors").exists()
    with pytest.raises(ModelError, match="is not allowed"):
        open_model(open_store("store"), "net").save("net.safetensors")
    card = ModelCard(spec=SPEC, pushed="net@1", classes=("ant",), transform=None, freeze=1)
    with pytest.raises(ModelError, match="is not allowed"):  # of a checkpoint's frozen layers
        _stored(card, "store")(["1.weight"])
    assert run(capsys, *pull, "--tensors", "*")[0] == 0  # these need no network
    assert run(capsys, *pull, "--allow-model", "hapi_test_pulled:net")[0] == 0
    assert load_file("net.safetensors").keys() == {"1.weight", "1.bias"}


def test_code_that_a_model_file_names_is_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote the file has chosen the factory: tensors alone are what people expect in it."""
    in_folder_with_factory("hapi_test_filed", tmp_path, monkeypatch)
    spec = ModelSpec(architecture="hapi_test_filed:net", num_classes=3, input_shape=(3, 2, 2))
    card = ModelCard(spec=spec, classes=("ant", "bee", "cat"), transform=None, freeze=1)
    write_model(Path("net.safetensors"), {"1.weight": torch.ones(3, 12), "1.bias": torch.ones(3)}, card)
    np.save("input.npy", np.ones((1, 3, 2, 2), np.float32))
    calls = (
        ("predict", "net.safetensors", "input.npy"),
        ("evaluate", "net.safetensors", "--dataset", "store/none"),
        ("export", "net.safetensors", "--output", "net.pth"),
        ("push", "net.safetensors", "store/net", "--quiet"),
    )
    for call in calls:
        code, _, err = run(capsys, *call)
        assert code == 2 and "--allow-model hapi_test_filed:net" in err and err.count("\n") == 1, (call, err)
    with pytest.raises(UsageError, match="--allow-model hapi_test_filed:net"):
        started(TrainSettings(init_from="net.safetensors"), has_model=False)
    with pytest.raises(UsageError, match="--allow-model hapi_test_filed:net"):
        load_model("net.safetensors")
    assert (
        "hapi_test_filed" not in sys.modules and not Path("net.pth").exists() and not Path("store").exists()
    )
    for call in calls[2:]:
        assert run(capsys, *call, "--allow-model", "hapi_test_filed:net")[0] == 0
    assert started(TrainSettings(init_from="net.safetensors", model="hapi_test_filed:net"), has_model=True)


def test_training_with_tensors_only_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_file({"a.weight": torch.ones(2)}, tmp_path / "given.safetensors")
    assert run(capsys, "push", tmp_path / "given.safetensors", f"{tmp_path}/store/raw")[0] == 0
    code, _, err = run(capsys, "layers", f"store:{tmp_path}/store/raw")
    assert code == 1 and "pushed as tensors without an architecture" in err and "--weights FILE" in err


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ``raw``, twelve tensors of 64 MiB."""
    folder = tmp_path_factory.mktemp("large")
    state = {f"a.{i}": torch.full((64 << 20,), i, dtype=torch.uint8) for i in range(12)}
    save_file(state, folder / "given.safetensors")
    assert main(["push", f"{folder}/given.safetensors", f"{folder}/store/raw", "--quiet"]) == 0
    (folder / "given.safetensors").unlink()
    return folder / "store"


@pytest.mark.slow
@pytest.mark.long_except("a file-9", "shards-2")
@pytest.mark.parametrize("given", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("flags", [(), ("--shard-size", "300MB")], ids=["a file", "shards"])
def test_a_pull_that_is_ended_in_the_middle_goes_on(
    capsys: pytest.CaptureFixture[str],
    large: Path,
    tmp_path: Path,
    given: signal.Signals,
    flags: tuple[str, ...],
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    output = folder if flags else folder / "m.safetensors"
    arguments = ["pull", f"{large}/raw", "--output", str(output), *flags]
    code, err = killed_pulling(given, 200 << 20, *arguments)
    if given == signal.SIGKILL:
        assert code == -given
    else:
        assert code == 130 and err == "hapi pull: interrupted\n"
    for path in folder.iterdir():  # what has the name of a whole file is whole
        assert path.suffix == ".partial" or len(load_file(path)) == 4
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and " MiB of them kept from an earlier pull" in out
    assert not list(folder.glob(".*")) + list(folder.glob("*.partial"))
    found = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert sorted(found) == sorted(f"a.{i}" for i in range(12))
    assert all(
        bool((tensor == int(name[2:])).all()) and len(tensor) == 64 << 20 for name, tensor in found.items()
    )
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_training_pushes_its_best_epoch(
    running: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("push", "resnet18", f"{running.store}/push-base", "--weights", "random:1", "--input-size", 32)
    assert run(capsys, *base)[0] == 0
    arguments = [flag for flag in FAST if flag not in ("--no-output", "--weights", "random")]
    arguments += ["--server", running.url, "--model", "store:push-base", "--output", f"{tmp_path}/run"]
    assert command.main([*arguments, "--push", f"{running.store}/push-tuned"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("pushed best.safetensors"))
    assert "as 'push-tuned@1'" in line and line.endswith("are new to the store, fine-tuned from push-base@1")
    code, out, _ = run(capsys, "show", f"{running.store}/push-tuned")
    assert code == 0 and "fine-tuned from push-base@1 behind layer" in out
    frozen, tuned = (
        open_model(open_store(str(running.store)), name).manifest for name in ("push-base", "push-tuned")
    )
    own = {entry.pack for entry in tuned.tensors.values()} - {e.pack for e in frozen.tensors.values()}
    behind = [name for layer in tuned.layers[(tuned.card or {})["freeze"] :] for name in layer.tensors]
    assert behind and own == {tuned.tensors[name].pack for name in behind}  # the rest is the backbone's
    pulled = tmp_path / "elsewhere.safetensors"
    assert run(capsys, "pull", f"{running.store}/push-tuned", "--output", pulled)[0] == 0
    for path in (tmp_path / "run" / "best.safetensors", pulled):
        table = path.with_suffix(".csv")
        code, _, err = run(capsys, "predict", path, f"{running.store}/digits", "--csv", table, "--quiet")
        assert code == 0, err
    assert pulled.with_suffix(".csv").read_text() == (tmp_path / "run" / "best.csv").read_text()


def test_a_push_that_cannot_be_is_refused_before_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a run folder" in refused(capsys, "--store", "store", *FAST, "--push", "store/net")[1]
    arguments = [flag for flag in FAST if flag != "--no-output"]
    assert "is not STORE/NAME" in refused(capsys, "--store", "store", *arguments, "--push", "net")[1]
    assert (
        "nothing would be left"
        in refused(capsys, "--store", "store", *arguments, "--push", "memory://x/net")[1]
    )
