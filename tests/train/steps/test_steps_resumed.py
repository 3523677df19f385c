"""Every feature of the steps goes on bitwise after an interrupt, also in the middle of an accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import Interrupting, open_session, trainer_of

from hapi.wire.transport.http import Handler

ALL: dict[str, Any] = {
    "schedule": "one-cycle", "warmup": 2, "clip_norm": 5.0, "accumulate": 2, "ema": 0.9, "precision": "fp16",
    "head_lr": 0.02, "decay_norm_bias": False, "weight_decay": 0.01, "optimizer": "adamw", "class_weights": "balanced",
}  # fmt: skip


def state_after(
    remembered: Handler, at: int | None, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Trained and averaged layers, and the report's figures that the steps make."""
    with open_session(remembered, **changes) as session:
        trainer = trainer_of(session, None if at is None else Interrupting(at), **changes)
        if at is not None:
            with pytest.raises(KeyboardInterrupt):
                trainer.run()
            return {}, []
        report = trainer.run()
        layers = {"trained": trainer.trained, "evaluated": trainer._step.evaluated}
        state = {f"{k}.{n}": t.clone() for k, m in layers.items() for n, t in m.state_dict().items()}
    figures = (
        "loss",
        "learning_rate",
        "gradient_norm",
        "largest_gradient_norm",
        "clipped_steps",
        "skipped_steps",
    )
    return state, [[entry.get(name) for name in figures] for entry in report["epochs"]]


@pytest.mark.slow_except("{'accumulate': 3, 'class_weights': 'balanced'}-7")
@pytest.mark.parametrize(
    ("changes", "at"),
    [
        (ALL, 8),
        ({"accumulate": 3, "class_weights": "balanced"}, 7),
        *(
            pytest.param(changes, at, marks=pytest.mark.slow)
            for changes, at in (
                ({"schedule": "cosine", "warmup": "0.5ep"}, 4),
                ({"clip_norm": 5.0}, 3),
                ({"accumulate": 3}, 2),
                ({"ema": 0.9}, 6),
                ({"precision": "fp16"}, 3),
                ({"precision": "bf16"}, 3),
                (ALL, 1),
            )
        ),
    ],
    ids=str,
)
def test_resumed_bitwise(remembered: Handler, tmp_path: Path, changes: dict[str, Any], at: int) -> None:
    path = str(tmp_path / "training.pt")
    whole, expected = state_after(remembered, None, **changes)
    state_after(remembered, at, checkpoint=path, **changes)
    state, figures = state_after(remembered, None, checkpoint=path, resume=True, **changes)
    assert figures == expected
    assert state.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(state[name], value), name
