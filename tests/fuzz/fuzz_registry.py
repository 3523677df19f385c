"""The targets by name, and how one is run; :mod:`fuzz_targets` registers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hapi.errors import HapiError

Run = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """One reader."""

    name: str
    run: Run
    """Raises a :class:`HapiError`, or nothing; everything else is a defect."""
    seeds: Callable[[], list[bytes]]
    """Good inputs, from which others are made."""


TARGETS: dict[str, Target] = {}


def target(seeds: Callable[[], list[bytes]]) -> Callable[[Run], Run]:
    """Register a function as the target of its name."""

    def register(run: Run) -> Run:
        TARGETS[run.__name__] = Target(run.__name__, run, seeds)
        return run

    return register


def attempt(name: str, data: bytes) -> HapiError | None:
    """Run a target; the error that it was refused with."""
    run = broken_on_purpose if name == broken_on_purpose.__name__ else TARGETS[name].run
    try:
        run(data)
    except HapiError as error:
        assert str(error).isprintable(), error
        return error
    return None


def broken_on_purpose(data: bytes) -> None:
    """No target, but a check of the search itself: it has to find the one byte that breaks this."""
    if b"q" in data:
        raise ZeroDivisionError("a byte that is not borne")


def seeds_of(name: str) -> list[bytes]:
    """Good inputs of a target; the process ends when there is none of this name."""
    if name == broken_on_purpose.__name__:
        return [b"abc"]
    if name not in TARGETS:
        raise SystemExit(f"fuzz: error: there is no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name].seeds()
