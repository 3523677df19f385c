"""A request for a giant model is refused before its weights are made."""

from __future__ import annotations

import pytest
from support.front_tools import loaded_front

from hapi.errors import TooLargeError
from hapi.store.open import open_store
from hapi.wire.references import ModelReference


def test_a_zoo_model_beyond_the_limit_is_refused() -> None:
    reference = ModelReference(
        source="zoo", name="vgg11", weights="random:0", digest="0" * 32, input_shape=(3, 32, 32)
    )
    with pytest.raises(TooLargeError, match="push it into"):
        loaded_front(reference, 3, open_store("memory://limits"), (), max_bytes=100 << 20)
