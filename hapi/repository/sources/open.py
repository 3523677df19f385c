"""Any checkpoint on this machine as a source of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hapi.errors import ModelError
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.names import checkpoint_in
from hapi.paths import is_folder, user_path
from hapi.repository.entries import DTYPES, SourceTensor
from hapi.repository.sources.files import SourceFile
from hapi.repository.sources.safetensors_file import read_safetensors
from hapi.repository.sources.sharded import INDEX_SUFFIX, check_total, read_index, read_shards
from hapi.repository.sources.torch_file import read_torch_file

_SAFETENSORS = ".safetensors"
_METADATA = "__metadata__"
"""Key of a safetensors header that no tensor can have."""


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint: its tensors, described but not read."""

    path: Path
    form: str
    """Kind of the checkpoint, in words."""
    files: int
    """Number of files with tensors."""
    tensors: Mapping[str, SourceTensor]
    """By name, in layer order as far as it can be told: as they were saved, or by module if that was alphabetical."""
    metadata: Mapping[str, str]
    """Texts in a safetensors file's header; none for other forms."""
    notes: tuple[str, ...] = ()
    """Lines that a user should see."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def layers(self) -> list[tuple[str, list[SourceTensor]]]:
        """Return the tensors by the path of their module, in the order of each module's first tensor.

        A tensor of no module is a layer of its own name.
        """
        layers: dict[str, list[SourceTensor]] = {}
        for name, tensor in self.tensors.items():
            layers.setdefault(name.rpartition(".")[0] or name, []).append(tensor)
        return list(layers.items())

    def load(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, in memory."""
        return {name: _loaded(tensor) for name, tensor in self.tensors.items()}


def _loaded(tensor: SourceTensor) -> torch.Tensor:
    loaded = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    out, start = tensor_bytes(loaded), 0
    for piece in tensor.pieces():
        out[start : start + len(piece)] = piece
        start += len(piece)
    return loaded


def open_source(path: str | Path) -> TensorSource:
    """Describe the checkpoint at ``path``; only headers are read.

    Args:
        path: a ``.safetensors`` file, a file of ``torch.save`` (``.pth``, ``.pt``, ``.bin``, ``.ckpt``), an
            ``index.json`` of a sharded checkpoint, or a folder with one of them.

    Raises:
        ModelError: there is no checkpoint, or it is damaged.
    """
    target = user_path(path, "weights")
    if is_folder(target):
        target = checkpoint_in(target)
    if target.name.endswith(INDEX_SUFFIX):
        return _sharded(target)
    if target.suffix == _SAFETENSORS:
        header = read_safetensors(SourceFile.at(target))
        return TensorSource(target, "safetensors", 1, _unwrapped(target, header.tensors), header.metadata)
    loaded = read_torch_file(SourceFile.at(target))
    return TensorSource(target, "PyTorch", 1, _unwrapped(target, loaded.tensors), {}, loaded.notes)


def _sharded(target: Path) -> TensorSource:
    notes: list[str] = []
    tied: list[int] = []

    def read(shard: Path) -> Mapping[str, SourceTensor]:
        if shard.suffix == _SAFETENSORS:
            return read_safetensors(SourceFile.at(shard)).tensors
        loaded = read_torch_file(SourceFile.at(shard))
        notes.extend(loaded.notes)
        tied.append(loaded.tied_bytes)
        return loaded.tensors

    index = read_index(target)
    tensors = read_shards(index, read)
    check_total(index, sum(tensor.nbytes for tensor in tensors.values()), sum(tied))
    files = len(set(index.shards.values()))
    return TensorSource(target, "sharded", files, _unwrapped(target, tensors), {}, tuple(notes))


def _is_text(name: str) -> bool:
    """Return whether the name can be written: JSON may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unwrapped(path: Path, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """The tensors without the ``module.`` that ``DataParallel`` puts before every name.

    Raises:
        ModelError: a file of tensors cannot hold one of the names.
    """
    wrapped = all(name.startswith("module.") for name in tensors)
    for name in tensors:
        if name == _METADATA or not _is_text(name):
            raise ModelError(
                f"{path}: no file of tensors can hold the name {name[:80]!r}; rename that tensor"
            )
    short = {name.removeprefix("module.") if wrapped else name: tensor for name, tensor in tensors.items()}
    return {name: replace(tensor, name=name) for name, tensor in short.items()}
