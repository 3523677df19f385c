"""``hapi predict`` with networks for several labels and for numbers; and a table of labels from pack to ls."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hapi.api.inference import predict_images
from hapi.api.model_files import load_model
from hapi.cli.main import main
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.wire.labels import LabelKind
from hapi.wire.references import TransformSpec

OUTPUTS = ("left", "right")
SPEC = ModelSpec(architecture="squeezenet1_1", num_classes=2, input_shape=(3, 64, 64))
COUNT = 6
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    rng = np.random.default_rng(0)
    lines = {"multi": "file,left,right\n", "regression": "file,left,right\n"}
    (root / "images").mkdir()
    for number in range(COUNT):
        Image.fromarray(rng.integers(0, 256, (70, 70, 3), np.uint8)).save(root / "images" / f"{number}.png")
        lines["multi"] += f"{number}.png,{number % 2},{int(number > 3)}\n"
        lines["regression"] += f"{number}.png,{number / 4},-2.5\n"
    state = build(SPEC).module.state_dict()
    for kind in ("multi", "regression"):
        (root / f"{kind}.csv").write_text(lines[kind])
        card = ModelCard(
            spec=SPEC, classes=OUTPUTS, label_kind=kind, transform=TransformSpec.for_image_size(64), freeze=3
        )
        write_model(root / f"{kind}.safetensors", state, card)
        pack = ["pack", f"{root}/images", f"{root}/store/{kind}", "--labels", f"{root}/{kind}.csv", "--quiet"]
        assert main([*pack, "--label", "left,right", "--image-size", "64"]) == 0
    return root


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(folder)

    def ran(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


def outputs_of(folder: Path, kind: LabelKind) -> torch.Tensor:
    files = sorted((folder / "images").iterdir())
    return torch.cat(
        [batch.logits for batch in predict_images(load_model(folder / f"{kind}.safetensors"), files)]
    )


@pytest.mark.slow
def test_several_labels(folder: Path, run: Run, tmp_path: Path) -> None:
    chances = outputs_of(folder, "multi").sigmoid()
    threshold = float(chances.median())
    code, out, _ = run("predict", "multi.safetensors", "images", "--threshold", f"{threshold:.4f}")
    assert code == 0
    for line, row in zip(out.splitlines(), chances.tolist(), strict=True):
        above = sorted(
            (p, name) for p, name in zip(row, OUTPUTS, strict=True) if p > float(f"{threshold:.4f}")
        )
        assert line.split("  ")[1:] == ([f"{name} {100 * p:.1f}%" for p, name in reversed(above)] or ["-"])
    code, out, _ = run("predict", "multi.safetensors", "store/multi", "--csv", str(tmp_path / "p.csv"))
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["label"] for row in rows] == ["", "left", "", "left", "right", "left;right"]
    assert [float(row["right"]) for row in rows] == pytest.approx(chances[:, 1].tolist(), rel=1e-4)
    truth = torch.tensor([[n % 2, int(n > 3)] for n in range(COUNT)]) > 0
    right = (chances > 0.5) == truth
    assert f"{int(right.all(1).sum())} of 6 as labelled" in out
    assert f"{100 * right.double().mean():.1f}% of all single labels" in out
    assert [row["predicted"] for row in rows] == [
        ";".join(OUTPUTS[at] for at in sorted(range(2), key=lambda at: -row[at]) if row[at] > 0.5)
        for row in chances.tolist()
    ]


@pytest.mark.slow
def test_numbers(folder: Path, run: Run, tmp_path: Path) -> None:
    values = outputs_of(folder, "regression")
    code, out, _ = run("predict", "regression.safetensors", "images")
    assert code == 0 and out.splitlines()[2].endswith(
        f"2.png  left {values[2, 0]:.6g}  right {values[2, 1]:.6g}"
    )
    code, out, _ = run(
        "predict", "regression.safetensors", "store/regression", "--csv", str(tmp_path / "p.csv")
    )
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert rows[3]["label"] == "0.75;-2.5" and float(rows[3]["left"]) == pytest.approx(
        float(values[3, 0]), rel=1e-5
    )
    truth = torch.tensor([[n / 4, -2.5] for n in range(COUNT)])
    left, right = (values - truth).abs().mean(0).tolist()
    assert code == 0 and out.splitlines()[1].startswith("mean absolute error: left ")
    said = [float(part.split()[-1]) for part in out.splitlines()[1].split(", ")]
    assert said == pytest.approx([left, right], rel=1e-4)


@pytest.mark.slow
def test_labels_of_another_meaning_are_not_compared(run: Run) -> None:
    code, out, err = run("predict", "regression.safetensors", "store/multi")
    assert code == 0 and len(out.splitlines()) == COUNT
    assert (
        err == "hapi predict: the dataset's labels are of other classes than the model's, and not compared\n"
    )
    code, _, err = run("predict", "regression.safetensors", "images", "--threshold", "0.5")
    assert code == 2 and "--threshold is for a network with several labels" in err


def test_ls_and_verify_know_the_kinds(run: Run) -> None:
    code, out, _ = run("ls", "store")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and lines["multi"].endswith("whole, several labels a sample")
    assert lines["regression"].endswith("whole, numbers as labels")
    code, out, _ = run("ls", "store/multi", "--json")
    assert json.loads(out)["labels"] == "multi" and json.loads(out)["classes"] == list(OUTPUTS)
    assert run("verify", "store/multi")[0] == 0


def test_a_packed_table_says_what_was_understood(run: Run, folder: Path) -> None:
    table = ["--labels", "regression.csv", "--replace", "--quiet"]
    code, out, _ = run("pack", "images", "store/one", *table, "--label", "left")
    assert code == 0 and "6 samples, 1 number as label, " in out
    code, out, _ = run("pack", "images", "store/one", *table, "--label", "left", "--label-kind", "single")
    assert code == 0 and "6 samples, 6 classes, " in out
    (folder / "some.csv").write_text("file,left\n0.png,1\n1.png,0\n9.png,1\n")
    code, _, err = run("pack", "images", "store/two", "--labels", "some.csv", "--quiet")
    assert (
        code == 2 and "2.png (and 3 more) has no row in some.csv; add rows, or pass --skip-unmatched" in err
    )
    code, out, err = run("pack", "images", "store/two", "--labels", "some.csv", "--quiet", "--skip-unmatched")
    assert code == 0 and "2 samples, 2 classes" in out and "4 left out" in out
    assert "left out: 4 files without a row and 1 row without a file of some.csv" in err
