"""Answers of later versions: fields that this one does not know are left out, as far down as there are objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.reports import report_with

from hapi.data.manifest import SampleLayout
from hapi.errors import BadRequestError, WireError
from hapi.models.zoo.build import ModelSpec
from hapi.wire import frames
from hapi.wire.cache_room import CacheRoom
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd, TensorSpec, data_frame, end_frame, joined
from hapi.wire.held_out import HeldOutCounts
from hapi.wire.messages import DatasetDescription
from hapi.wire.references import DatasetReference, TransformSpec
from hapi.wire.report import RequestReport

LAYOUT = {"kind": "tensor", "sample_shape": [3, 4, 4], "sample_dtype": "uint8"}
DATASET = {"name": "images", "version": "0" * 64}
DESCRIPTION = {
    "reference": DATASET, "count": 3, "classes": ["a", "b"], "total_bytes": 1, "layout": LAYOUT,
    "transform": TransformSpec().to_json(), "group": 1, "window": 1, "label_counts": [1, 2],
}  # fmt: skip
ANSWERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a dataset": (lambda d: replace(DatasetDescription.from_json(d), layout={}), DESCRIPTION),
    "a layout": (lambda d: SampleLayout.from_json(d, answer=True), LAYOUT),
    "held-out samples": (HeldOutCounts.from_json, {"version": "0" * 64, "label_counts": [1, 2]}),
    "room of a cache": (CacheRoom.from_json, {"bytes": 10, "read": 1}),
    "a request's report": (RequestReport.from_json, report_with().to_json()),
    "a frame's tensor": (TensorSpec.from_json, TensorSpec("x", "float32", (2, 3)).to_json()),
    "a model's build": (
        lambda d: ModelSpec.from_json(d, answer=True),
        ModelSpec(architecture="resnet18", weights="random:0").to_json(),
    ),
}


def extended(document: Any) -> Any:
    """The document with a field more in each object."""
    if isinstance(document, list):
        return [extended(value) for value in document]
    if not isinstance(document, dict):
        return document
    return {"of_later": {"x": [1]}, **{name: extended(value) for name, value in document.items()}}


@pytest.mark.parametrize("kind", ANSWERS)
def test_unknown_fields_of_an_answer_are_left_out(kind: str) -> None:
    read, document = ANSWERS[kind]
    assert read(extended(document)) == read(copy.deepcopy(document))


@pytest.mark.parametrize("kind", ["a dataset", "held-out samples", "a layout"])
def test_a_field_that_is_missing_still_is_an_error(kind: str) -> None:
    read, document = ANSWERS[kind]
    for name in set(document) - {"label_counts"}:
        with pytest.raises(BadRequestError, match=name):
            read(extended({known: value for known, value in document.items() if known != name}))


def test_what_is_stored_or_asked_for_stays_strict() -> None:
    for read, document in ((DatasetReference.from_json, DATASET), (SampleLayout.from_json, LAYOUT)):
        with pytest.raises(BadRequestError, match="unknown field 'of_later'"):
            read(extended(document))


def test_frames_with_fields_of_later_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frames._header_json
    monkeypatch.setattr(frames, "_header_json", lambda header: extended(whole(header)))
    header = FrameHeader(np.arange(2), (TensorSpec("x", "float32", (2, 3)),))
    values = np.arange(6, dtype=np.float32)
    stream = iter([*joined(data_frame(header, [values])), end_frame(StreamEnd(1, 2, {"more": {}}))])
    reader, came = FrameReader(BufferSource(stream)), np.empty(6, np.float32)
    found = reader.next(lambda header: [memoryview(came).cast("B")])
    assert isinstance(found, FrameHeader) and found.tensors == header.tensors and (came == values).all()
    assert reader.next(lambda header: []) == StreamEnd(1, 2, {"more": {}})


@pytest.mark.parametrize("gone", ["name", "dtype", "shape", "codec"])
def test_a_tensor_needs_its_fields(gone: str) -> None:
    document = TensorSpec("x", "float32", (2, 3)).to_json()
    del document[gone]
    with pytest.raises(WireError, match="needs name, dtype, shape, codec"):
        TensorSpec.from_json(document)
