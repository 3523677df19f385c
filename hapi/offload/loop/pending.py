"""Gradients in memory that wait for their update, and pieces that wait for gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hapi.offload.parameters import TrainedParameter
from hapi.offload.pieces import Layout


class PendingGradients:
    """Knows which pieces are complete, and how many bytes of gradients are in memory.

    Gradients that cannot be used before the step do not stay in memory: those of pieces without a record, of parameters
    that somebody changed since the last step, and of passes that an error cut short.
    """

    def __init__(
        self, layout: Layout, parameters: Sequence[TrainedParameter], has_record: Sequence[bool]
    ) -> None:
        """``has_record`` says of each piece whether the store holds something of it; the engine changes it."""
        self._layout, self._parameters, self._has_record = layout, parameters, has_record
        self._awaited: list[set[int]] = [set() for _ in layout.pieces]
        self._active: set[int] = set()
        self._bytes: dict[int, int] = {}
        """Bytes of each gradient that waits; the engine's thread takes them out while others are counted."""

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients that wait."""
        return sum(list(self._bytes.values()))

    def begin(self, active: Collection[int]) -> None:
        """Wait for the gradients of these parameters."""
        self._bytes.clear()
        self._awaited = [
            {segment.parameter for segment in piece.segments} & set(active) for piece in self._layout.pieces
        ]
        self._active = set(active)

    def is_awaited(self, number: int) -> bool:
        """Return whether a piece waits for gradients."""
        return bool(self._awaited[number])

    def arrive(self, known: TrainedParameter) -> list[int]:
        """Count a gradient; return the pieces that are complete with it and can be computed."""
        self._bytes[known.number] = known.bytes_in_memory
        complete = []
        for number in known.pieces:
            awaited = self._awaited[number]
            awaited.discard(known.number)
            if awaited:
                continue
            used = [self._parameters[segment.parameter] for segment in self._layout.pieces[number].segments]
            awaited |= {one.number for one in used if one.number in self._active and not one.is_handed_over}
            if awaited:  # they were dropped since they came
                continue
            if self._has_record[number] and all(one.is_current for one in used):
                complete.append(number)
                continue
            for one in used:
                if not one.is_submitted:
                    one.put_away()
                    self.leave(one)
        return complete

    def leave(self, known: TrainedParameter) -> None:
        """Forget a gradient that is computed, or was put away."""
        self._bytes.pop(known.number, None)
