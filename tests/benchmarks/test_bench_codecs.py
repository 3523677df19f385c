"""``benchmarks codecs``: every cut in both types, and what it says of them."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving import codec_accuracy
from benchmarks.serving.codecs import CodecsSettings, measure_codecs
from hapi.codecs.names import EXACT, LOSSY


@pytest.mark.slow
def test_every_cut_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_accuracy, "CUTS", (3,))
    monkeypatch.setattr(codec_accuracy, "STEPS", 3)
    result = measure_codecs(
        CodecsSettings(models=("resnet18",), image_size=32, accuracy=True), lambda line: None
    )
    cuts = sorted({row.cut for row in result.cuts})
    assert cuts == list(range(1, cuts[-1] + 1))
    for row in result.cuts:
        assert [f.name for f in row.figures] == list(EXACT)
        assert all(f.ratio >= 1 for f in row.figures)
    relu = next(row for row in result.cuts if row.name == "relu" and row.dtype == "float32")
    assert 0.3 < relu.zeros < 0.7
    assert relu.figures[0].ratio > 1.3
    assert set(result.accuracies[3]) == {"none", *LOSSY}
    table = "\n".join(result.table())
    assert "dense float32, planes" in table and "held-out accuracy" in table
    document = json.loads(json.dumps(result.to_json()))
    assert set(document["rows"][0]["pays_below"]) == set(EXACT)
