"""``hapi push`` and ``hapi layers``."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hapi.cli.main import main
from hapi.repository.manifest import ModelManifest
from hapi.repository.versions import version_key


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_layers_prints_the_papers_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "layers", "resnet18", "--input-size", "64")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "resnet18: 14 layers, input 3x64x64 = 49.2 kB a sample (float32)"
    assert lines[1].split() == ["LAYER", "NAME", "OUTPUT", "KB/SAMPLE", "OF", "INPUT", "PARAMETERS"]
    assert lines[2].split() == ["1", "conv1", "64x32x32", "262.1", "5.33", "9,408"]
    assert lines[12].split()[:3] == ["11", "layer4.0", "512x2x2"] and lines[12].endswith("<- default freeze")
    assert len(lines) == 16


def test_layers_with_every_cut_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "layers", "resnet18", "--input-size", "64", "--all-cuts", "--json")
    document = json.loads(out)
    assert code == 0 and len(document["layers"]) == 23
    assert document["layers"][4] == {
        "index": 5,
        "name": "layer1.0.add",
        "shape": [64, 16, 16],
        "bytes": 65536,
        "parameters": 73984,
    }


def test_push_then_layers_then_ls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = f"{tmp_path}/net"
    options = ("--weights", "random:1", "--num-classes", "7", "--input-size", "32")
    code, out, _ = run(capsys, "push", "squeezenet1_1", address, *options)
    assert code == 0
    assert "pushed squeezenet1_1 as 'net@1'" in out and "7 classes" in out and "--model store:net" in out
    code, out, _ = run(capsys, "layers", f"store:{address}", "--input-size", "32")
    assert code == 0 and " 7 " in out.splitlines()[-1]
    code, out, _ = run(capsys, "ls", str(tmp_path))
    assert code == 0 and "squeezenet1_1" in out
    code, out, err = run(capsys, "push", "squeezenet1_1", address, *options)
    assert code == 0 and "already, as 'net@1'" in out and not err
    code, out, _ = run(
        capsys, "push", "squeezenet1_1", address, "--weights", "random:2", "--tag", "best", *options[2:]
    )
    assert code == 0 and "as 'net@2'" in out
    code, out, _ = run(
        capsys, "push", "squeezenet1_1", address, "--weights", "random:3", "--replace", *options[2:]
    )
    assert code == 0 and "as 'net@3'" in out
    assert run(capsys, "tag", address)[1].splitlines() == ["net@2  best", "net@3"]
    assert run(capsys, "tag", f"{address}@best")[1] == "net@2  best\n"
    code, _, err = run(capsys, "tag", f"{address}@0badc0de")
    assert code == 1 and "no tag or digest '0badc0de'" in err and err.count("\n") == 1
    assert run(capsys, "tag", address, "best")[1] == "net@best is version 3; it was 2\n"
    assert run(capsys, "rm", f"{address}@3", "--yes")[0] == 1
    assert run(capsys, "rm", f"{address}@2", "--yes")[0] == 0
    code, out, _ = run(capsys, "ls", f"{address}@best")
    assert code == 0 and "3" in out
    code, _, err = run(capsys, "tag", address, "0badc0de")
    assert code == 2 and "reads as a version or a digest" in err and err.count("\n") == 1


def test_a_factory_in_the_current_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hapi_test_my_model.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    code, out, _ = run(capsys, "layers", "hapi_test_my_model:net", "--input-size", "2", "--blocks", "1,2")
    assert code == 0 and "2 layers" in out
    code, out, _ = run(capsys, "push", "hapi_test_my_model:net", f"{tmp_path}/store/net", "--input-size", "2")
    assert code == 0 and "3 layers" in out
    assert "train with: hapi-train --model store:net --allow-model hapi_test_my_model:net\n" in out

    pushed = ("layers", f"store:{tmp_path}/store/net", "--input-size", "2")
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", str(tmp_path))])
    code, out, err = run(capsys, *pushed)
    assert code == 2 and err.count("\n") == 1
    assert "'hapi_test_my_model:net'" in err and "--allow-model hapi_test_my_model:net" in err
    monkeypatch.delitem(sys.modules, "hapi_test_my_model")
    code, out, _ = run(capsys, *pushed, "--allow-model", "hapi_test_my_model:net")
    assert code == 0 and "3 layers" in out


def test_a_model_that_is_nested_too_deeply(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / version_key("deep", 1)).parent.mkdir(parents=True)
    (tmp_path / version_key("deep", 1)).write_bytes(gzip.compress(b"[" * 100_000))
    code, out, _ = run(capsys, "ls", str(tmp_path))
    assert code == 0 and "damaged: " in out and "nested too deeply" in out


def test_ctrl_c_while_a_command_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert run(capsys, "layers", "resnet18") == (130, "", "hapi layers: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("layers", "resnet51"), 2, "did you mean resnet50"),
        (("layers", "nothing:there"), 2, "'nothing:there' cannot be imported: there is no module 'nothing'"),
        (("layers", "os:nothing"), 2, "'os:nothing' cannot be imported: there is no 'nothing' in os"),
        (("layers", "os:path"), 2, "'os:path' is a module, not a function or class"),
        (("layers", "os:getcwd"), 2, "os:getcwd returned a str, not a torch.nn.Module"),
        (("layers", "os:rename"), 2, "'os:rename' needs the argument 'src'"),
        (("layers", "alexnet", "--input-size", "16"), 2, "cannot run on samples of shape 3x16x16"),
        (("layers", "alexnet", "--input-size", "0"), 2, "--input-size: expected 1 to 4096"),
        (("layers", "store:s/x", "--input-size", "4097"), 2, "--input-size: expected 1 to 4096"),
        (("layers", "alexnet", "--input-size", "many"), 2, "--input-size"),
        (("layers", "resnet18", "--blocks", "layer9"), 2, "no layer can end at 'layer9'"),
        (
            ("layers", "resnet18", "--blocks", "layer1,conv1"),
            2,
            "block 'conv1' does not come after block 'layer1'",
        ),
        (("layers", "store:s/x"), 1, "s has no model 'x'"),
        (("push", "resnet18", "nowhere", "--weights", "random:0"), 2, "is not STORE/NAME"),
        (
            ("push", "squeezenet1_1", "store/x", "--weights", "missing.pth"),
            2,
            "missing.pth: there is no such file",
        ),
        (("push", "squeezenet1_1", "store/x", "--weights", "random:x"), 2, "write random:SEED"),
        (("push", "squeezenet1_1", "store/x", "--weights", "V9"), 2, "has no such weights; it has DEFAULT"),
        (("push", "squeezenet1_1", "store/x", "--weights", ""), 2, "has no weights ''; it has DEFAULT"),
        (("push", "factory:net", "store/x", "--weights", "V9"), 2, "factory:net has no weights called 'V9'"),
        (
            ("push", "squeezenet1_1", "store/x", "--num-classes", "0"),
            2,
            "--num-classes: expected 1 to 10000000, got '0'",
        ),
        (("push", "squeezenet1_1", "store/x", "--num-classes", "9" * 30), 2, "--num-classes: '999"),
        (
            ("push", "squeezenet1_1", "store/x", "--input-size", "-1"),
            2,
            "--input-size: '-1' is negative; expected 1 to 4096",
        ),
        (
            ("push", "squeezenet1_1", "store/x", "--weights", "random:0", "--blocks", "x"),
            2,
            "no layer can end at 'x'",
        ),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], code: int, message: str,
) -> None:  # fmt: skip
    """2 for a wrong value, 1 for what is not there or does not run."""
    (tmp_path / "factory.py").write_text("from torch import nn\ndef net():\n    return nn.Flatten()\n")
    (tmp_path / "s").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    try:
        found = main(arguments)
    except SystemExit as stop:
        found = int(str(stop.code))
    out, err = capsys.readouterr()
    assert (found, out) == (code, "")
    assert message in err and err.count("\n") == 1


def test_show_looks_at_the_identities_of_many_layers_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"experts.{number}.weight": torch.zeros(1) for number in range(300)}
    save_file(state, tmp_path / "given.safetensors")
    assert run(capsys, "push", str(tmp_path / "given.safetensors"), f"{tmp_path}/store/m", "--quiet")[0] == 0
    real, looks = ModelManifest.identities.fget, []
    assert real is not None
    counted = property(lambda manifest: looks.append(1) or real(manifest))
    monkeypatch.setattr(ModelManifest, "identities", counted)
    code, out, _ = run(capsys, "show", f"{tmp_path}/store/m")
    assert code == 0 and len(out.splitlines()) == 302 and len(looks) < 10
    assert len(json.loads(run(capsys, "show", f"{tmp_path}/store/m", "--json")[1])["layers"]) == 300
