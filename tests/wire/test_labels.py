"""Labels' forms: round trips through words, and rows that are no labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import BadRequestError
from hapi.wire.labels import LABEL_KINDS, MAX_WIDTH, LabelForm, LabelKind, equal_labels


@given(st.sampled_from(LABEL_KINDS), st.integers(1, 9), st.integers(0, 20), st.integers(0, 9))
def test_words_hold_labels_of_every_form(kind: LabelKind, classes: int, count: int, seed: int) -> None:
    form = LabelForm(kind, classes)
    labels = form.empty(count)
    labels.reshape(-1).view(np.uint8)[:] = np.frombuffer(
        np.random.default_rng(seed).bytes(labels.nbytes), np.uint8
    )
    words = form.to_words(labels)
    assert words.shape == (count, form.words) and words.dtype == np.uint64
    assert form.from_words(words).tobytes() == labels.tobytes()
    assert form.spec(count).nbytes == labels.nbytes == count * form.nbytes
    whole = np.nan_to_num(labels)
    assert equal_labels(whole, whole).all() and equal_labels(whole, whole).shape == (count,)


@pytest.mark.parametrize(
    ("form", "labels", "wrong"),
    [
        (LabelForm("single", 3), np.array([0, 2, 1]), None),
        (LabelForm("single", 3), np.array([0, 3, -1]), 1),
        (LabelForm("single", 3), np.array([-1]), 0),
        (LabelForm("multi", 2), np.array([[0, 1], [0.5, 1]], np.float32), None),
        (LabelForm("multi", 2), np.array([[0, 1], [0, 1.5]], np.float32), 1),
        (LabelForm("multi", 2), np.array([[0, np.nan]], np.float32), 0),
        (LabelForm("regression", 1), np.array([[-1e9], [3]], np.float32), None),
        (LabelForm("regression", 1), np.array([[1], [np.inf]], np.float32), 1),
    ],
)
def test_the_first_row_that_is_no_label(form: LabelForm, labels: np.ndarray, wrong: int | None) -> None:
    assert form.first_wrong(labels) == wrong


def test_too_many_values_of_one_label() -> None:
    assert LabelForm("single", 1 << 20).checked("here").classes == 1 << 20
    assert LabelForm("multi", MAX_WIDTH).checked("here").width == MAX_WIDTH
    with pytest.raises(BadRequestError, match=r"^here: 4097 values for one sample's label, at most 4096"):
        LabelForm("regression", MAX_WIDTH + 1).checked("here")
