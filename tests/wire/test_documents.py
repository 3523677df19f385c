"""Documents of the other side: strict, bounded, and never an exception of another kind."""

from __future__ import annotations

import pytest

from hapi.wire import documents
from hapi.wire.documents import parse_document


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
        (b'{"a": NaN}', "NaN is no number"), (b"[Infinity]", "no number"), (b"[-Infinity]", "no number"),
        (b"[1e999]", "too large a number"), (b"9" * 5000, "5000 digits"), (b"9" * 21, "21 digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "field 'c' is given twice"), (b"'a'", "Expecting value"),
    ],
)  # fmt: skip
def test_what_is_not_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        parse_document(data)
    assert len(str(caught.value)) < 300


def test_many_small_values_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_VALUES", 1000)
    assert len(parse_document(b"[" + b",".join([b"1"] * 999) + b"]")) == 999
    for part in (b"[]", b"{}", b"1"):
        with pytest.raises(ValueError, match="more than 1000 values"):
            parse_document(b"[" + b",".join([part] * 1001) + b"]")
