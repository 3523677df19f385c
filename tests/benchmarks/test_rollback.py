"""The undo log that shadow slots are measured against takes the same steps, and more bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.offload_loops import Loop, clipped, images_model, offloaded, plain, train, weights_equal

from benchmarks.offload.rollback import UndoLogStates, given_back
from hapi.offload import training


@pytest.mark.parametrize("loop", [plain, clipped])
def test_records_in_place_with_an_undo_log_take_the_same_steps(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = images_model(), images_model()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(9), loop)
    monkeypatch.setattr(training, "DiskStates", UndoLogStates)
    inner = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    with offloaded(twin, inner, tmp_path, keep_gradients=True) as moved:
        train(twin, moved, range(9), loop)
        moved._engine.settle()
        assert weights_equal(model, twin)
        states, traffic = moved._store, moved._engine.traffic
        assert isinstance(states, UndoLogStates)
        if loop is plain:  # 12 bytes logged and masters read beside 12 that are written
            assert 1.2 < states.logged_bytes * 9 / 8 / traffic.bytes_written < 1.5


def test_arithmetic_does_not_take_a_step_back() -> None:
    found = given_back(1 << 14)
    assert set(found) == {"values", "average", "squares"}
    assert 0 < found["values"] < 1 and found["average"] < 1 and found["squares"] < 1
