"""One safetensors file: its header is read, and its tensors where they lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from hapi.errors import BadRequestError, DataError, ModelError
from hapi.models.tensors import STORED_NAMES
from hapi.repository.entries import DTYPES, SourceTensor, TensorForm
from hapi.repository.sources.files import SourceFile
from hapi.store.safetensors import header_bytes
from hapi.wire.documents import parse_document

_TYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in STORED_NAMES.items()}
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class SafetensorsHeader:
    """Description of a safetensors file."""

    tensors: Mapping[str, SourceTensor]
    """By name, in layer order as far as it can be told."""
    metadata: Mapping[str, str]


def read_safetensors(file: SourceFile) -> SafetensorsHeader:
    """Return the tensors of ``file``; only its header is read.

    Raises:
        ModelError: it is no safetensors file, or its header describes other bytes than it has.
    """
    what = f"weights file {file.path}"
    try:
        length = header_bytes(file.read(0, min(8, file.size)), file.size, what)
        document = parse_document(file.read(8, length))
        if not isinstance(document, dict):
            raise ValueError("its header is no table")
        metadata = document.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("its metadata are no table of texts")
        located = sorted(
            (_located(name, entry, length) for name, entry in document.items()), key=lambda found: found[1:]
        )
        _check_layout(located, length, file.size)
    except DataError as error:
        raise ModelError(str(error)) from None
    except (ValueError, BadRequestError) as error:
        raise ModelError(f"{what} is damaged or no safetensors file: {str(error)[:200]}") from None
    tensors = {
        form.name: SourceTensor(form.name, form.dtype, form.shape, partial(file.pieces, start, stop))
        for form, start, stop in located
    }
    if all(_alphabetical(a, b) for a, b in pairwise(tensors.values())):
        tensors = dict(sorted(tensors.items(), key=lambda item: natural_order(item[0])))
    return SafetensorsHeader(tensors, metadata)


def natural_order(name: str) -> tuple[Any, ...]:
    """Return a key that sorts tensors by module, with ``layers.10`` after ``layers.2``."""
    module, _, last = name.rpartition(".")
    parts: list[Any] = _DIGITS.split(module)  # texts, and at odd places runs of digits
    runs = [part.lstrip("0") for part in parts[1::2]]
    parts[1::2] = [(len(run), run) for run in runs]  # the order of their numbers, however long they are
    return tuple(parts), last


def _alphabetical(first: SourceTensor, second: SourceTensor) -> bool:
    """Return whether two neighbours are as safetensors' own writer puts them: the order tells nothing of layers."""
    if first.dtype == second.dtype:
        return first.name < second.name
    return DTYPES[first.dtype].itemsize >= DTYPES[second.dtype].itemsize


def _located(name: str, entry: Any, first: int) -> tuple[TensorForm, int, int]:
    """Form, first byte and end of one tensor; ValueError or BadRequestError for a malformed entry."""
    what = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} is not described by dtype, shape and data_offsets")
    dtype, offsets = entry["dtype"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise ValueError(f"{what} has type {dtype!r:.40}; a store holds {', '.join(_TYPES)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(o) is not int for o in offsets):
        raise ValueError(f"{what}: data_offsets are no pair of numbers")
    form = TensorForm.from_json([name, _TYPES[dtype], entry["shape"]])
    start, stop = offsets
    if stop - start != form.nbytes:
        raise ValueError(f"{what} has {stop - start} bytes, but its shape needs {form.nbytes}")
    return form, first + start, first + stop


def _check_layout(located: list[tuple[TensorForm, int, int]], first: int, size: int) -> None:
    """ValueError unless the tensors fill the file without gaps, as the format demands."""
    position = first
    for form, start, stop in located:
        if start != position:
            where = "overlaps the one before it" if start < position else "leaves a gap before it"
            raise ValueError(f"tensor {form.name[:80]!r} {where} (byte {start})")
        position = stop
    if position != size:
        raise ValueError(
            f"its tensors end at byte {position}, but it has {size} bytes: it was cut or extended"
        )
