"""Safetensors files of torch tensors in a chosen order.

The library sorts tensors by type and name when it writes, so that layer 10 comes before layer 2. Its readers
accept any order (a test checks it): written in layer order, the tensors of layers 1..s are one range.
Format: 8 bytes header length (little endian), JSON header, tensor bytes without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from hapi.errors import BadRequestError, ModelError
from hapi.models.graph.digest import content_digest
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.store.safetensors import encode_header
from hapi.wire.documents import check_int, strict_fields
from hapi.wire.references import check_digest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_NAMES}
"""Element types that a model's tensors may have, by name."""

_MAX_ELEMENTS = 2**40
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class TensorEntry:
    """Location and form of one tensor in a weights file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    digest: str
    """Digest of its bytes (:func:`hapi.models.graph.digest.content_digest`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for side in self.shape:
            count *= side
        return count * DTYPES[self.dtype].itemsize

    @property
    def stop(self) -> int:
        """One past its last byte in the file."""
        return self.start + self.nbytes

    def to_json(self) -> dict[str, Any]:
        """Return the entry, as :meth:`from_json` reads it."""
        return {"dtype": self.dtype, "shape": list(self.shape), "start": self.start, "digest": self.digest}

    @classmethod
    def from_json(cls, name: str, document: Any) -> Self:
        """Parse one entry; :class:`BadRequestError` on anything unexpected."""
        what = f"tensor {name[:80]!r}"
        d = strict_fields(document, dict.fromkeys(("dtype", "shape", "start", "digest"), True), what)
        if not isinstance(d["dtype"], str) or d["dtype"] not in DTYPES:
            raise BadRequestError(f"{what}: dtype {d['dtype']!r:.40} is not one of {', '.join(DTYPES)}")
        if not isinstance(d["shape"], list) or len(d["shape"]) > _MAX_DIMENSIONS:
            raise BadRequestError(f"{what}: shape is no list of at most {_MAX_DIMENSIONS} sides")
        shape = tuple(check_int(side, 0, _MAX_ELEMENTS, what) for side in d["shape"])
        if (
            math.prod(side for side in shape if side) > _MAX_ELEMENTS
        ):  # torch counts so far, whatever a side of 0 says
            raise BadRequestError(f"{what}: it has more than 2^40 elements")
        start = check_int(d["start"], 8, 2**62, what)
        return cls(name, d["dtype"], shape, start, check_digest(d["digest"], what))


def encode(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[bytearray, list[TensorEntry]]:
    """Return a safetensors file of ``tensors`` in their order, and the location of each.

    Raises:
        ModelError: a tensor is not loaded, or has a type that such files cannot hold.
    """
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ModelError(f"tensor {name!r} is not loaded, so it cannot be written")
        if tensor.dtype not in STORED_NAMES:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}, which a weights file cannot hold")
    sizes = [tensor.numel() * tensor.itemsize for _, tensor in tensors]
    head = encode_header(
        (n, STORED_NAMES[t.dtype], t.shape, size) for (n, t), size in zip(tensors, sizes, strict=True)
    )
    out = bytearray(len(head) + sum(sizes))
    out[: len(head)] = head
    entries = []
    start = len(head)
    for name, tensor in tensors:
        data = tensor_bytes(tensor)
        out[start : start + len(data)] = data
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), start, content_digest(data)))
        start += len(data)
    return out, entries
