"""Fine-tunes of one backbone in a store: each is its tail, and a description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hapi.api.pushing import push_model
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.push import Pushed
from hapi.store.local import LocalStore

SPEC = ModelSpec(architecture="resnet18", weights="random:0", num_classes=10, input_shape=(3, 64, 64))


CLASSES = tuple("abcdefghij")
DEFAULT_FREEZE, HEAD_ALONE = 11, 13
DESCRIPTION_BYTES = 8 << 10
"""Bytes that a version and its pack's header may take; ResNet18 has 122 tensors."""


class FineTunes:
    """Models that differ from a pushed one behind layer ``freeze``, each pushed from its model file."""

    def __init__(self, root: Path, freeze: int) -> None:
        self.store = f"{root}/store"
        self._file = root / "tuned.safetensors"
        state = build(SPEC).module.state_dict()
        self._state = {name: _drawn(name, tensor) for name, tensor in state.items()}
        write_model(
            self._file, self._state, ModelCard(spec=SPEC, classes=CLASSES, transform=None, freeze=freeze)
        )
        self.base = push_model(str(self._file), f"{self.store}/base").model.manifest
        self.tail = [name for layer in self.base.layers[freeze:] for name in layer.tensors]
        self.tail_bytes = sum(self.base.tensors[name].nbytes for name in self.tail)
        self._card = ModelCard(
            spec=SPEC, pushed=self.base.reference, classes=CLASSES, transform=None, freeze=freeze
        )

    def push(self, number: int) -> Pushed:
        """Push fine-tune ``number``."""
        torch.manual_seed(number)
        changed = {name: _drawn(name, self._state[name]) for name in self.tail}
        write_model(self._file, {**self._state, **changed}, self._card)
        return push_model(str(self._file), f"{self.store}/tuned-{number}")

    def stored_bytes(self) -> int:
        """Bytes of all objects of the store."""
        return sum(info.size for info in LocalStore(self.store).list())


def _drawn(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Random content, so that no two tensors are alike, as after a training."""
    return tensor if "num_batches" in name else torch.randn(tensor.shape)


def stored(root: Path, count: int, freeze: int) -> None:
    """Push ``count`` fine-tunes and check what they take; then one more."""
    tunes = FineTunes(root, freeze)
    for number in range(count):
        pushed = tunes.push(number)
        assert pushed.written == tunes.tail_bytes and pushed.model.manifest.parent == "base@1"
    needed = tunes.base.nbytes + count * tunes.tail_bytes
    before = tunes.stored_bytes()
    assert before <= 1.01 * needed
    last = tunes.push(count)
    assert last.written == tunes.tail_bytes
    assert tunes.stored_bytes() - before <= 1.01 * tunes.tail_bytes + DESCRIPTION_BYTES
    backbone = [name for name in tunes.base.tensors if name not in tunes.tail]
    places = {(e.pack, e.start) for e in map(last.model.manifest.tensors.__getitem__, backbone)}
    assert places == {(e.pack, e.start) for e in map(tunes.base.tensors.__getitem__, backbone)}


@pytest.mark.slow
def test_a_fine_tune_is_its_tail(tmp_path: Path) -> None:
    stored(tmp_path, 1, DEFAULT_FREEZE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("freeze", [DEFAULT_FREEZE, HEAD_ALONE])
def test_fifty_fine_tunes_take_one_backbone_and_their_tails(tmp_path: Path, freeze: int) -> None:
    stored(tmp_path, 50, freeze)
