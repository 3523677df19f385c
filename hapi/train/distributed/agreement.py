"""Facts in which the ranks of a training must agree: each finds them out for itself, and no step would notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hapi.errors import UsageError
from hapi.text import printable

if TYPE_CHECKING:
    from hapi.client.joint.ranks import Ranks
    from hapi.train.checkpoints.checkpoint import Found

OTHER_JOB = "let all ranks use the same servers, or copies of one store, and the same files"
"""Remedy where ranks would train on other samples or layers."""
_SHOWN = 100
"""Most characters of a fact in a message."""


def check_same(ranks: Ranks, facts: Mapping[str, Any], remedy: str) -> None:
    """Compare the ranks' facts; all ranks call it, and raise the same.

    Args:
        ranks: those that train.
        facts: of this rank, by names that a person knows.
        remedy: what to do where they differ.

    Raises:
        UsageError: a rank has another fact than the first one.
    """
    first, *others = ranks.gathered(dict(facts))
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                own, wanted = (printable(one, _SHOWN) for one in (other.get(name), value))
                raise UsageError(f"rank {rank} has {name} {own} and the first one {wanted}: {remedy}")


def check_same_checkpoint(ranks: Ranks, path: str, found: Found | None) -> None:
    """Compare what each rank has found at ``path`` to go on with; None for nothing.

    Raises:
        UsageError: they would not go on at the same step of one training.
    """
    place = "nothing"
    if found is not None:
        losses = ", ".join(f"{entry['loss']:.6g}" for entry in found.epochs)
        place = f"epoch {found.progress.epoch}, batch {found.progress.batch} after losses of {losses or 'no epoch'}"
    check_same(
        ranks, {"a checkpoint of": place}, f"{path} has to be one file that all ranks see, on a shared disk"
    )
