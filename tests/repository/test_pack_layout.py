"""Division of a model into packs: work that grows with the number of its tensors, not with the square."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hapi.repository.entries import SourceTensor, TensorForm
from hapi.repository.packs import layout
from hapi.repository.push import SourceLayer, push_tensors
from hapi.store.local import LocalStore


def test_a_push_of_many_layers_makes_each_header_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    calls: Counter[str] = Counter()
    encode, nbytes = layout.encode_header, TensorForm.nbytes.fget

    def encoded(*arguments: Any) -> bytes:
        calls["headers"] += 1
        return encode(*arguments)

    def counted(form: TensorForm) -> int:
        calls["sizes"] += 1
        return int(nbytes(form))  # type: ignore[misc]

    monkeypatch.setattr(layout, "encode_header", encoded)
    monkeypatch.setattr(TensorForm, "nbytes", property(counted))
    tensors = [SourceTensor.of(f"t{n}", torch.full((4,), float(n))) for n in range(count)]
    model = push_tensors(LocalStore(tmp_path), "m", [SourceLayer(t.name, (t,)) for t in tensors]).model
    assert len(model.manifest.packs) == 1 and calls["headers"] == 1
    assert calls["sizes"] < 50 * count
