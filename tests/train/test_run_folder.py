"""Names of run folders, and their making."""

from __future__ import annotations

import threading
from datetime import datetime
from pathlib import Path

import pytest

from hapi.errors import UsageError
from hapi.train.outputs.run_folder import new_run_folder, run_name


@pytest.mark.parametrize(
    ("dataset", "model", "name"),
    [
        ("flowers", "resnet50", "flowers-resnet50-20261124-150102"),
        ("a.b_c", "timm:vit_tiny.augreg", "a.b_c-timm-vit_tiny.augreg-20261124-150102"),
        ("x", "../../my pkg.net:make", "x-my-pkg.net-make-20261124-150102"),
        ("y" * 300, "://", "y" * 60 + "-run-20261124-150102"),
    ],
)
def test_names(dataset: str, model: str, name: str) -> None:
    assert run_name(dataset, model, datetime(2026, 11, 24, 15, 1, 2)) == name


def test_each_run_has_its_own(tmp_path: Path) -> None:
    """Also when many begin in the same second."""
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(new_run_folder("d", "m", str(tmp_path / "runs"))))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 20 and all(folder.is_dir() for folder in made)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UsageError, match=r"cannot be made: .*--output DIR"):
        new_run_folder("d", "m", str(tmp_path / "runs"))
