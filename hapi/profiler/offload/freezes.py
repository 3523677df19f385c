"""Freezes after a job's own, which leave fewer layers to be trained. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hapi.profiler.profile import Profile

_FP32 = 4


class LaterFreeze(NamedTuple):
    """A freeze that could be taken instead."""

    freeze: int
    parameters: int
    """Number of those that are still trained."""
    work: float
    """Share of the trained layers' operations that is left."""


def later_freezes(profile: Profile) -> Iterator[LaterFreeze]:
    """Yield the freezes after the profile's, the earliest first, as long as anything is trained."""
    operations = sum(layer.flops for layer in profile.layers[profile.last_split :])
    for freeze in range(profile.last_split + 1, len(profile.layers)):
        trained = profile.layers[freeze:]
        parameters = sum(layer.parameter_bytes for layer in trained) // _FP32
        if not parameters or not operations:
            return
        yield LaterFreeze(freeze, parameters, sum(layer.flops for layer in trained) / operations)


def earliest_hidden(
    freezes: Iterable[LaterFreeze], transfer_seconds: Callable[[LaterFreeze], float], step_seconds: float
) -> int | None:
    """Return the earliest freeze whose step takes longer than its transfers; None without one.

    Args:
        freezes: the earliest first.
        transfer_seconds: of a step's states with a freeze.
        step_seconds: of all trained layers, divided over them as their operations are; 0 where unknown.
    """
    hidden = (one.freeze for one in freezes if transfer_seconds(one) <= one.work * step_seconds)
    return next(hidden, None)
