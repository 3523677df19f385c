"""Where the batches of a pass get their splits from: one for all, named by the caller, or planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hapi.client.job import ExtractionJob
from hapi.client.planning import Planning
from hapi.client.prepare import Prepared
from hapi.errors import UsageError


class Splits(Protocol):
    """Where the batches of a pass get their splits from."""

    def open(self, number: int) -> ExtractionJob:
        """The job of batch ``number``, which opens; from any thread."""

    def done(self, number: int, split: int, rates: list[tuple[int, float]]) -> None:
        """Batch ``number`` was handed out and worked on."""

    def failed(self, number: int, split: int) -> bool:
        """Batch ``number`` did not fit this side's memory; whether it is to be tried at another split."""

    def end(self) -> None:
        """All batches are done."""


@dataclass
class Fixed:
    prepared: Prepared
    split: int
    validation: bool = False

    def open(self, number: int) -> ExtractionJob:
        return self.prepared.job(self.split, validation=self.validation)

    def done(self, number: int, split: int, rates: list[tuple[int, float]]) -> None:
        return

    def failed(self, number: int, split: int) -> bool:
        return False

    def end(self) -> None:
        return


class Named(Fixed):
    """The caller names the splits."""

    def __init__(self, prepared: Prepared, split_of: Callable[[int], int]) -> None:
        super().__init__(prepared, 0)
        self._split_of = split_of

    def open(self, number: int) -> ExtractionJob:
        split = self._split_of(number)
        if split not in self.prepared.pushable:
            raise UsageError(f"split {split} is outside 0 to {self.prepared.pushable.stop - 1}")
        return self.prepared.job(split)


@dataclass
class Planned:
    prepared: Prepared
    planning: Planning
    epoch: int

    def open(self, number: int) -> ExtractionJob:
        split, time_layers = self.planning.open(self.epoch, number)
        return replace(self.prepared.job(split), time_layers=time_layers)

    def done(self, number: int, split: int, rates: list[tuple[int, float]]) -> None:
        self.planning.batch_done(self.epoch, number, split, rates)

    def failed(self, number: int, split: int) -> bool:
        return self.planning.failed(self.epoch, number, split)

    def end(self) -> None:
        self.planning.end_pass()
