"""Errors of an offloaded training, in a loop's own words."""

from __future__ import annotations

from hapi.errors import HapiError
from hapi.offload.states.base import StateStore


class OffloadError(HapiError):
    """The place of the offloaded states failed in the middle of a training."""

    slug, title, on_wire = "offload", "Offloaded states failed", False


class ActivationError(HapiError):
    """The place of the swapped activations failed in the middle of a pass."""

    slug, title, on_wire = "activations", "Swapped activations failed", False


class GradientGoneError(HapiError):
    """A loop asks for a gradient that was consumed and not kept."""

    slug, title, on_wire = "gradient-gone", "Gradient not kept", False


def failure(error: OSError, where: str, store: StateStore, resumes: bool) -> OffloadError:
    """Return what to raise for a disk's ``error``: it says what is left.

    Args:
        error: of a file.
        where: name of the store for people.
        store: the states.
        resumes: whether a next run goes on from them.
    """
    steps = 0 if store.committed is None else store.committed.steps
    reason = f"{error.strerror or error} ({error.filename or 'file'})"
    left = (
        f"step {steps} is committed there, and a next run with this folder goes on from it"
        if resumes
        else f"this was after step {steps}, and what is left there is removed: training goes on from its checkpoint"
    )
    return OffloadError(f"offloading to {where} failed: {reason}; {left}")
