"""Requests and references: the round trip holds, and every field is refused when it is wrong."""

from __future__ import annotations

import copy
import itertools
import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_tools import with_field
from support.reports import report_with

from hapi.errors import BadRequestError, BusyError, HapiError, NotFoundError, TooLargeError, from_problem
from hapi.wire.messages import (
    MAX_SAMPLES,
    DatasetDescription,
    ExtractRequest,
    SamplesRequest,
    TensorsRequest,
    parse_body,
)
from hapi.wire.references import TransformSpec, check_name
from hapi.wire.report import RequestReport, ServerTier

EXTRACT = {
    "dataset": {"name": "digits", "version": "0123456789abcdef"},
    "model": {
        "source": "zoo",
        "name": "resnet18",
        "weights": "random:0",
        "digest": "0123456789abcdef0123456789abcdef",
        "blocks": [],
        "input_shape": [3, 64, 64],
    },
    "split": 3,
    "split_name": "relu",
    "ids": [5, 0, 7],
    "transform": TransformSpec().to_json(),
    "windows": {"seed": 3, "epoch": 1, "group": 512, "window": 64},
}


def paths(document: object, prefix: tuple = ()) -> list[tuple]:
    found = [prefix] if prefix else []
    if isinstance(document, dict):
        for key, value in document.items():
            found += paths(value, (*prefix, key))
    return found


def test_extract_round_trip() -> None:
    request = ExtractRequest.from_json(json.loads(json.dumps(EXTRACT)))
    assert request.to_json() == EXTRACT
    assert request.ids.tolist() == [5, 0, 7]


@pytest.mark.parametrize("path", paths(EXTRACT), ids=".".join)
@pytest.mark.parametrize(
    "wrong",
    [
        None,
        True,
        -1,
        1.5,
        "",
        "../../etc/passwd",
        "a/b",
        "\x00",
        [],
        [[]],
        {},
        {"x": 1},
        1 << 70,
        "x" * 100_000,
    ],
    ids=repr,
)
def test_every_field_wrong_in_turn(path: tuple, wrong: object) -> None:
    if path == ("transform",) and wrong is None:
        return  # no transform is a value
    if path == ("model", "blocks") and wrong == []:
        return
    if path == ("split_name",) and isinstance(wrong, str) and 0 < len(wrong) < 512:
        return  # any short text may be a layer's name; the server compares it
    with pytest.raises((BadRequestError, TooLargeError)) as caught:
        ExtractRequest.from_json(with_field(EXTRACT, path, wrong))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", paths(EXTRACT), ids=".".join)
def test_missing_and_unknown_fields(path: tuple) -> None:
    changed = copy.deepcopy(EXTRACT)
    place = changed
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    if path not in {("model", "blocks"), ("model", "input_shape"), ("windows",)}:
        with pytest.raises(BadRequestError, match=path[-1]):
            ExtractRequest.from_json(changed)
    with pytest.raises(BadRequestError, match="unknown field"):
        ExtractRequest.from_json(with_field(EXTRACT, (*path[:-1], "surprise"), 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.sampled_from(paths(EXTRACT)))
def test_fuzzed_fields_never_crash(value: object, path: tuple) -> None:
    try:
        ExtractRequest.from_json(with_field(EXTRACT, path, value))
    except HapiError as error:
        assert error.status in (400, 413)


@given(json_values)
def test_fuzzed_documents_never_crash(value: object) -> None:
    for parse in (
        ExtractRequest.from_json,
        SamplesRequest.from_json,
        TensorsRequest.from_json,
        DatasetDescription.from_json,
        RequestReport.from_json,
    ):
        with pytest.raises(HapiError):
            parse(value)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1, 2, 3], "number for each class"), ("12", "number for each class"), ([1, -1], "label_counts")],
)
def test_samples_of_each_class(counts: Any, message: str) -> None:
    document = {
        "reference": EXTRACT["dataset"], "count": 3, "classes": ["a", "b"], "total_bytes": 1, "layout": {},
        "transform": None, "group": 1, "window": 1,
    }  # fmt: skip
    assert DatasetDescription.from_json(document).label_counts == ()
    sound = DatasetDescription.from_json({**document, "label_counts": [1, 2]})
    assert sound.label_counts == (1, 2) and sound.to_json()["label_counts"] == [1, 2]
    with pytest.raises(BadRequestError, match=message):
        DatasetDescription.from_json({**document, "label_counts": counts})


