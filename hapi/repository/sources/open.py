"""Any checkpoint on this machine as a source of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
from hapi.repository.sources.sharded import INDEX_SUFFIX, read_index, read_shards, total_notes
from hapi.repository.sources.torch_file import read_torch_file

_SAFETENSORS = ".safetensors"
_METADATA = "__metadata__"
"""Key of a safetensors header that no tensor can have."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Texts that ``DataParallel`` and ``torch.compile`` put before every name."""
_AVERAGED = "n_averaged"
"""Tensor that ``torch.optim.swa_utils.AveragedModel`` has beside those of the network in it."""


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
    wrappers: tuple[str, ...] = ()
    """Texts that stood before every name, the first ones first."""

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

    def named_as(self, names: Collection[str]) -> Mapping[str, SourceTensor]:
        """Return the tensors for a network with tensors of these names.

        It may be a part of what was saved, as it is of Lightning's modules: the only one with all of these names. It
        may also have a part that is called as wrappers call what is in them.
        """
        for first in range(len(self.wrappers)):
            before = "".join(self.wrappers[first:])
            if all(name.startswith(before) for name in names):
                return {f"{before}{name}": tensor for name, tensor in self.tensors.items()}
        some = next((name for name in names if name not in self.tensors), None)
        if some is not None:
            places = [name.removesuffix(some) for name in self.tensors if name.endswith(f".{some}")]
            parts = [at for at in places if all(f"{at}{name}" in self.tensors for name in names)]
            if len(parts) == 1:
                return {name: self.tensors[f"{parts[0]}{name}"] for name in names}
        return self.tensors

    def load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return all tensors in memory, by name as :meth:`named_as` does."""
        return {name: _loaded(tensor) for name, tensor in self.named_as(names).items()}


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
        path: a ``.safetensors`` file, a file of ``torch.save`` (``.pth``, ``.pt``, ``.bin``, ``.ckpt``,
            ``.pth.tar``), an ``index.json`` of a sharded checkpoint, or a folder with one of them.

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
        return _unwrapped(TensorSource(target, "safetensors", 1, header.tensors, header.metadata))
    loaded = read_torch_file(SourceFile.at(target))
    return _unwrapped(TensorSource(target, "PyTorch", 1, loaded.tensors, {}, loaded.notes))


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
    notes += total_notes(index, sum(tensor.nbytes for tensor in tensors.values()), sum(tied))
    files = len(set(index.shards.values()))
    return _unwrapped(TensorSource(target, "sharded", files, tensors, {}, tuple(notes)))


def _is_text(name: str) -> bool:
    """Return whether the name can be written: JSON may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unwrapped(source: TensorSource) -> TensorSource:
    """The source without what wrappers of the network put before every name, or beside its tensors.

    Raises:
        ModelError: a file of tensors cannot hold one of the names.
    """
    tensors, wrappers = dict(source.tensors), list[str]()
    if (
        len(tensors) > 1
        and _AVERAGED in tensors
        and all(name.startswith("module.") for name in tensors.keys() - {_AVERAGED})
    ):
        del tensors[_AVERAGED]
    while tensors and (before := next((w for w in _WRAPPERS if _wraps(w, tensors)), None)):
        wrappers.append(before)
        tensors = {name.removeprefix(before): tensor for name, tensor in tensors.items()}
    for name in tensors:
        if name == _METADATA or not _is_text(name):
            raise ModelError(
                f"{source.path}: no file of tensors can hold the name {name[:80]!r}; rename that tensor"
            )
    named = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    return replace(source, tensors=named, wrappers=tuple(wrappers))


def _wraps(before: str, names: Collection[str]) -> bool:
    return all(len(name) > len(before) and name.startswith(before) for name in names)
