"""Large tensors of a pack begin at multiples of a cache line, and the file stays a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs.layout import ALIGNED_BYTES, ALIGNMENT
from hapi.repository.push import SourceLayer, push_tensors
from hapi.store.local import LocalStore


def test_large_tensors_are_aligned_behind_odd_ones(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    tensors = {
        f"{number}.{kind}": torch.randn(count) if kind == "weight" else torch.tensor(number)
        for number in range(4)
        for kind, count in (("weight", ALIGNED_BYTES // 4 + 3 * number), ("steps", 1))
    }
    layers = [
        SourceLayer(str(n), tuple(SourceTensor.of(k, t) for k, t in tensors.items() if k.startswith(f"{n}.")))
        for n in range(4)
    ]
    pushed = push_tensors(store, "net", layers)
    entries = open_model(store, "net").manifest.tensors
    large = [entry for entry in entries.values() if entry.nbytes >= ALIGNED_BYTES]
    assert len(large) == 4 and all(entry.start % ALIGNMENT == 0 for entry in large)
    assert any(entry.start % ALIGNMENT for entry in entries.values())  # small ones take no room
    assert pushed.written == sum(t.nbytes for t in tensors.values())
    assert all(torch.equal(got, tensors[name]) for name, got in open_model(store, "net").read(tensors))
    (pack,) = tmp_path.glob("repository/packs/*.safetensors")
    found = {name.partition(":")[0]: tensor for name, tensor in load_file(pack).items()}
    assert "padding" in found and not found["padding"].any()
    assert not push_tensors(store, "net", layers).new