def test_whether_a_server_keeps_features() -> None:
    """A server that keeps none describes its datasets as one from before did."""
    document = {
        "reference": EXTRACT["dataset"], "count": 3, "classes": ["a"], "total_bytes": 1, "layout": {},
        "transform": None, "group": 1, "window": 1,
    }  # fmt: skip
    assert DatasetDescription.from_json(document).to_json() == document
    kept = DatasetDescription.from_json({**document, "keeps_features": True})
    assert kept.keeps_features and kept.to_json()["keeps_features"] is True
    with pytest.raises(BadRequestError, match="keeps_features is not true or false"):
        DatasetDescription.from_json({**document, "keeps_features": 1})


def test_a_report_tells_what_was_shared() -> None:
    """Another server's report, without these figures, shares nothing."""
    alone, shared = report_with(), report_with(joined=3, kept=4)
    assert "kept" not in alone.to_json() and RequestReport.from_json(alone.to_json()).shared == 0
    assert RequestReport.from_json(shared.to_json()) == shared and shared.shared == 7


def test_ids_are_bounded() -> None:
    with pytest.raises(TooLargeError, match="several requests"):
        SamplesRequest.from_json({"dataset": EXTRACT["dataset"], "ids": list(range(MAX_SAMPLES + 1))})
    for ids in ([], [True], [1.0], ["1"], [-1], "12"):
        with pytest.raises(BadRequestError, match="ids"):
            SamplesRequest.from_json({"dataset": EXTRACT["dataset"], "ids": ids})


def test_bodies() -> None:
    assert parse_body(b'{"a": 1}') == {"a": 1}
    for body in (b"", b"\xff", b"{", b"[" * 100_000):
        with pytest.raises(BadRequestError, match="not JSON"):
            parse_body(body)
    with pytest.raises(TooLargeError):
        parse_body(b" " * (2 << 20))


@pytest.mark.timeout(30)
def test_a_field_given_twice_is_found_among_very_many() -> None:
    """One pass: a body is as long as it may be, and the one thread that parses is everybody's."""
    letters = string.ascii_letters + string.digits
    names = ["".join(n) for n in itertools.islice(itertools.product(letters, repeat=3), 130_000)]
    body = ",".join(f'"{name}":0' for name in [*names, names[-1]])
    with pytest.raises(BadRequestError, match=f"field '{names[-1]}' is given twice"):
        parse_body(f"{{{body}}}".encode())
    with pytest.raises(BadRequestError, match="field 'b' is given twice"):
        parse_body(b'{"a": {"b": 1, "c": 2, "b": 1}}')


@pytest.mark.parametrize("name", ["a", "A-b_c.d", "x" * 128, "0"])
def test_good_names(name: str) -> None:
    assert check_name(name, "x") == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a..b", ".a", "a/b", "a\\b", "a b", "é", "x" * 129, "a\n", "%2e%2e", "a.", None, 3],
)
def test_bad_names(name: object) -> None:
    with pytest.raises(BadRequestError, match="is not a name"):
        check_name(name, "x")


def test_problems_round_trip() -> None:
    for error in (
        NotFoundError("no dataset 'x'"),
        BusyError("come back", retry_after=3.0, expected_wait=2.5),
    ):
        again = from_problem(json.loads(json.dumps(error.to_problem())), error.status)
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert (again.retry_after, again.expected_wait) == (error.retry_after, error.expected_wait)


@given(json_values, st.integers(400, 599))
def test_any_problem_document_becomes_an_error(document: object, status: int) -> None:
    assert isinstance(from_problem(document, status), HapiError)


def test_report_round_trip() -> None:
    report = report_with(
        seconds={"forward": 0.25},
        cpu={"forward": 0.125},
        others=(0.25, 0.25),
        process=(3.0, 3.5),
        layers=(0.125, 0.0625),
        wait=1.5,
        tier=ServerTier(device="cuda", processors=8, threads=4, running=2, devices=3, reuse=False),
    )
    assert RequestReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_transform_for_image_size() -> None:
    assert TransformSpec.for_image_size(224) == TransformSpec()
    assert TransformSpec.for_image_size(64).output_shape == (3, 64, 64)
    assert TransformSpec.for_image_size(1).resize >= 1
