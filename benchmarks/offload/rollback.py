"""The other way to take a speculative step back: in place, with the records before in an undo log, or by arithmetic.

An update that was computed within backward has to be taken back when the norm says clip. Hapi writes it to a shadow
slot, which is committed once the norm is known. The alternative writes it in place, once the record before is in a log
that is durable: otherwise a kill would leave records of two steps.
"""

from __future__ import annotations

from typing import Any

import torch

from hapi.arrays import Bytes
from hapi.offload import training
from hapi.offload.pieces import StatePiece
from hapi.offload.states.disk import DiskStates
from hapi.process.direct_io import transfer_buffer

_RATE, _BETAS, _EPSILON, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


class UndoLogStates(DiskStates):
    """States that are written in place; a prototype that counts and times, and does not go on after a kill."""

    def __init__(self, *of: Any, **more: Any) -> None:
        """Open the folders as :class:`DiskStates`; the second slots are the log."""
        super().__init__(*of, **{**more, "resumes": False})
        self.logged_bytes = 0
        """Bytes that were read and written for the log."""
        self._in_place: dict[int, int] = {}
        """Slot that the engine takes each record in place for."""
        self._before: dict[int, Bytes] = {}
        """Blocks of states as they were read, of pieces under way."""

    def read(self, piece: StatePiece, slot: int, buffer: Bytes, start: int, stop: int) -> None:
        """Read from its place, or the record before from the log."""
        is_in_place = self._in_place.get(piece.number) == slot
        super().read(piece, 0 if is_in_place else 1, buffer, start, stop)
        if is_in_place and not start:
            self._before[piece.number] = buffer[: piece.states_bytes].copy()

    def write(self, piece: StatePiece, slot: int, buffer: Bytes, start: int = 0) -> None:
        """Write a record in place, once the one before is in the log."""
        if self._in_place.get(piece.number) == 1 - slot:
            self._log(piece)
        super().write(piece, 0, buffer, start)
        self._in_place[piece.number] = slot

    def _log(self, piece: StatePiece) -> None:
        before = transfer_buffer(piece.nbytes)
        states, end = self._before.pop(piece.number, None), piece.states_bytes
        if states is None:
            end = 0
        else:
            before[:end] = states
        super().read(piece, 0, before, end, piece.nbytes)  # masters are in memory no more
        super().write(piece, 1, before)
        self._drives[piece.drive].sync()
        self.logged_bytes += 2 * piece.nbytes - end


def use_undo_log() -> None:
    """Let states of this process be written in place, from now on."""
    vars(training)["DiskStates"] = UndoLogStates


def given_back(elements: int = 1 << 20) -> dict[str, float]:
    """Return the share of values and states whose bits arithmetic gives back from AdamW's step after ten others."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([parameter], lr=_RATE, betas=_BETAS, eps=_EPSILON, weight_decay=_DECAY)
    before: tuple[torch.Tensor, ...] = ()
    for _ in range(11):
        if optimizer.state[parameter]:
            before = _copied(parameter, optimizer.state[parameter])
        parameter.grad = torch.randn(elements, generator=generator) * 1e-3
        optimizer.step()
    values, average, squares = _copied(parameter, optimizer.state[parameter])
    gradient, (beta1, beta2), count = parameter.grad, _BETAS, 11
    if gradient is None:
        return {}
    denominator = squares.sqrt().div_((1 - beta2**count) ** 0.5).add_(_EPSILON)
    values.addcdiv_(average, denominator, value=_RATE / (1 - beta1**count)).div_(1 - _RATE * _DECAY)
    average.sub_(gradient, alpha=1 - beta1).div_(beta1)
    squares.addcmul_(gradient, gradient, value=beta2 - 1).div_(beta2)
    pairs = zip(("values", "average", "squares"), (values, average, squares), before, strict=True)
    return {name: float((found == kept).float().mean()) for name, found, kept in pairs}


def _copied(parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(one.detach().clone() for one in (parameter, state["exp_avg"], state["exp_avg_sq"]))
