"""Processes that train one model together, as a session and a trainer see them; one alone by default."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from hapi.arrays import IntArray

Shared = TypeVar("Shared")


def part_of(batch: IntArray, rank: int, ranks: int) -> IntArray:
    """Return the part of one batch that a rank takes.

    The parts follow each other in the batch and differ by at most one sample. Where a batch has fewer samples than
    there are ranks, a rank without one gets the batch's first, which must not count (:func:`part_size`).

    Args:
        batch: ids of all ranks, int64 [n].
        rank: number of this rank, from 0.
        ranks: number of all ranks.
    """
    begin, size = len(batch) * rank // ranks, part_size(len(batch), rank, ranks)
    return batch[begin : begin + size] if size else batch[:1]


def part_size(count: int, rank: int, ranks: int) -> int:
    """Return how many of a batch's ``count`` samples count at ``rank``: 0 where there are too few for all."""
    return count * (rank + 1) // ranks - count * rank // ranks


class Ranks:
    """A process that trains alone: the first of one rank, for which every exchange is its own value.

    :class:`hapi.train.distributed.group.ProcessGroup` is the one of several. All ranks call the same methods in the
    same order, from the thread that trains.
    """

    rank = 0
    """Number of this process, from 0."""
    size = 1
    """Number of processes."""
    device: torch.device | None = None
    """The GPU of this process among several on a machine; None for the one that the settings name."""
    local_size = 1
    """Number of processes on this machine."""

    is_first_start = True
    """False where a launcher has started the processes anew, after one failed or their number changed."""
    stops = False
    """True once all ranks stop before the same step."""

    @property
    def is_first(self) -> bool:
        """True for the process that plans, prints and writes files."""
        return self.rank == 0

    def part(self, batch: IntArray) -> IntArray:
        """Return this rank's part of a batch, by :func:`part_of`."""
        return part_of(batch, self.rank, self.size)

    def largest_part(self, count: int) -> int:
        """Return the most samples that a rank has of a batch of ``count``."""
        return -(-count // self.size)

    def shared(self, make: Callable[[], Shared]) -> Shared:
        """Return what ``make`` returns to the first process of this machine, which alone calls it.

        Raises:
            OtherRankError: it failed there, or another process ended.
        """
        return make()

    def wrapped(self, module: nn.Module, *, unused: bool = False) -> nn.Module:
        """Return ``module`` so that backward averages its gradients over all ranks; the first one's values count.

        Args:
            module: the layers that are trained.
            unused: whether a step may leave a parameter without a gradient, for which steps take a little longer.
        """
        return module

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of ``values`` over all ranks, in place; without waiting for a GPU."""
        return values

    def rows(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return the ``count`` rows of a batch whose parts the ranks have, in order."""
        return part

    def gathered(self, value: Shared) -> list[Shared]:
        """Return the ranks' values, in order."""
        return [value]

    def equalise(self, module: nn.Module) -> None:
        """Give the buffers of ``module`` the first rank's values."""

    def explained(self) -> AbstractContextManager[None]:
        """Return a block in which an error about another rank is an :class:`OtherRankError` that names it."""
        return nullcontext()

    def want_stop(self) -> None:
        """Ask all ranks to stop before the same step."""
        raise KeyboardInterrupt

    def settle(self, *, now: bool = False) -> None:
        """Do together what a rank asked for; called by all ranks between the same two steps.

        Args:
            now: ask the others first, where no step's sums have carried it.

        Raises:
            KeyboardInterrupt: a rank was interrupted.
        """

    def publish(self, plan: Any) -> None:
        """Name the plan that all ranks are to follow; only the first one's counts."""

    def published(self) -> tuple[int, Any]:
        """Return the number of the plan that the first rank named last, and that plan; 0 and None before one."""
        return 0, None


ALONE = Ranks()
"""A process that trains by itself."""
