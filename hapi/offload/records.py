"""Whole states of parameters, out of and into the pieces' records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hapi.arrays import Bytes
from hapi.offload.engine import Engine
from hapi.offload.loop.kept_gradients import GradientSpan
from hapi.offload.loop.values import flat_view
from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout, Segment
from hapi.offload.shards import Shards
from hapi.offload.states.base import StateStore, buffer_of
from hapi.offload.updates import check_before, master_of, states_of

MASTER = "master"
"""State of a half-precision parameter in :meth:`OffloadedOptimizer.state_dict`: its fp32 values."""


class Records:
    """Reads and writes the records of a training while its engine has no work."""

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        layout: Layout,
        engine: Engine,
        store: StateStore,
        shards: Shards,
    ) -> None:
        """``parameters`` by number; ``engine`` knows the valid slots."""
        self._shards = shards
        self._parameters, self._layout, self._engine, self._store = parameters, layout, engine, store

    @torch.no_grad()
    def restore(
        self,
        numbers: Iterable[int],
        wanted: Callable[[TrainedParameter], bool] = lambda known: True,
        *,
        are_new: bool = False,
    ) -> None:
        """Give the ``wanted`` parameters in memory the master weights of these pieces.

        Args:
            numbers: of the pieces.
            wanted: says whether a parameter gets them.
            are_new: take those that were computed for the running step, and are not valid yet.
        """
        for number in numbers:
            record = self._engine.read_record(number, is_new=are_new)
            for segment in self._layout.pieces[number].segments:
                known = self._parameters[segment.parameter]
                if wanted(known):
                    master = master_of(segment, record)
                    if not are_new:
                        check_before(known, segment, master)
                    known.flat[segment.start : segment.stop].copy_(master)

    def gradient_spans(self, numbers: Iterable[int]) -> Iterator[GradientSpan]:
        """Yield where kept gradients of these pieces lie."""
        for number in numbers:
            for segment in self._layout.pieces[number].segments:
                yield from self._parameters[segment.parameter].spans(segment.start, segment.stop)

    def take_over(self) -> None:
        """Give the parameters in memory the values that a killed process committed."""
        for piece in self._layout.pieces:
            has_steps = any(self._parameters[segment.parameter].steps for segment in piece.segments)
            if has_steps or self._shards.ranks > 1:  # others do not know of a record without steps
                self._engine.has_record[piece.number] = has_steps
        recorded = [number for number, has in enumerate(self._engine.has_record) if has]
        self.restore(self._shards.own(recorded))
        self._shards.share_values(recorded)
        for known in self._parameters:
            known.settle()

    @torch.no_grad()
    def amend(self, changed: Collection[TrainedParameter]) -> None:
        """Write values that a loop gave parameters since the last step into the records of that step."""
        numbers = sorted({number for known in changed for number in known.pieces})
        wanted = {known.number for known in changed}
        for number in self._shards.own(numbers):
            has_record = self._engine.has_record[number]
            segments = [
                one
                for one in self._layout.pieces[number].segments
                if one.parameter in wanted or not has_record
            ]

            def change(record: Bytes, segments: Sequence[Segment] = segments) -> None:
                for segment in segments:
                    values = self._parameters[segment.parameter].flat[segment.start : segment.stop]
                    master_of(segment, record).copy_(values)

            self._engine.amend(number, change)
        for known in changed:
            known.settle(is_step=False)

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the states by the parameters' numbers, as torch's optimisers keep them."""
        found: dict[int, dict[str, Any]] = {}
        columns: dict[int, list[torch.Tensor]] = {}
        for known in self._parameters:
            if not known.steps:
                continue
            names = [*known.state_names] + ([] if known.is_master else [MASTER])
            tensors = {name: self._scratch(known) for name in names}
            columns[known.number] = [flat_view(tensor) for tensor in tensors.values()]
            if known.counts_steps:
                steps = torch.tensor(float(known.steps), dtype=torch.float32, device="cpu")
                tensors = {"step": steps, **tensors}
            found[known.number] = tensors
        for piece in self._layout.pieces:
            wanted = [segment for segment in piece.segments if segment.parameter in columns]
            if not wanted:
                continue
            record = self._shards.record(piece.number, self._engine.read_record)
            for segment in wanted:
                own = [*states_of(segment, record), master_of(segment, record)]
                for column, values in zip(columns[segment.parameter], own, strict=False):
                    column[segment.start : segment.stop].copy_(values)
        return found

    def find_not_finite(self) -> tuple[int, str] | None:
        """Return number and state of a parameter whose states are not finite, with one piece in memory at a time."""
        for piece in self._layout.pieces:
            if not self._engine.has_record[piece.number]:
                continue
            record = self._engine.read_record(piece.number)
            for segment in piece.segments:
                known = self._parameters[segment.parameter]
                named = zip(known.state_names, states_of(segment, record), strict=True)
                for name, values in named if known.steps else ():
                    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
                        return known.number, name
        return None

    @torch.no_grad()
    def write(self, states: Mapping[Any, Mapping[str, Any]]) -> list[int]:
        """Write records of these states, by parameter, and of the values in memory.

        Returns:
            This process's pieces, to be committed.
        """
        for known in self._parameters:
            state = states.get(known.parameter, {})
            known.steps = _steps_of(known, state)
            known.settle()
        own = self._shards.own(range(len(self._layout.pieces)))
        for number in own:
            piece = self._layout.pieces[number]
            record = buffer_of(piece.nbytes)
            for segment in piece.segments:
                known = self._parameters[segment.parameter]
                self._fill(known, segment, states.get(known.parameter, {}), record)
            self._engine.write_record(piece.number, record)
        return own

    def _fill(
        self, known: TrainedParameter, segment: Segment, state: Mapping[str, Any], record: Bytes
    ) -> None:
        span = slice(segment.start, segment.stop)
        master = master_of(segment, record)
        master.copy_(known.flat[span])
        kept = state.get(MASTER)
        if kept is not None:
            values = _laid_out(kept, known)[span]
            if torch.equal(values.to(known.parameter.dtype), known.flat[span].cpu()):
                master.copy_(values)
        if not known.steps:
            return
        for name, values in zip(known.state_names, states_of(segment, record), strict=True):
            values.copy_(_laid_out(state[name], known)[span])

    def _scratch(self, known: TrainedParameter) -> torch.Tensor:
        """An fp32 tensor of the parameter's form, on the disk where there is one."""
        parameter = known.parameter
        memory = self._store.scratch(4 * parameter.numel())
        flat = torch.from_numpy(memory.view(np.float32))
        return flat.as_strided(parameter.shape, parameter.stride())


def _steps_of(known: TrainedParameter, state: Mapping[str, Any]) -> int:
    """Steps of a parameter with this state; an optimiser that does not count them has 0 or 1."""
    if not state or any(not isinstance(state.get(name), torch.Tensor) for name in known.state_names):
        return 0
    return int(state.get("step", 0)) if known.counts_steps else 1


def _laid_out(values: torch.Tensor, known: TrainedParameter) -> torch.Tensor:
    """A state in the order of the parameter's memory, one dimension."""
    parameter = known.parameter
    if values.shape != parameter.shape:
        raise ValueError(f"a state of {known.name} has the shape {tuple(values.shape)}")
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=torch.float32, device="cpu").copy_(values)
    return flat_view(values)
