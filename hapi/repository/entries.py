"""Tensors of a pushed model: their forms, where their bytes lie in a store, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from hapi.errors import BadRequestError, ModelError
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.wire.documents import check_int
from hapi.wire.references import check_digest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in STORED_NAMES}
"""Element types that a model's tensors may have, by name."""
PIECE_BYTES = 8 << 20
"""Bytes of a tensor that are read and written at a time."""

_MAX_ELEMENTS = 2**40
_MAX_DIMENSIONS = 16


@dataclass(frozen=True)
class TensorForm:
    """Name, element type and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def refusal(self) -> str | None:
        """The reason why no store can hold a tensor of this form; None where one can."""
        if len(self.shape) > _MAX_DIMENSIONS:
            return f"it has {len(self.shape)} dimensions, and a store holds {_MAX_DIMENSIONS} at most"
        # torch counts so far, whatever a side of 0 says.
        if math.prod(side for side in self.shape if side) > _MAX_ELEMENTS:
            return "it has more than 2^40 elements"
        return None

    def to_json(self) -> list[Any]:
        """Return the form, as :meth:`from_json` reads it."""
        return [self.name, self.dtype, list(self.shape)]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse one form; :class:`BadRequestError` on anything unexpected."""
        if not isinstance(document, list) or len(document) != 3 or not isinstance(document[0], str):
            raise BadRequestError("a tensor's form is no list of name, dtype and shape")
        name, dtype, shape = document
        what = f"tensor {name[:80]!r}"
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise BadRequestError(f"{what}: dtype {dtype!r:.40} is not one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise BadRequestError(f"{what}: shape is no list of at most {_MAX_DIMENSIONS} sides")
        found = cls(name, dtype, tuple(check_int(side, 0, _MAX_ELEMENTS, what) for side in shape))
        if found.refusal is not None:
            raise BadRequestError(f"{what}: {found.refusal}")
        return found


@dataclass(frozen=True)
class TensorEntry(TensorForm):
    """Form and location of one tensor in a store."""

    digest: str
    """Identity of its bytes: 32 hex digits (:func:`hapi.models.graph.digest.content_digest`)."""
    checksum: str
    """Checksum of its bytes (:func:`hapi.repository.checksums.joined`), 16 hex digits. It finds damage at a fraction of
    the digest's cost."""
    pack: str
    """Key of the object that holds it."""
    start: int
    """First byte in that object."""

    @property
    def stop(self) -> int:
        """One past its last byte in the object."""
        return self.start + self.nbytes

    @property
    def form(self) -> TensorForm:
        """The tensor without its content."""
        return TensorForm(self.name, self.dtype, self.shape)


@dataclass(frozen=True, eq=False)
class SourceTensor(TensorForm):
    """A tensor to be pushed, wherever its bytes are."""

    pieces: Callable[[], Iterator[memoryview]]
    """Reads its bytes from the first on, in pieces of any size; called more than once. A piece is valid until the
    next one."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Self:
        """Return a tensor that is in memory.

        Raises:
            ModelError: it is not loaded, or has a type that a file of tensors cannot hold.
        """
        if tensor.is_meta:
            raise ModelError(f"tensor {name!r} is not loaded, so it cannot be written")
        if tensor.dtype not in STORED_NAMES:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}, which a weights file cannot hold")

        def pieces() -> Iterator[memoryview]:
            data = tensor_bytes(tensor)
            for start in range(0, len(data), PIECE_BYTES):
                yield data[start : start + PIECE_BYTES]

        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), pieces)


def check_checksum(value: Any, what: str) -> str:
    """Return ``value`` if it is 16 hex digits; raise :class:`BadRequestError` otherwise."""
    if len(check_digest(value, what)) != 16:
        raise BadRequestError(f"{what}: a checksum has 16 hex digits")
    return str(value)
