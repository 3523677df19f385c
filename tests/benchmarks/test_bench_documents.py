"""The benchmark of requests' readers reads what the wire reads."""

from __future__ import annotations

import json

from benchmarks.serving.documents import measure, readers, request


def test_all_readers_read_the_same_request() -> None:
    body = json.dumps(request(3)).encode()
    found = {name: read(body) for name, read in readers().items()}
    assert found["json"] == found["parse_document"] == request(3)
    assert found["whole"].ids.tolist() == request(3)["ids"]


def test_figures_by_samples() -> None:
    figures = measure((1, 2), rounds=1)
    assert list(figures) == [1, 2] and all(value > 0 for row in figures.values() for value in row.values())
