"""Checkpoints of ``torch.save``: tensors' forms from the pickle, without running code, and bytes where they lie."""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hapi.errors import ModelError
from hapi.models.fake_log import without_fake_log
from hapi.models.tensors import STORED_NAMES
from hapi.repository.entries import SourceTensor
from hapi.repository.sources.files import SourceFile
from hapi.repository.sources.inert_objects import inert_objects
from hapi.repository.sources.nested_states import left_out, state_in
from hapi.repository.sources.strided import StridedView
from hapi.repository.sources.torch_damage import load_error, nested_error
from hapi.units import format_bytes

_MAX_PICKLE_BYTES = 256 << 20
"""Longest pickle that is read: a hundred times that of a model with ten thousand tensors."""
_LOCAL_HEADER_BYTES = 30
_ARCHIVE = b"PK"
"""First bytes of an archive, which torch.save writes since PyTorch 1.6."""


@dataclass(frozen=True)
class TorchFile:
    """Tensors of a file of ``torch.save``."""

    tensors: Mapping[str, SourceTensor]
    """By name, in the order in which they were saved."""
    notes: tuple[str, ...] = ()
    """Lines that a user should see."""
    tied_bytes: int = 0
    """Bytes of tensors that share a storage with one before them: the libraries that write an index count it once."""


def read_torch_file(file: SourceFile) -> TorchFile:
    """Return the tensors of ``file``; no code in it is run.

    Only descriptions are read, and the tensors where they lie when they are needed. A file of the format before
    PyTorch 1.6 is loaded whole.

    Raises:
        ModelError: it holds no state dict, or is damaged.
    """
    if file.read(0, min(len(_ARCHIVE), file.size)) != _ARCHIVE:
        return _read_old(file)
    storages = _storages(file)
    with FakeTensorMode():
        state, notes = _load(file)
    tensors = {name: _located(file, name, tensor, storages) for name, tensor in state.items()}
    homes = {name: _offset(tensor) for name, tensor in state.items()}
    return TorchFile(tensors, notes, _tied_bytes(tensors, homes))


def _read_old(file: SourceFile) -> TorchFile:
    state, notes = _load(file)
    note = (
        f"{file.path} has the format before PyTorch 1.6, so all of its {format_bytes(file.size)} were loaded into "
        "memory; torch.save writes it anew in one that is read piece by piece"
    )
    tensors = {name: SourceTensor.of(name, tensor) for name, tensor in state.items()}
    homes = {n: t.untyped_storage().data_ptr() for n, t in state.items() if t.layout == torch.strided}
    return TorchFile(tensors, (note, *notes), _tied_bytes(tensors, homes))


def _tied_bytes(tensors: Mapping[str, SourceTensor], homes: Mapping[str, object]) -> int:
    """Bytes of tensors whose storage is that of an earlier one, given the place of each storage by name."""
    first = {home: name for name, home in reversed(list(homes.items()))}
    return sum(tensors[name].nbytes for name, home in homes.items() if first[home] != name)


