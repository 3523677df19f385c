"""The random part of a transform on the wire: the round trip holds, and every field is refused when it is wrong."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import BadRequestError
from hapi.wire.references import MAX_IMAGE_SIDE, MAX_SEED, Augmentation, Draw, TransformSpec

AUGMENT: dict[str, Any] = {
    "scale": [0.08, 1.0],
    "ratio": [0.75, 4 / 3],
    "flip": 0.5,
    "brightness": 0.4,
    "hue": 0.1,
}
RANDOM = {**TransformSpec().to_json(), "augment": AUGMENT, "seed": 7, "epoch": 3}

spans = st.floats(0.1, 1.0).flatmap(lambda low: st.tuples(st.just(low), st.floats(low, 1.0)))
amounts = st.floats(0, 0.5)
augmentations = st.one_of(
    st.builds(Augmentation, scale=spans, ratio=spans, flip=amounts, hue=amounts, contrast=amounts),
    st.builds(Augmentation, padding=st.integers(0, 4096), flip=amounts, saturation=amounts),
    st.builds(Augmentation, flip=st.floats(0.001, 1.0), brightness=amounts),
)


def parse(document: Any) -> TransformSpec:
    return TransformSpec.from_json(document, random=True)


@given(st.integers(1, MAX_IMAGE_SIDE))
def test_the_usual_transform_of_every_size_is_one_that_servers_take(side: int) -> None:
    spec = TransformSpec.for_image_size(side)
    assert TransformSpec.from_json(spec.to_json()) == spec


def test_round_trip() -> None:
    found = parse(json.loads(json.dumps(RANDOM)))
    assert found.to_json() == RANDOM
    assert found.draw == Draw(seed=7, epoch=3) and found.augment is not None and found.augment.jitters
    assert parse(TransformSpec().to_json()) == TransformSpec()


@given(augmentations, st.integers(0, MAX_SEED), st.integers(0, MAX_SEED))
def test_every_one_comes_back_as_it_is(augment: Augmentation, seed: int, epoch: int) -> None:
    """To the last bit: both tiers must draw the same from it."""
    spec = TransformSpec(augment=augment, draw=Draw(seed=seed, epoch=epoch))
    assert parse(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("field", ["augment", "seed", "epoch"])
@pytest.mark.parametrize(
    "wrong", [None, True, -1, 1.5, "", "x" * 9999, [], {}, {"x": 1}, 1 << 70, float("nan"), [[]]], ids=repr
)
def test_wrong_fields(field: str, wrong: object) -> None:
    with pytest.raises(BadRequestError, match=f"transform.{field}") as caught:
        parse({**RANDOM, field: wrong})
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["augment", "seed", "epoch"])
def test_all_three_or_none(field: str) -> None:
    document = copy.deepcopy(RANDOM)
    del document[field]
    with pytest.raises(BadRequestError, match=f"field '{field}' is missing"):
        parse(document)
    with pytest.raises(BadRequestError, match="unknown field"):
        TransformSpec.from_json({**TransformSpec().to_json(), field: RANDOM[field]})


@pytest.mark.parametrize(
    "field", ["scale", "ratio", "flip", "brightness", "contrast", "saturation", "hue", "padding"]
)
@pytest.mark.parametrize(
    "wrong",
    [None, True, -0.1, 11, 1 << 2000, "0.5", [], [0.5], [0.5, 0.4], [0.5, 99], [0, 0.5], [0.5, "1"], {},
     float("nan"), float("inf"), -float("inf"), [float("nan")] * 2, [0.1, float("nan")]],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_wrong_augmentations(field: str, wrong: object) -> None:
    document: dict[str, Any] = {"padding": 4} if field == "padding" else dict(AUGMENT)
    if field == "padding" and wrong == 11:
        return  # pixels
    with pytest.raises(
        BadRequestError, match=f"transform.augment.{field}: expected|wrong way round"
    ) as caught:
        parse({**RANDOM, "augment": {**document, field: wrong}})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("augment", "match"),
    [
        ({"scale": [0.1, 1.0]}, "scale and ratio go together"),
        ({"ratio": [0.75, 1.25]}, "scale and ratio go together"),
        ({"scale": [0.1, 1.0], "ratio": [1.0, 1.0], "padding": 4}, "give one of them"),
        ({"flip": 0.0}, "nothing in it is random"),
        ({"flip": 0.5, "rotate": 5}, "unknown field 'rotate'"),
        ({"padding": 5000}, "padding: expected an integer from 0 to 4096"),
        ({"hue": 0.6}, "hue: expected a number from 0 to 0.5"),
        ({"padding": 1.0}, "padding: expected an integer"),
    ],
)
def test_what_does_not_go_together(augment: dict[str, Any], match: str) -> None:
    with pytest.raises(BadRequestError, match=match):
        parse({**RANDOM, "augment": augment})
