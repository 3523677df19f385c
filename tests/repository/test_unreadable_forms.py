"""What could not be read back is never written: shapes and descriptions beyond the bounds, before a byte is hashed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hapi.cli.main import main
from hapi.errors import ModelError
from hapi.repository import push as push_module
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.push import SourceLayer, push_tensors
from hapi.repository.verify import verify_model
from hapi.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            torch.zeros([1] * 17),
            "tensor 'a.deep' cannot be stored: it has 17 dimensions, and a store holds 16",
        ),
        (
            torch.zeros(1).expand(2**21, 2**20),
            "tensor 'a.deep' cannot be stored: it has more than 2^40 elements",
        ),
    ],
    ids=["dimensions", "elements"],
)
def test_a_checkpoint_of_torch(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], tensor: torch.Tensor, words: str
) -> None:
    torch.save({"a.weight": torch.ones(3), "a.deep": tensor}, tmp_path / "m.pth")
    assert main(["push", str(tmp_path / "m.pth"), f"{store.url}/m", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert store.list("models") == store.list("repository/packs") == []


def test_the_largest_forms_come_back(store: LocalStore, tmp_path: Path) -> None:
    torch.save({"a.deep": torch.ones([2] * 3 + [1] * 13), "b": torch.zeros(0, 2**40)}, tmp_path / "m.pth")
    assert main(["push", str(tmp_path / "m.pth"), f"{store.url}/m", "--quiet"]) == 0
    assert not verify_model(store, "m").damages
    shapes = {name: entry.shape for name, entry in open_model(store, "m").manifest.tensors.items()}
    assert shapes == {"a.deep": (2,) * 3 + (1,) * 13, "b": (0, 2**40)}


def test_a_description_that_is_too_long(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"w")

    layers = [SourceLayer(f"l{n}", (SourceTensor(f"l{n}.weight", "uint8", (1,), pieces),)) for n in range(99)]
    monkeypatch.setattr(push_module, "DOCUMENT_BYTES", 5000)
    with pytest.raises(
        ModelError, match=r"model 'm' cannot be described in a store .* 5000 are read.*; push"
    ):
        push_tensors(store, "m", layers)
    assert store.list("models") == store.list("repository/packs") == []
