"""A range of a sequence in a request: the round trip holds, and every field is refused when it is wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_tools import with_field

from hapi.errors import BadRequestError, HapiError, TooLargeError
from hapi.wire.messages import MAX_SAMPLES, SamplesRequest
from hapi.wire.references import DatasetReference
from hapi.wire.sequences import ChunkWindows, SequenceRange

REQUEST: dict[str, Any] = {
    "dataset": {"name": "digits", "version": "0123456789abcdef"},
    "sequence": {"seed": 1, "epoch": 2, "shuffle": {"group": 512, "window": 64}},
    "start": 128,
    "stop": 256,
}
PATHS = [
    ("sequence",), ("start",), ("stop",), ("sequence", "seed"), ("sequence", "epoch"), ("sequence", "shuffle"),
    ("sequence", "shuffle", "group"), ("sequence", "shuffle", "window"),
]  # fmt: skip


@pytest.mark.parametrize("shuffle", ["full", {"group": 512, "window": 64}, {"group": 1, "window": 1}])
def test_round_trip(shuffle: Any) -> None:
    document = with_field(REQUEST, ("sequence", "shuffle"), shuffle)
    request = SamplesRequest.from_json(json.loads(json.dumps(document)))
    assert request.to_json() == document
    assert isinstance(request.ids, SequenceRange) and len(request.ids) == 128


@pytest.mark.parametrize("path", PATHS, ids=".".join)
@pytest.mark.parametrize(
    "wrong", [None, True, -1, 1.5, "", "chunks", "1", [], {}, {"x": 1}, 1 << 70, float("inf")], ids=repr
)
def test_every_field_wrong_in_turn(path: tuple[str, ...], wrong: Any) -> None:
    with pytest.raises(BadRequestError, match=path[-1]) as caught:
        SamplesRequest.from_json(with_field(REQUEST, path, wrong))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_missing_and_unknown_fields(path: tuple[str, ...]) -> None:
    document = copy.deepcopy(REQUEST)
    place = document
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises(BadRequestError, match="is missing" if path != ("sequence",) else "unknown field"):
        SamplesRequest.from_json(document)
    with pytest.raises(BadRequestError, match="unknown field 'surprise'"):
        SamplesRequest.from_json(with_field(REQUEST, (*path[:-1], "surprise"), 1))


def test_ids_or_a_sequence_and_not_both() -> None:
    with pytest.raises(BadRequestError, match="unknown field 'ids'"):
        SamplesRequest.from_json(REQUEST | {"ids": [1]})
    with pytest.raises(BadRequestError, match="unknown field"):
        SamplesRequest.from_json(REQUEST | {"windows": {"seed": 0, "epoch": 0, "group": 2, "window": 1}})


def test_ids_of_windows() -> None:
    dataset = DatasetReference.from_json(REQUEST["dataset"])
    windows = ChunkWindows(seed=5, epoch=9, group=512, window=64)
    request = SamplesRequest(dataset=dataset, ids=np.array([3, 1]), windows=windows)
    again = SamplesRequest.from_json(json.loads(json.dumps(request.to_json())))
    assert again.windows == windows and isinstance(again.ids, np.ndarray)
    assert "windows" not in SamplesRequest(dataset=dataset, ids=np.array([3])).to_json()
    by_range = SequenceRange(seed=5, epoch=9, group=512, window=64, start=0, stop=2)
    assert (
        SamplesRequest.from_json(SamplesRequest(dataset=dataset, ids=by_range).to_json()).windows == windows
    )


def test_ranges_are_bounded() -> None:
    for start, stop in ((5, 5), (6, 5)):
        with pytest.raises(BadRequestError, match="stop"):
            SamplesRequest.from_json(REQUEST | {"start": start, "stop": stop})
    assert len(SamplesRequest.from_json(REQUEST | {"start": 0, "stop": MAX_SAMPLES}).ids) == MAX_SAMPLES
    with pytest.raises(TooLargeError, match="several requests"):
        SamplesRequest.from_json(REQUEST | {"start": 0, "stop": MAX_SAMPLES + 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.sampled_from(PATHS))
def test_fuzzed_fields_never_crash(value: object, path: tuple[str, ...]) -> None:
    try:
        SamplesRequest.from_json(with_field(REQUEST, path, value))
    except HapiError as error:
        assert error.status in (400, 413)
