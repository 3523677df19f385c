"""From a folder and a table of labels to a model that predicts, over a real server: several labels, and numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.harness import hapi, losses, report_of, server, train

COUNT = 48
COMMON = (
    "--model", "resnet18", "--weights", "random", "--bs", "16", "--freeze", "12", "--epochs", "1", "--lr", "0.01",
    "--validation", "0.25", "--no-progress",
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are bright or dark, and red or blue; a table that says so, in words of both kinds."""
    root: Path = tmp_path_factory.mktemp("labelled")
    (root / "photos").mkdir()
    rng = np.random.default_rng(0)
    rows = ["photo;bright;red;light"]
    for number in range(COUNT):
        bright, red = number % 2, number // 2 % 2
        pixels = rng.integers(0, 60, (32, 32, 3)) + 120 * bright
        pixels[..., 0 if red else 2] += 60
        Image.fromarray(pixels.astype(np.uint8)).save(root / "photos" / f"{number:02}.png")
        rows.append(f"photos/{number:02};{bright};{red};{pixels.mean() / 255:.4f}")
    (root / "labels.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    table = ("--labels", f"{root}/labels.csv", "--label-file-column", "photo", "--image-size", "32")
    hapi("pack", str(root), f"{root}/store/multi", *table, "--label", "bright,red")
    hapi("index", "photos", f"{root}/light", *_relative(root), "--image-size", "32")
    return root


def _relative(root: Path) -> tuple[str, ...]:
    """The table with names that count from ``photos``, for a dataset beside the images."""
    text = (root / "labels.csv").read_text("utf-8-sig").replace("photos/", "")
    (root / "light.csv").write_text(text)
    return ("--labels", f"{root}/light.csv", "--label-file-column", "photo", "--label", "light")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), [("multi", "store"), ("regression", ".")])
def test_a_whole_job_is_the_same_at_every_split(store: Path, kind: str, place: str, tmp_path: Path) -> None:
    name = "multi" if kind == "multi" else "light"
    with server(store / place) as running:
        for split in ("0", "freeze"):
            train(*COMMON, "--server", running.url, "--dataset", name, "--split", split,
                  "--report", str(tmp_path / f"{split}.json"), "--output", str(tmp_path / split))  # fmt: skip
    reports = {split: report_of(tmp_path / f"{split}.json") for split in ("0", "freeze")}
    for report in reports.values():
        assert losses(report) == pytest.approx(losses(reports["0"]), rel=1e-5)
    table = tmp_path / "p.csv"
    model, dataset = tmp_path / "freeze" / "model.safetensors", f"{store / place}/{name}"
    done = hapi("predict", str(model), dataset, "--csv", str(table), "--quiet")
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == COUNT
    if kind == "multi":
        assert set(rows[0]) == {"sample", "label", "predicted", "bright", "red"}
        assert rows[3]["label"] == "bright;red" and " of 48 as labelled" in done.stdout
    else:
        assert set(rows[0]) == {"sample", "label", "light"} and "mean absolute error: light " in done.stdout
