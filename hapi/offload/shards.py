"""States of a training by several processes, each of which keeps a share of them (ZeRO's first stage, on disks).

The gradients are those that ``DistributedDataParallel`` has reduced; each process updates its own pieces, and the
others get their new values from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hapi.arrays import Bytes
from hapi.errors import UsageError
from hapi.offload.failures import OffloadError
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout, StatePiece
from hapi.offload.states.base import StateStore


def shares_of(model: nn.Module) -> tuple[int, int]:
    """Return this process's rank and the number of those that train ``model`` together."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    return 0, 1


def agree_on_step(model: nn.Module, store: StateStore) -> None:
    """Let all processes go on from the step that each of them has committed: one may be a step ahead of another.

    Raises:
        UsageError: a process does not hold that step.
    """
    if shares_of(model)[1] == 1:
        return
    committed = store.committed
    own = 0 if committed is None else committed.steps
    steps, highest = smallest(model, own), -smallest(model, -own)
    if not steps and highest > 1:  # ranks are never more than one step apart
        raise UsageError(
            f"a rank's offload folder holds step {highest}, and another rank's none: the run before ended, or that "
            "folder was removed; remove them all to begin anew"
        )
    if not store.go_back(steps):
        raise UsageError(
            f"a rank's offload folder does not hold step {steps}, as another one does; remove them all"
        )


def smallest(model: nn.Module, value: int) -> int:
    """Return the smallest of the processes' values."""
    found = torch.tensor(value, device=next(model.parameters()).device)
    if isinstance(model, DistributedDataParallel):
        dist.all_reduce(found, dist.ReduceOp.MIN, group=model.process_group)
    return int(found)


class Shards:
    """The processes of one training. Every method is called by all of them, in the same order."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[TrainedParameter], layout: Layout, store: StateStore
    ) -> None:
        """``parameters`` by number; ``layout`` says who keeps what; ``store`` has what is committed."""
        self._store = store
        self._model, self._parameters, self._pieces = model, parameters, layout.pieces
        self._group = model.process_group if isinstance(model, DistributedDataParallel) else None
        self.rank, self.ranks = shares_of(model)
        self._device = next(model.parameters()).device

    def own(self, numbers: Iterable[int]) -> list[int]:
        """Return the pieces among ``numbers`` that this process keeps."""
        return [number for number in numbers if self._pieces[number].rank == self.rank]

    def meet(self) -> None:
        """Wait for the other processes."""
        with self._together():
            smallest(self._model, 0)

    @torch.no_grad()
    def share_values(self, numbers: Iterable[int]) -> None:
        """Give all processes the values in memory that the owners of these pieces have."""
        for number in numbers if self.ranks > 1 else ():
            piece = self._pieces[number]
            for segment in piece.segments:
                values = self._parameters[segment.parameter].flat[segment.start : segment.stop]
                self._broadcast(piece, values)

    def record(self, number: int, read: Callable[[int], Bytes]) -> Bytes:
        """Return a piece's record, which its owner reads."""
        piece = self._pieces[number]
        if self.ranks == 1:
            return read(number)
        own = piece.rank == self.rank
        record = (
            torch.from_numpy(read(number))
            if own
            else torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
        )
        moved = record.to(self._device)
        self._broadcast(piece, moved)
        found: Bytes = moved.cpu().numpy()
        return found

    def _broadcast(self, piece: StatePiece, values: torch.Tensor) -> None:
        source = piece.rank if self._group is None else dist.get_global_rank(self._group, piece.rank)
        with self._together():
            dist.broadcast(values, source, group=self._group)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Exchange something with the other processes in the block; OffloadError where one of them is gone."""
        try:
            yield
        except RuntimeError as error:
            steps = 0 if self._store.committed is None else self._store.committed.steps
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).strip().partition("\n")[0].partition(". ")[0]
            raise OffloadError(
                f"rank {self.rank} does not reach another rank of this training, which has ended or lost its "
                f"connection ({reason}); rank {self.rank} has committed step {steps}, and a next run of all ranks goes "
                "on from the last step that all of them have"
            ) from error
