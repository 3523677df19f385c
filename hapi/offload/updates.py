"""The optimiser's own arithmetic on one piece: the user's class and options, on tensors that lie in the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hapi.arrays import Bytes
from hapi.errors import UsageError
from hapi.offload.engine import Loaded
from hapi.offload.loop.gradients import GradientChange
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Segment, StatePiece

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimisers whose step on a part of a tensor is that part of the step on the whole."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimiser that cannot be offloaded exactly."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UsageError(f"{type(optimizer).__name__} cannot be offloaded: take one of torch's {names}")
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError("an optimiser with differentiable=True cannot be offloaded")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options, detached from it."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups' options are equal, tensors by their values."""
    return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def state_names(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tensors that an optimiser keeps for each parameter, found by a step on one number."""
    probe = nn.Parameter(torch.zeros(1))
    probe.grad = torch.zeros(1)
    state = _stepped(kind, [(probe, options, {})])[0]
    return tuple(name for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim())


class PieceUpdate:
    """Computes the new record of a piece from the old one and the gradients."""

    def __init__(self, kind: type[torch.optim.Optimizer], parameters: Sequence[TrainedParameter]) -> None:
        """``kind`` is the user's optimiser, ``parameters`` all trained ones by number."""
        self._kind, self._parameters = kind, parameters
        self.options: Sequence[Mapping[str, Any]] = ()
        """Options of the parameter groups for the running step."""
        self.expected: Sequence[GradientChange] | None = None
        """Changes that gradients are expected to get before the step; None once the step knows them."""

    @torch.no_grad()
    def __call__(self, piece: StatePiece, loaded: Loaded) -> None:
        """Update a piece in its buffer, and the parameters in memory.

        Segments whose parameter has no gradient keep their values.
        """
        work, parts = [], []
        for segment in piece.segments:
            known = self._parameters[segment.parameter]
            master = master_of(segment, loaded.buffer)
            if not loaded.has_master or known.takes_memory:
                master.copy_(known.flat[segment.start : segment.stop])
            if not known.has_gradient:
                continue
            values = nn.Parameter(master, requires_grad=True)
            changes = known.changes if self.expected is None else self.expected
            values.grad = known.part(segment.start, segment.stop, changes).float()
            state = self._state(known, segment, loaded) if known.steps else {}
            work.append((values, self.options[known.group], state))
            parts.append((known, segment, master))
        if not work:
            return
        for (known, segment, master), state in zip(parts, _stepped(self._kind, work), strict=True):
            for name, kept in zip(known.state_names, states_of(segment, loaded.buffer), strict=True):
                if state[name].data_ptr() != kept.data_ptr():
                    kept.copy_(state[name])
            known.writes += 1
            known.flat[segment.start : segment.stop].copy_(master)

    def _state(self, known: TrainedParameter, segment: Segment, loaded: Loaded) -> dict[str, torch.Tensor]:
        state = dict(zip(known.state_names, states_of(segment, loaded.buffer), strict=True))
        if known.counts_steps:
            state["step"] = torch.tensor(float(known.steps))
        return state


def _stepped(
    kind: type[torch.optim.Optimizer],
    work: Sequence[tuple[nn.Parameter, Mapping[str, Any], dict[str, torch.Tensor]]],
) -> list[dict[str, Any]]:
    """Take a step with these parameters, options and states; return the states after it."""
    groups = [{**options, "params": [values]} for values, options, _ in work]
    optimizer: torch.optim.Optimizer = kind(groups)  # type: ignore[call-arg]
    for values, _, state in work:
        if state:
            optimizer.state[values] = state
    optimizer.step()
    return [optimizer.state[values] for values, _, _ in work]


def master_of(segment: Segment, record: Bytes) -> torch.Tensor:
    """Return a segment's master weights, fp32 [elements], which lie in the record."""
    return torch.from_numpy(record[segment.master_at : segment.master_at + 4 * segment.elements]).view(
        torch.float32
    )


def states_of(segment: Segment, record: Bytes) -> list[torch.Tensor]:
    """Return a segment's optimiser states, each fp32 [elements], which lie in the record."""
    return [
        torch.from_numpy(record[at : at + 4 * segment.elements]).view(torch.float32)
        for at in segment.states_at
    ]
