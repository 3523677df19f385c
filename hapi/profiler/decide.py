"""Where to split: static strategies as pure functions behind one name (HAPI, section 5.1, competitors)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hapi.errors import UsageError

Strategy = Callable[[Sequence[int], int], int]
"""(bytes of one sample after layer 0..L, freeze index) to split index."""


def no_split(output_bytes: Sequence[int], freeze: int) -> int:
    """NoSplit: nothing is pushed down, the stored samples are sent."""
    return 0


def at_freeze(output_bytes: Sequence[int], freeze: int) -> int:
    """@Freeze: everything frozen is pushed down."""
    return freeze


def at_minimum(output_bytes: Sequence[int], freeze: int) -> int:
    """@Min: the layer with the smallest output up to the freeze, the earliest on ties; never 0."""
    if freeze == 0:
        return 0
    return min(range(1, freeze + 1), key=lambda layer: (output_bytes[layer], layer))


STRATEGIES: Mapping[str, Strategy] = {"none": no_split, "freeze": at_freeze, "min": at_minimum}


def choose_split(strategy: str, output_bytes: Sequence[int], freeze: int) -> int:
    """The split that ``strategy`` picks; :class:`UsageError` for an unknown one."""
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown split strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy](output_bytes, freeze)
