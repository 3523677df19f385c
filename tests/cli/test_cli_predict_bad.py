"""``hapi predict`` with images among the good ones that cannot be read."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hapi.cli.main import main
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.wire.references import TransformSpec

SPEC = ModelSpec(architecture="squeezenet1_1", num_classes=3, input_shape=(3, 64, 64))
BAD = ("a_text.jpg", "c_cut.png", "e_empty.jpg", "f_nowhere.jpg")
GOOD = ("b.png", "d.png", "g.png")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a folder with three good images and four bad ones between them."""
    root = tmp_path_factory.mktemp("bad")
    (root / "images").mkdir()
    rng = np.random.default_rng(0)
    for name in GOOD:
        Image.fromarray(rng.integers(0, 256, (70, 70, 3), np.uint8)).save(root / "images" / name)
    (root / "images" / BAD[0]).write_text("<html>404</html>")
    (root / "images" / BAD[1]).write_bytes((root / "images" / "b.png").read_bytes()[:3000])
    (root / "images" / BAD[2]).touch()
    (root / "images" / BAD[3]).symlink_to("nowhere.jpg")
    card = ModelCard(
        spec=SPEC, classes=("ant", "bee", "fly"), transform=TransformSpec.for_image_size(64), freeze=3
    )
    write_model(root / "m.safetensors", build(SPEC).module.state_dict(), card)
    return root


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(folder)

    def ran(*arguments: str) -> tuple[int, str, str]:
        code = main(["predict", "m.safetensors", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ran


@pytest.mark.parametrize("batch", ["1", "2", "32"])
def test_good_images_are_predicted_and_bad_ones_named(run: Run, batch: str) -> None:
    code, out, err = run("images", "--batch-size", batch)
    assert [line.split("  ")[0] for line in out.splitlines()] == [f"images/{name}" for name in GOOD]
    *named, last = err.splitlines()
    assert code == 1 and len(named) == len(BAD)
    for line, name in zip(named, BAD, strict=True):
        assert line.startswith(f"hapi predict: left out: image images/{name}: ") and line.count(name) == 1, (
            line
        )
    assert last == (
        "hapi predict: error: 4 of 7 images cannot be read; repair or remove them, or pass --skip-bad to end "
        "with 0 without them"
    )


@pytest.mark.slow
def test_a_file_has_the_good_ones(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    code, out, err = run("images", "--csv", str(table), "--skip-bad")
    assert (
        code == 0 and out == f"3 predictions in {table}\n" and err.count("left out: ") == err.count("\n") == 4
    )
    assert [row["sample"] for row in csv.DictReader(table.open())] == [f"images/{name}" for name in GOOD]
    assert run("images", "--csv", str(table))[0] == 1
    assert len(table.read_text().splitlines()) == 4


@pytest.mark.slow
def test_no_good_image_is_an_error_anyway(run: Run) -> None:
    bad = [f"images/{name}" for name in BAD[:3]]
    code, out, err = run("--skip-bad", *bad)
    assert (code, out) == (1, "") and err.splitlines()[-1] == (
        "hapi predict: error: 3 of 3 images cannot be read; repair or remove them"
    )
    code, out, err = run("--skip-bad", bad[0])
    assert (code, out, err.count("\n")) == (1, "", 1) and f"error: image {bad[0]}: " in err
