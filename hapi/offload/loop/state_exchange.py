"""States on their way between a loop and their place: taken over at the beginning, given, loaded, and changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hapi.offload.engine import Engine
from hapi.offload.loop.handed_states import HandedStates, StateTable
from hapi.offload.loop.speculation import Speculation
from hapi.offload.loop.verdict import resumed
from hapi.offload.parameters import TrainedParameter
from hapi.offload.records import Records
from hapi.offload.small_state import SmallState
from hapi.offload.states.base import StateStore
from hapi.offload.states.group_options import Groups

log = logging.getLogger("hapi.offload")


class StateExchange:
    """Reads states for a loop, and writes those that it gives. The caller has the training's lock."""

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        engine: Engine,
        records: Records,
        small: SmallState,
        ahead: Speculation,
        *,
        holds: bool,
    ) -> None:
        """Begin without states.

        Args:
            parameters: by number.
            engine: moves records.
            records: of the states.
            small: what a commit has beside them.
            ahead: is put aside before states are read, and undone before they are set.
            holds: whether a step is committed when the next one begins, with what the loop changed in between;
                otherwise at once.
        """
        self._parameters, self._engine, self._records = parameters, engine, records
        self._small, self._ahead = small, ahead
        self._holds, self._extra = holds, b""
        self.is_open = False
        """Whether the last step is not committed yet: what the loop changes now belongs to it."""
        self.handed = HandedStates()
        self._is_packing = False
        self.steps = 0
        """Steps done, those before a kill included."""

    def given(self) -> StateTable:
        """Return the states by parameter; those of the running step are read once."""
        table = self.handed.table
        if table is None:
            self._stand_still()
            states = self._records.states()
            table = self.handed.give({self._parameters[at].parameter: one for at, one in states.items()})
        if not self._is_packing:
            self.handed.watch_values()
        return table

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Give states to a ``state_dict()`` in the block, of which changes through ``.data`` are not noticed."""
        self._is_packing = True
        try:
            yield
        finally:
            self._is_packing = False

    def find_not_finite(self) -> tuple[int, str] | None:
        """Return a parameter's number and the name of its state that is not finite; None where all are."""
        self._stand_still()
        return self._records.find_not_finite()

    def take_back(self, groups: Groups) -> None:
        """Write what a loop changed in the states that it was given, before they are used."""
        if self.handed.is_changed() and self.handed.table is not None:
            self._ahead.undo()
            self._write(self.handed.table, groups)
            self.handed.drop()
        self.handed.check_before()

    def load(self, states: Mapping[Any, Mapping[str, Any]], groups: Groups) -> None:
        """Take over other states, and the number of their steps."""
        self._write(states, groups, counts_steps=bool(self._parameters) and self._parameters[0].counts_steps)

    def take_over(
        self, optimizer: torch.optim.Optimizer, store: StateStore, where: str, groups: Groups
    ) -> None:
        """Go on from what a killed process committed, or from the states that the user's optimiser has.

        Args:
            optimizer: the user's; its states are dropped.
            store: may hold a commit.
            where: its name for people.
            groups: of the optimiser that goes on; they get the options of the commit.
        """
        committed = store.committed
        if committed is not None:
            self.steps = committed.steps
            for known, steps in zip(self._parameters, committed.parameter_steps, strict=True):
                known.steps = steps
            self._records.take_over()
            is_scheduled = self._small.restore(committed.extra, groups)
            log.warning("%s", resumed(where, self.steps, is_scheduled=is_scheduled))
        elif any(optimizer.state.values()):
            self.load(optimizer.state, groups)
        optimizer.state.clear()

    def finish(self, pieces: Sequence[int], groups: Groups) -> None:
        """End a step with the pieces' new records; :meth:`seal` commits it."""
        self._engine.finish(pieces)
        self._extra, self.is_open = self._small.capture(groups), True
        if not self._holds:
            self.seal()

    def seal(self, *, takes_buffers: bool = False, in_error: bool = False) -> bool:
        """Commit the last step with the values that the loop has given parameters since.

        Args:
            takes_buffers: take the buffers of now, and not those after the step: no pass has begun since.
            in_error: leave the step out if anything was changed: the loop may have stopped in the middle of that.

        Returns:
            Whether parameters were changed; nothing is read ahead any more then.
        """
        changed = []
        for known in self._parameters if self.is_open and self._holds else ():
            if known.find_change():
                self._ahead.forbid()
            if known.is_foreign:
                changed.append(known)
        if not self.is_open or (in_error and changed):
            return False
        self.is_open = False
        if changed:
            self._engine.forget_loaded()
            self._records.amend(changed)
        if takes_buffers:
            self._extra = self._small.renewed(self._extra)
        self._engine.commit(self.steps, [known.steps for known in self._parameters], self._extra)
        return bool(changed)

    def _stand_still(self) -> None:
        """Let what is committed be what counts."""
        self._ahead.put_aside()
        self._engine.settle()

    def _write(
        self, states: Mapping[Any, Mapping[str, Any]], groups: Groups, *, counts_steps: bool = False
    ) -> None:
        self.seal()
        self._engine.settle()
        self._engine.forget_loaded()
        own = self._records.write(states)
        if counts_steps:
            self.steps = max(known.steps for known in self._parameters)
        self.finish(own, groups)
        self.seal()
        self._ahead.stop()
