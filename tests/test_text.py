"""Text of others: nothing in it steers a terminal, and it is bounded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import DataError, HapiError, from_problem
from hapi.text import CLASS_CHARACTERS, MESSAGE_CHARACTERS, class_name, counted, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("flowers", "flowers"),
        ("größe 花 é", "größe 花 é"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x9b31m", r"\x9b31m"),
        ("user\u202egnp.exe", r"user\u202egnp.exe"),
        ("\u2066a\u2069 \u200b", r"\u2066a\u2069 \u200b"),
        ("a\u2028b", r"a\u2028b"),
        ("\udc80 name", r"\udc80 name"),
        ("\x07\x00\x7f", r"\x07\x00\x7f"),
    ],
)
def test_what_steers_a_terminal_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_noun_has_the_number_of_its_count() -> None:
    assert [counted(n, "class") for n in (0, 1, 2)] == ["0 classes", "1 class", "2 classes"]
    assert [counted(n, "batch", f"{n}.0k") for n in (1, 5)] == ["1.0k batch", "5.0k batches"]
    assert [counted(3, noun) for noun in ("more such row", "epoch")] == ["3 more such rows", "3 epochs"]


@given(st.text(alphabet=st.characters()))
def test_names_of_classes_keep_the_joiners_of_their_language(text: str) -> None:
    for name in ("می\u200cخواهم", "👩\u200d⚕️", "vin\u00a0rouge", "größe 花"):
        assert class_name(name) == name
    shown = class_name(text)
    assert class_name(shown) == shown
    assert shown.replace("\u00a0", "").replace("\u200c", "").replace("\u200d", "").isprintable()
    assert len(class_name(text * 9000)) <= CLASS_CHARACTERS


@given(st.text(alphabet=st.characters()), st.integers(0, 50))
def test_any_text_is_one_printable_bounded_line(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert shown.isprintable() and len(shown) <= limit
    shown.encode()


def test_a_long_text_keeps_its_beginning_and_its_end_and_costs_little() -> None:
    began = time.monotonic()
    shown = printable("begin" + "\x1b" * 50_000_000 + "; do this", 100)
    assert shown.startswith("begin") and shown.endswith("; do this") and len(shown) == 100
    assert time.monotonic() - began < 20


def test_every_error_is_one_printable_line() -> None:
    error = DataError("class \x1b]0;owned\x07 \udcff of\nshard " + "x" * 10_000 + "; pack it again")
    assert str(error).isprintable() and len(str(error)) <= MESSAGE_CHARACTERS
    assert str(error).startswith(r"class \x1b]0;owned\x07 \udcff of shard") and "pack it again" in str(error)
    told = from_problem({"type": "urn:hapi:problem:data", "detail": "\x1b[2J\u202e"}, 500)
    assert str(told) == r"\x1b[2J\u202e"


def test_the_id_of_a_request_does_not_lengthen_an_error_without_bound() -> None:
    error = HapiError("x")
    error.about_request("\x1b" * 10_000)
    assert str(error).isprintable() and len(str(error)) <= MESSAGE_CHARACTERS
