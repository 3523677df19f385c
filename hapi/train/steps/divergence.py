"""Detection of diverged training before it is saved: a loss, weight or optimiser value that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hapi.errors import DivergedError
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.train.objective.growth import LossGrowth

ADVICE = "lower --lr, or look for samples and weights that are not finite"


class Finite:
    """Checks the losses of a training and, when asked, its whole state.

    A loss is checked only after its step was waited for anyway (at the next batch, a checkpoint, the epoch's
    end), so that no step waits for the device because of it.
    """

    def __init__(
        self,
        trained: nn.Module,
        optimizer: torch.optim.Optimizer,
        growth: LossGrowth | None = None,
    ) -> None:
        self._trained, self._optimizer = trained, optimizer
        self._growth = growth
        """Looks at each loss that is finite."""
        self._noted: tuple[int, int, torch.Tensor] | None = None
        """Epoch, batch and loss of a step that was not looked at yet."""
        self._sound = False
        """True once the state was checked after the last step."""
        self._exempt = {name for name, value in _floats(trained.state_dict()) if not _all_finite([value])}
        """Buffers such as masks, which hold infinities from the beginning."""

    def note(self, epoch: int, batch: int, loss: torch.Tensor) -> None:
        """Remember the ``loss`` (a scalar, on any device) of a step."""
        self._noted = epoch, batch, loss.detach()
        self._sound = False

    def check_loss(self) -> None:
        """Raise :class:`DivergedError` when the loss that was noted last is not finite."""
        if self._noted is None:
            return
        (epoch, batch, loss), self._noted = self._noted, None
        if not math.isfinite(value := loss.item()):
            raise DivergedError(self._said(f"the loss is {value}", epoch, batch), epoch=epoch, batch=batch)
        if self._growth is not None:
            self._growth.check(value, epoch, batch)

    def check_state(self, epoch: int, batch: int) -> None:
        """Raise :class:`DivergedError` when the state before step ``batch`` of ``epoch`` is not finite."""
        self.check_loss()
        if self._sound:
            return
        name = self._not_finite()
        self._sound = name is None
        if name is not None:
            raise DivergedError(self._said(f"{name} is not finite", epoch, batch), epoch=epoch, batch=batch)

    def _not_finite(self) -> str | None:
        """Name of a value that is not finite; None where all are."""
        named = [(n, v) for n, v in self._state() if n not in self._exempt]
        if not _all_finite([value for _, value in named]):
            return next(name for name, value in named if not _all_finite([value]))
        if not isinstance(self._optimizer, OffloadedOptimizer):
            return None
        found = self._optimizer.find_not_finite()
        return None if found is None else f"the optimiser's {found[1]} of parameter {found[0]}"

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _floats(self._trained.state_dict())
        if isinstance(self._optimizer, OffloadedOptimizer):
            return
        for number, values in self._optimizer.state_dict()["state"].items():
            for name, value in _floats(values):
                yield f"the optimiser's {name} of parameter {number}", value

    def _said(self, what: str, epoch: int, batch: int) -> str:
        rate = max(group["lr"] for group in self._optimizer.param_groups)
        return (
            f"training has diverged: {what} at epoch {epoch}, batch {batch}, learning rate {rate:g}; {ADVICE}"
        )


def _floats(values: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield str(name), value


def _all_finite(values: list[torch.Tensor]) -> bool:
    """Check all tensors, with one wait for the device where they are sound.

    A sum is finite unless a value is not, or they are huge; it takes one pass over the memory and no further memory.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        dtype = torch.float32 if value.itemsize < torch.float32.itemsize else None
        by_device.setdefault(value.device, []).append(value.sum(dtype=dtype).double())
    if all(bool(torch.stack(sums).isfinite().all()) for sums in by_device.values()):
        return True
    return all(bool(value.isfinite().all()) for value in values)
