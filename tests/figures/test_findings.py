"""The page's part about the last validation: classes, confusion matrix, worst samples, further metrics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.report_tools import KEPT

from hapi.cli.main import main
from hapi.errors import ConfigError
from hapi.figures.findings import findings
from hapi.figures.html import page
from hapi.figures.reading import Run
from hapi.figures.run import learning_svg

WORST = {"id": 7, "label": "<cat>", "predicted": "dog", "probability": 0.98765, "loss": 4.25}


def report(size: int = 3, **details: Any) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(KEPT)
    names = [f"class{n}" for n in range(size)]
    matrix = [[10 * row + column for column in range(size)] for row in range(size)]
    document["epochs"][-1]["validation_details"] = {
        "classes": [
            {"name": name, "samples": 4, "accuracy": None if name == "class2" else 0.75} for name in names
        ],
        "confusion": matrix,
        "worst": [WORST],
        **details,
    }
    return document


def part(document: dict[str, Any]) -> str:
    return findings(Run.from_json(document).details)


def test_the_part_about_the_last_validation() -> None:
    shown = part(report())
    for text in (
        "Confusion matrix",
        "class1",
        '<td class="">21</td>',
        "75.0%",
        "98.8%",
        "4.2500",
        "&lt;cat&gt;",
    ):
        assert text in shown
    assert "<cat>" not in shown and "Most frequent" not in shown


def test_a_large_matrix_is_told_by_its_largest_confusions() -> None:
    shown = part(report(size=40))
    assert "Most frequent confusions" in shown and "Confusion matrix" not in shown
    assert shown.index(">class39<", shown.index("Most frequent")) < shown.index(">428<")
    assert ">429<" not in shown, "of the diagonal"


def test_without_validation_there_is_none() -> None:
    assert part(KEPT) == ""
    assert part(report(size=0, confusion=None, worst=[])) == ""
    shown = part(report(size=0, confusion=None, worst=[{**WORST, "probability": None, "loss": None}]))
    assert "highest loss" in shown and "matrix" not in shown


@pytest.mark.parametrize(
    "details",
    [
        {"confusion": [[1]]},
        {"confusion": [[1, 2, 3], [1, 2, 3], [1, 2, -3]]},
        {"confusion": "much"},
        {"worst": [{**WORST, "id": -1}]},
        {"worst": [WORST] * 101},
        {"classes": [{"name": 1, "samples": 1, "accuracy": 1.0}] * 3},
        {"classes": [{"name": "a", "samples": 1, "accuracy": 1.0}] * 101, "confusion": None},
    ],
)
def test_details_that_no_training_wrote(details: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"report.epochs\[4\].validation_details"):
        part(report(**details))


@pytest.mark.slow
def test_further_metrics_are_columns() -> None:
    document = report()
    for entry in document["epochs"]:
        entry.update(validation_f1=0.1234, validation_auroc=None)
    run = Run.from_json(document)
    assert run.epochs[0].metrics == (("f1", 0.1234), ("auroc", None))
    shown = page(run)
    assert "Validation f1" in shown and "0.1234" in shown and "Validation auroc" in shown


@pytest.mark.slow
def test_a_regression_has_no_accuracy() -> None:
    document = report(size=0, confusion=None)
    for number, entry in enumerate(document["epochs"]):
        entry.update(accuracy=None, validation_mae=3.0 - number / 10)
        del entry["validation_accuracy"]
    drawn = learning_svg(Run.from_json(document).epochs)
    assert "mae" in drawn and "Accuracy" not in drawn


@pytest.mark.slow
def test_the_command_draws_it(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(report()))
    assert main(["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "p.html")]) == 0
    assert "Samples with the highest loss" in (tmp_path / "p.html").read_text()
