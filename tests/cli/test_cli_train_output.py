"""``hapi-train --output``: the folder that a training leaves, and what can be done with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.harness import ROOT, ServerProcess, report_of
from support.local_job import pack_blobs
from support.train_cli import FAST, refused

from hapi.api.inference import predict_dataset
from hapi.api.model_files import load_model
from hapi.cli import train as command
from hapi.cli.main import main
from hapi.data.mount import open_dataset


@pytest.mark.slow
def test_a_folder_with_the_model(
    running: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "digits"
    arguments = ["--server", running.url, *FAST, "--output", str(folder), "--validation", "0.2"]
    assert command.main(arguments) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.safetensors", "checkpoint.pt", "log.txt", "model.safetensors", "report.json"]
    epoch = report_of(folder / "report.json")["epochs"][-1]
    card = load_model(folder / "model.safetensors").card
    assert card.metrics is not None and card.metrics["validation_accuracy"] == epoch["validation_accuracy"]

    _, line = refused(capsys, *arguments)
    assert f"--output {folder}" in line and "--resume" in line
    before = (folder / "model.safetensors").read_bytes()
    assert command.main([*arguments, "--epochs", "9", "--resume"]) == 0
    assert (folder / "model.safetensors").read_bytes() != before
    assert load_model(folder / "model.safetensors").card.epoch == 9
    capsys.readouterr()

    dataset = f"{running.store}/{card.dataset.name if card.dataset else ''}"
    assert main(["evaluate", str(folder / "model.safetensors"), "--dataset", dataset]) == 0
    found = re.search(r"accuracy (\d+\.\d+)%", capsys.readouterr().out)
    assert found is not None and float(found[1]) > 20


def test_what_cannot_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert "--output" in refused(capsys, "--store", "store", *FAST, "--output", str(tmp_path / "file"))[1]
    assert "(--resume DIR), or --checkpoint FILE" in refused(capsys, "--store", "store", *FAST, "--resume")[1]


@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("--output", "datasets/flowers/run"),
        ("--output", "models"),
        ("--output", "repository/run"),
        ("--output", "."),
        ("--report", "datasets/flowers/manifest.json"),
        ("--checkpoint", "models/checkpoint.pt"),
    ],
)
def test_nothing_among_the_files_of_a_store_that_only_servers_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, place: str
) -> None:
    store = tmp_path / "store"
    pack_blobs(store, "flowers")
    before = sorted(store.rglob("*"))
    code, line = refused(capsys, "--server", "http://127.0.0.1:9", flag, str(store / place))
    assert (
        code == 2 and f"{flag} {store / place}: lies among the files of the store {store}; name a pl" in line
    )
    assert sorted(store.rglob("*")) == before


def test_a_run_beside_the_files_of_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack_blobs(tmp_path / "store", "flowers")
    for place in ("store/runs/one", "models/one", "datasets/one"):
        arguments = ("--server", "http://127.0.0.1:9", "--patience", "0", "--output", str(tmp_path / place))
        assert "127.0.0.1:9" in refused(capsys, *arguments)[1]


@pytest.mark.slow
def test_the_readme_reads_a_model_without_hapi(
    running: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a Python that has no Hapi: the outputs are those of ``hapi.load_model``, bit for bit."""
    block = next(
        found
        for found in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "load_state_dict" in found
    )
    folder = tmp_path / "runs" / "flowers"
    arguments = [
        "--server",
        running.url,
        *FAST,
        "--model",
        "resnet18",
        "--epochs",
        "1",
        "--output",
        str(folder),
    ]
    assert command.main(arguments) == 0
    model = load_model(folder / "best.safetensors")
    inputs = torch.rand(3, *model.card.spec.input_shape)
    torch.save(inputs, tmp_path / "inputs.pt")
    code = f"""
import sys
sys.modules["hapi"] = None
{block.replace("resnet50", "resnet18")}
import torch
with torch.no_grad():
    torch.save(model.eval()(torch.load("inputs.pt")), "outputs.pt")
print(classes)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{list(model.classes)}\n"
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "outputs.pt"), model.module(inputs))
    with open_dataset(f"{running.store}/{model.card.dataset.name if model.card.dataset else ''}") as data:
        assert sum(len(outputs.names) for outputs in predict_dataset(model, data)) == data.count


@pytest.mark.slow
def test_a_training_begins_from_another_ones_model(
    running: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the name of the model, which is in the file; the first losses are those where the old one ended."""
    arguments = ["--server", running.url, *FAST, "--lr", "1e-9", "--seed", "3"]
    assert command.main([*arguments, "--output", str(tmp_path / "old"), "--model", "squeezenet1_1"]) == 0
    file = str(tmp_path / "old" / "model.safetensors")
    capsys.readouterr()
    assert command.main([*arguments, "--output", str(tmp_path / "new"), "--init-from", file]) == 0
    assert f"from  {file}" in capsys.readouterr().out
    first, second = (report_of(tmp_path / name / "report.json") for name in ("old", "new"))
    assert second["settings"]["model"] == "squeezenet1_1" and second["settings"]["init_from"] == file
    assert second["epochs"][0]["loss"] == pytest.approx(first["epochs"][0]["loss"], rel=1e-5)
    code, line = refused(capsys, "--store", "none", "--init-from", file, "--model", "resnet18")
    assert code == 2 and "leave --model out" in line
