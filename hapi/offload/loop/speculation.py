"""Updates that were computed before the step: kept for it, put aside while the values before are used, or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hapi.errors import UsageError
from hapi.offload.engine import Engine
from hapi.offload.loop.admission import check_gradient
from hapi.offload.loop.expectation import Expectation
from hapi.offload.loop.read_watch import ReadWatch
from hapi.offload.parameters import TrainedParameter
from hapi.offload.records import Records


class Speculation:
    """Follows the pieces that were handed to the engine ahead of a step.

    New values are in memory, and new records in the slots that are not valid. A forward pass in between gets the
    values before; the step then takes the new ones from these slots, and needs no gradient for that. Anything else
    that changes what the step computes drops all, and it is computed from the gradients that were kept.
    """

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        engine: Engine,
        records: Records,
        expected: Expectation,
        before_use: Callable[[], None],
    ) -> None:
        """Follow nothing yet.

        Args:
            parameters: by number.
            engine: computes.
            records: of the states.
            expected: is switched off where an expectation was not met.
            before_use: calls :meth:`put_aside`, before somebody reads or changes values of a step that is not taken.
        """
        self._reads = ReadWatch(before_use)
        self._parameters, self._engine, self._records = parameters, engine, records
        self._expected = expected
        self.pieces: dict[int, list[tuple[int, int]]] = {}
        """Pieces, each with its parameters' and gradients' numbers."""
        self.redone: set[int] = set()
        """Pieces whose values in memory are not those before the step."""
        self.is_dropped = False
        """Whether what this step computed ahead was dropped."""
        self._is_aside = False
        self.redone_steps = self.restored_steps = self.all_pieces = 0
        """Steps that were computed again, steps whose values were given back, and pieces ever computed ahead."""

    def begin(self) -> None:
        """Begin a step with nothing."""
        self._reads.end()
        self.pieces.clear()
        self.redone.clear()
        self.is_dropped = self._is_aside = False

    def add(self, number: int, used: Iterable[TrainedParameter], *, is_lent: bool) -> None:
        """Note a piece that is handed over with the gradients of ``used``, which are not kept if they are lent."""
        active = [one for one in used if one.has_gradient]
        self.pieces[number] = [(one.number, one.generation) for one in active]
        self.all_pieces += 1
        for one in active:
            one.is_submitted = True
            self._reads.begin(one.parameter)
            one.is_lent = is_lent and not one.keeps_in_memory

    def stop(self) -> None:
        """Compute nothing further ahead in this step."""
        self._expected.is_on = False

    def forbid(self) -> None:
        """Compute nothing ahead any more."""
        self._expected.forbid()

    def put_aside(self) -> None:
        """Give the parameters in memory their values before the step; the new ones stay in their slots."""
        if not self.pieces or self._is_aside:
            return
        self._give_back()
        self._engine.forget_loaded()
        self._is_aside, self._expected.is_on = True, False
        for known in self._parameters:
            known.is_submitted = False

    def undo(self) -> None:
        """Give the values before back, and drop the new ones."""
        if not self.pieces:
            return
        if not self._is_aside:
            self._give_back()
        self._drop()

    def resolve(self, *, is_alike: bool, used: Callable[[int], Sequence[TrainedParameter]]) -> None:
        """Keep what the step asks for: new values in memory, or nothing. The engine has no work.

        Args:
            is_alike: whether the options are those that it was computed with.
            used: a piece's parameters.
        """
        self._reads.end()
        if not self.pieces:
            return
        is_met = is_alike and self._expected.is_met(self.pieces, used)
        if self._is_aside:
            if is_met and not any(known.is_foreign for number in self.pieces for known in used(number)):
                self._records.restore(self.pieces, lambda known: known.has_gradient, are_new=True)
            else:
                self._drop()
        elif not is_met:
            self.redone_steps += 1
            self.redone = set(self.pieces)
            self._drop()

    def gather(self) -> list[TrainedParameter]:
        """Return the parameters with a gradient, as the loop left them."""
        active = []
        for known in self._parameters:
            gradient = known.own_gradient()
            if known.has_moved or known.find_change():
                self._expected.forbid()
            if known.has_gradient and gradient is not known.offloaded:
                if known.is_submitted:
                    self.undo()
                known.drop()
            if gradient is None:
                continue
            known.check_kept()
            if not known.has_gradient:
                check_gradient(known.name, known.parameter, gradient)
                known.take(gradient)
                known.is_loops_own = True
            active.append(known)
        return active

    def _give_back(self) -> None:
        self._reads.end()
        self.restored_steps += 1
        self._engine.drain()
        check_untouched(self._parameters)
        self._records.restore(self.pieces, lambda known: known.writes > 0)
        for known in self._parameters:
            if known.writes:
                known.settle()

    def _drop(self) -> None:
        """Forget what was computed; the records before are intact."""
        self.is_dropped, self._is_aside = True, False
        self._engine.forget_loaded()
        self.pieces.clear()
        self._expected.is_on = False
        for known in self._parameters:
            known.is_submitted = False
            known.pieces_left = len(known.pieces)


def check_untouched(parameters: Iterable[TrainedParameter]) -> None:
    """Look, while the engine has no work, for parameters that somebody else changed since their last step.

    Raises:
        UsageError: one was changed after backward had given it new values, or has another type or device.
    """
    for known in parameters:
        known.check_form()
        known.takes_memory = known.is_foreign
        if known.writes and known.is_foreign:
            raise UsageError(
                f"{known.name} was changed in place between backward and step; change parameters after step()"
            )