def _offset(tensor: torch.Tensor) -> object:
    """First byte in its file of a fake tensor's storage; None where it has none there."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)  # torch's docs name it


def _load(file: SourceFile) -> tuple[Mapping[str, torch.Tensor], tuple[str, ...]]:
    """The state dict in ``file``, alone or among other states of a training, and lines that a user should see."""
    try:
        with inert_objects(), warnings.catch_warnings(), without_fake_log():
            warnings.simplefilter("ignore")  # what torch guesses of a file that is none of its own
            loaded: Any = torch.load(file.path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise load_error(file, error) from error
    if isinstance(loaded, dict) and {"trained", "identity", "progress"} <= loaded.keys():
        raise ModelError(
            f"weights file {file.path} is a checkpoint of hapi-train and holds only the trained layers; write the "
            f"whole network with 'hapi export {file.path} --output model.safetensors' and give that"
        )
    state = state_in(loaded)
    if isinstance(state, str):
        raise ModelError(f"weights file {file.path} holds no state dict (names to tensors): {state}")
    if any(tensor.is_nested for tensor in state.values()):
        raise nested_error(file)
    others = left_out(loaded, state)
    note = f"{file.path} also has other values of these tensors, in {', '.join(others)}; save them alone to use them"
    return state, (note,) if others else ()


def _storages(file: SourceFile) -> dict[int, int]:
    """First byte and number of bytes of each storage in the archive."""
    what = f"weights file {file.path}"
    try:
        with zipfile.ZipFile(file.path) as archive:
            records = archive.infolist()
    except (ValueError, LookupError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise ModelError(
            f"{what} is damaged: it begins as an archive, but has no list of contents at its end ({str(error)[:100]}); "
            "copy or download it again"
        ) from None
    except OSError as error:
        raise load_error(file, error) from error
    if not any(Path(record.filename).name == "data.pkl" for record in records):
        raise ModelError(
            f"{what} is an archive, but no checkpoint of torch.save: it has no data.pkl; unpack it if it has one in it"
        )
    if any(Path(record.filename).name == "constants.pkl" for record in records):
        raise ModelError(f"{what} is a TorchScript program, not a state dict; save model.state_dict()")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ModelError(f"{what} is compressed, which torch.save never does; unpack what was zipped")
    found = {}
    for record in records:
        parts = Path(record.filename).parts
        if parts[-1:] == ("data.pkl",) and record.file_size > _MAX_PICKLE_BYTES:
            raise ModelError(
                f"{what} has a pickle of {format_bytes(record.file_size)}: it holds more than tensors"
            )
        if parts[-1:] == ("byteorder",):
            order = file.read(*_content(file, record))
            if order != b"little":
                raise ModelError(
                    f"{what} was saved on a machine of another byte order; save it anew on this one"
                )
        if len(parts) > 1 and parts[-2] == "data":
            start, stop = _content(file, record)
            found[start] = stop - start
    return found


def _content(file: SourceFile, record: zipfile.ZipInfo) -> tuple[int, int]:
    """First byte and end of a record's content, which is stored as it is."""
    first = min(record.header_offset, file.size)
    head = file.read(first, min(first + _LOCAL_HEADER_BYTES, file.size))
    name, extra = int.from_bytes(head[26:28], "little"), int.from_bytes(head[28:30], "little")
    start = record.header_offset + _LOCAL_HEADER_BYTES + name + extra
    if len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04" or start + record.file_size > file.size:
        raise ModelError(
            f"weights file {file.path} is damaged: record {record.filename[:80]!r} lies outside of it"
        )
    return start, start + record.file_size


def _located(file: SourceFile, name: str, tensor: torch.Tensor, storages: Mapping[int, int]) -> SourceTensor:
    """The tensor as a view of a storage in ``file``; :class:`ModelError` if it is none."""
    what = f"weights file {file.path}: tensor {name[:80]!r}"
    if tensor.dtype not in STORED_NAMES or tensor.layout != torch.strided or tensor.is_quantized:
        raise ModelError(f"{what} is {tensor.dtype}, {tensor.layout}, which a store does not hold")
    if tensor.is_conj() or tensor.is_neg():
        raise ModelError(f"{what} is a conjugated or negated view; save its resolve_conj().resolve_neg()")
    start = _offset(tensor)
    if not isinstance(start, int) or start not in storages:
        raise ModelError(f"{what} has no bytes of its own in the file; save it from the CPU")
    first = start + int(tensor.storage_offset()) * tensor.itemsize
    view = StridedView(file, first, tensor.dtype, tuple(tensor.shape), tensor.stride())
    if view.stop > start + storages[start]:
        raise ModelError(f"{what} lies outside of its storage: the file is damaged")
    return SourceTensor(name, str(tensor.dtype).removeprefix("torch."), view.shape, view.pieces)
