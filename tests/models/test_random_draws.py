"""Draws from the generators that all code of a process shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.random.mtrand as generators
import pytest

from hapi.models.random_draws import python_generators


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64], ids=["usual generator", "another one"])
def bits(request: pytest.FixtureRequest) -> Iterator[None]:
    before = generators.get_bit_generator()
    generators.set_bit_generator(request.param(3))
    yield
    generators.set_bit_generator(before)


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize(
    "draw", [np.random.rand, np.random.randn, lambda: np.random.randint(3), random.random]
)
def test_a_draw_shows(draw: Callable[[], object]) -> None:
    before = python_generators()
    assert before == python_generators()
    draw()
    after = python_generators()
    assert after != before
    draw()
    assert python_generators() != after
