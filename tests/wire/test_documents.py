"""Documents of the other side: strict, bounded, and never an exception of another kind."""

from __future__ import annotations

import math

import pytest

from hapi.errors import BadRequestError
from hapi.wire.documents import check_int, check_number, parse_document, strict_fields


def test_what_is_json_is_read() -> None:
    text = '{"a": [1, -2.5, null, true, "ü\\u202e"], "b": {}, "n": 18446744073709551615}'.encode()
    expected = {"a": [1, -2.5, None, True, "ü\u202e"], "b": {}, "n": (1 << 64) - 1}
    assert parse_document(text) == parse_document(bytearray(text)) == expected


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "Expecting value"), (b"{} {}", "Extra data"), (b"\xff\xfe{\x00", "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"[" * 100_000, "nested too deeply"), (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": NaN}', "NaN is not a number"), (b"[Infinity]", "is not a number"), (b"[-Infinity]", "is not a number"),
        (b"[1e999]", "too large a number"), (b"9" * 5000, "5000 digits"), (b"9" * 21, "21 digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "field 'c' is given twice"), (b"'a'", "Expecting value"),
    ],
)  # fmt: skip
def test_what_is_not_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        parse_document(data)
    assert len(str(caught.value)) < 300


def test_many_small_values_are_refused_before_they_take_memory() -> None:
    assert len(parse_document(b"[" + b",".join([b"1"] * 999) + b"]", 1000)) == 999
    for part in (b"[]", b"{}", b"1"):
        with pytest.raises(ValueError, match="more than 1000 values"):
            parse_document(b"[" + b",".join([part] * 1001) + b"]", 1000)


def test_long_runs_of_digits_are_no_long_integers() -> None:
    text = b'{"digest": "%s", "sum": %s, "least": -%s, "x": 0.%s}' % (
        b"7" * 64,
        b"9" * 20,
        b"9" * 19,
        b"1" * 40,
    )
    found = parse_document(text)
    assert found["digest"] == "7" * 64 and found["sum"] == 10**20 - 1 and found["least"] == 1 - 10**19
    with pytest.raises(ValueError, match="an integer of 21 digits"):
        parse_document(text.replace(b'"sum": ', b'"sum": 1'))


def test_only_where_it_is_said_nan_is_a_number() -> None:
    found = parse_document(b'{"punsafe": NaN, "label": 3}', nan=True)
    assert math.isnan(found["punsafe"]) and found["label"] == 3
    with pytest.raises(ValueError, match="given twice"):
        parse_document(b'{"a": 1, "a": NaN}', nan=True)


def test_what_is_known_is_said() -> None:
    allowed = {"name": True, "note": False}
    assert strict_fields({"name": 1}, allowed, "thing") == {"name": 1}
    for document, message in [
        ({"name": 1, "nmae": 2}, "thing: unknown field 'nmae'; known are name, note"),
        ({"note": 2}, "thing: field 'name' is missing"),
        ([], "thing: expected an object, got list"),
    ]:
        with pytest.raises(BadRequestError) as caught:
            strict_fields(document, allowed, "thing")
        assert str(caught.value) == message


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 11, float("nan")])
def test_what_is_no_integer_in_its_range(value: object) -> None:
    assert check_int(10, 0, 10, "n") == 10
    with pytest.raises(BadRequestError, match="n: expected an integer from 0 to 10, got"):
        check_int(value, 0, 10, "n")


@pytest.mark.parametrize("value", [True, "1", None, -1, 11, float("nan"), float("inf")])
def test_what_is_no_number_in_its_range(value: object) -> None:
    assert check_number(1, 0, 10, "x") == 1.0
    with pytest.raises(BadRequestError, match="x: expected a number from 0 to 10, got"):
        check_number(value, 0, 10, "x")
