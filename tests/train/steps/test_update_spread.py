"""Seconds of an update are counted for all batches of its accumulation, none twice."""

from __future__ import annotations

import pytest
import torch

from hapi.client.planning.meter import Meter
from hapi.train.steps.update_spread import UpdateSpread


class Shifts(Meter):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.shifts: list[float] = []

    def shift_step(self, seconds: float) -> None:
        self.shifts.append(seconds)


def test_an_update_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes 1 s and the update 4 s: from the second group on every batch counts 2 s."""
    meter, now = Shifts(), [0.0]
    spread = UpdateSpread(meter, torch.device("cpu"), 4)
    monkeypatch.setattr(spread, "_clock", lambda: now[0])
    counted = []
    for batch in range(14):
        is_last = batch % 4 == 3 or batch == 13
        with spread.batch(is_last):
            now[0] += 4.0 if is_last else 0.0
        counted.append(1.0 + 4.0 * is_last + meter.shifts[-1])
    assert counted[:4] == [1, 1, 1, 5] and counted[4:12] == [2] * 8
    assert sum(counted) == 14 + 4 * 4


def test_one_batch_a_step_shifts_nothing() -> None:
    meter = Shifts()
    with UpdateSpread(meter, torch.device("cpu"), 1).batch(True):
        pass
    assert meter.shifts == []
